"""The content of a DataLoader's `state_dict()`.

The fields have the names that torchdata's `StatefulDataLoader` gives to the same things. Fields of our own have no
underscore in front.

    version                     of these fields
    _steps_since_snapshot       always 0: the position is exact
    _iterator_finished          whether the loop has met the end of the epoch
    _snapshot
        _snapshot_step              batches that the loop got in this epoch
        _last_yielded_worker_id     which worker's shard gave the last one; streams only
        _main_snapshot              the draws, see `DrawsState`
        _worker_snapshots           by worker: the state of its dataset or of the iterator over it
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from swift_loader.dataloader.draws import DrawsState
from swift_loader.dataloader.options import shard_of
from swift_loader.errors import StateMismatch

VERSION = 1


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """The state of a worker's dataset at some batch, and how many batches the loop got from it since."""

    dataset_state: Any = None
    """What the dataset's `state_dict()` returned; None if it has none, or if it is its own iterator."""
    iterator_state: Any = None
    """What the `state_dict()` of the iterator over a stream returned; None if it has none."""
    has_ended: bool = False
    """Whether the state was taken when its shard of the stream was over."""
    num_since: int = 0
    """How many batches the loop got from it after the state was taken. They are skipped."""
    num_batches: int = 0
    """How many batches of its shard the loop got in this epoch. If the loader shares the stream out: how many batches
    of the rank's part had been read when the state was taken."""
    num_to_skip: int = 0
    """How many samples other ranks get first when the state is restored; see `RankSamples`."""
    is_over: bool = False
    """Whether the loop got all batches of its shard, and it is known that there are no more."""
    next_batch: int | None = None
    """If the loader shares the stream out: which batch of the rank's part the worker builds next."""

    def pack(self, *, is_stream: bool) -> dict[str, Any]:
        """Return it as it is in the state."""
        ended = self.has_ended or self.is_over
        fetcher = {"dataset_iter_state": self.iterator_state, "fetcher_ended": ended} if is_stream else None
        return {
            "fetcher_state": fetcher,
            "dataset_state": self.dataset_state,
            "steps_since_snapshot": self.num_since,
            "num_batches": self.num_batches,
            "has_ended": self.has_ended,
            "num_to_skip": self.num_to_skip,
            "next_batch": self.next_batch,
        }

    @classmethod
    def unpack(cls, packed: Mapping[str, Any]) -> WorkerSnapshot:
        """Return what `pack` was called on."""
        fetcher = packed["fetcher_state"] or {}
        ended = bool(fetcher.get("fetcher_ended", False))
        return cls(
            packed["dataset_state"],
            fetcher.get("dataset_iter_state"),
            bool(packed.get("has_ended", ended)),
            packed.get("steps_since_snapshot", 0),
            packed.get("num_batches", 0),
            packed.get("num_to_skip", 0),
            ended,
            packed.get("next_batch"),
        )

    @property
    def has_state(self) -> bool:
        """Whether it can be restored without skipping all batches."""
        return self.dataset_state is not None or self.iterator_state is not None


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """Where a DataLoader is in its epoch."""

    num_workers: int
    is_stream: bool
    num_yielded: int
    """Batches that the loop got in this epoch."""
    draws: DrawsState
    last_worker: int = -1
    """The worker whose shard gave the last batch; -1 before the first. Only for streams."""
    ahead: tuple[int, ...] = ()
    """Later steps that the loop won't get: it got them before earlier ones, with `in_order=False`."""
    workers: tuple[WorkerSnapshot, ...] = field(default=())
    """By worker id. One, with `num_workers=0`."""
    length_called: int | None = None
    """What `len` of the stream returned, if the user has asked the loader for its length."""
    num_sharing: int = 0
    """How many ranks the loader shares the stream out to, and to its workers. 0: the dataset does that."""

    @property
    def next_batch(self) -> int | None:
        """Which batch of a shared stream is next. None: later ones came before it."""
        batches = [one.next_batch or 0 for one in self.workers]
        first = min(batches, default=0)
        return first if max(batches, default=0) - first < max(1, len(batches)) else None

    def latest(self, max_batches: int | None) -> WorkerSnapshot:
        """Return the latest state of a shared stream that isn't after so many batches. None: any."""
        usable = [one for one in self.workers if max_batches is None or one.num_batches <= max_batches]
        return max(usable, key=lambda one: one.num_batches, default=WorkerSnapshot())

    def check_fits(self, *, num_workers: int, is_stream: bool, num_sharing: int) -> None:
        """Check that a loader can continue here. Raises `StateMismatch` if it can't.

        The position of a sampler, or in a stream that the loader shares out, suits any number of workers; that in
        another stream only the same. `num_sharing`: to how many ranks it shares out the stream; 0: it doesn't.
        """
        if self.draws.is_over or not self.num_yielded:
            return
        if self.is_stream != is_stream:
            kinds = "a map-style dataset", "an IterableDataset"
            raise StateMismatch(
                f"the state is of {kinds[self.is_stream]}, but this loader has {kinds[is_stream]}; give the dataset "
                f"that the state was saved with, or begin without load_state_dict()"
            )
        if self.num_sharing != num_sharing:
            raise StateMismatch(
                f"the state is of a stream that {_sharing(self.num_sharing)}, but here {_sharing(num_sharing)}; give "
                f"the shard_stream, and as many ranks, that the state was saved with, or change them where an epoch is "
                f"over"
            )
        if num_sharing and self.next_batch is not None:
            return
        if is_stream and self.num_workers != num_workers:
            raise StateMismatch(
                f"the state was saved with num_workers={self.num_workers} in the middle of an epoch, but this loader "
                f"has num_workers={num_workers}. The workers share out an IterableDataset by their number, so its "
                f"position can't be carried over. Give num_workers={self.num_workers}, or change it where an epoch is "
                f"over"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the state. Nothing in it changes later."""
        draws, sampler_state = self.draws, self.draws.sampler_state or (None, None)
        main = {
            "_num_workers": self.num_workers,
            "_index_sampler_state": sampler_state[0],
            "_sampler_iter_state": sampler_state[1],
            "_sampler_iter_yielded": draws.num_drawn,
            "_base_seed": draws.base_seed,
            "_IterableDataset_len_called": self.length_called,
            "epoch": draws.epoch,
            "generators": draws.generators,
            "global_states": draws.global_states,
            "is_begun": draws.is_begun,
            "draws_seed": draws.draws_seed,
            "begins_twice": draws.begins_twice,
            "sampler_epochs": draws.sampler_epochs,
            "dataset_epoch": draws.dataset_epoch,
            "ahead": list(self.ahead),
            "num_sharing": self.num_sharing,
        }
        snapshots = [one.pack(is_stream=self.is_stream) for one in self.workers]
        state: dict[str, Any] = {
            "version": VERSION,
            "_snapshot": {
                "_snapshot_step": self.num_yielded,
                "_last_yielded_worker_id": self.last_worker,
                "_main_snapshot": main,
                "_worker_snapshots": {f"worker_{number}": one for number, one in enumerate(snapshots)},
            },
            "_steps_since_snapshot": 0,
            "_iterator_finished": draws.is_over,
        }
        if not self.num_workers:
            state |= {name: snapshots[0][name] for name in ("fetcher_state", "dataset_state")}
        return deepcopy(state)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> LoaderPosition:
        """Return the position that a state describes.

        Raises `TypeError` if it isn't a mapping, `StateMismatch` if a field is missing or has another form.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"the state is a {type(state).__name__}; pass the dict that state_dict() returned")
        if state.get("version") != VERSION:
            raise StateMismatch(
                f"the state's version is {state.get('version')!r}, but this loader can only resume version {VERSION}; "
                f"pass the dict that the state_dict() of a swift_loader.DataLoader returned"
            )
        try:
            return _unpacked(deepcopy(dict(state)))
        except KeyError as error:
            raise StateMismatch(
                f"the state has no field {error}; pass the dict that state_dict() returned, unchanged"
            ) from None


def _unpacked(state: dict[str, Any]) -> LoaderPosition:
    snapshot = state["_snapshot"]
    main, workers = snapshot["_main_snapshot"], snapshot["_worker_snapshots"]
    sampler_state = main["_index_sampler_state"], main["_sampler_iter_state"]
    draws = DrawsState(
        base_seed=main["_base_seed"],
        epoch=main["epoch"],
        num_drawn=main["_sampler_iter_yielded"],
        sampler_state=None if sampler_state == (None, None) else sampler_state,
        generators=main["generators"],
        global_states=main["global_states"],
        is_begun=main["is_begun"],
        draws_seed=main["draws_seed"],
        begins_twice=main["begins_twice"],
        sampler_epochs=main["sampler_epochs"],
        dataset_epoch=main["dataset_epoch"],
        is_over=state["_iterator_finished"],
    )
    snapshots = [WorkerSnapshot.unpack(workers[f"worker_{number}"]) for number in range(len(workers))]
    return LoaderPosition(
        num_workers=main["_num_workers"],
        is_stream=any(workers[name]["fetcher_state"] is not None for name in workers),
        num_yielded=snapshot["_snapshot_step"],
        draws=draws,
        last_worker=snapshot["_last_yielded_worker_id"],
        ahead=tuple(main["ahead"]),
        workers=tuple(snapshots),
        length_called=main["_IterableDataset_len_called"],
        num_sharing=main.get("num_sharing", 0),
    )


def _sharing(num_ranks: int) -> str:
    return f"the loader shares out to {num_ranks} ranks" if num_ranks else "the dataset shares out itself"


# What a position in batches depends on --------------------------------------------------------------------------------

BATCHING = "batching"
"""Of the field in a state."""

_TORCHS = RandomSampler.__module__
"""Other classes may stand for each other: frameworks replace samplers."""


def batching_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what the loader's batches depend on, as plain types."""
    facts: dict[str, Any] = {"batch_size": loader.batch_size}
    sampler = loader.sampler
    is_torchs = isinstance(sampler, (RandomSampler, SequentialSampler)) and type(sampler).__module__ == _TORCHS
    if is_torchs and not isinstance(loader.dataset, IterableDataset):
        facts |= {"sampler": type(sampler).__name__, "num_samples": len(sampler)}  # type: ignore[arg-type]
    return facts


def check_batching(saved: Mapping[str, Any] | None, position: LoaderPosition, loader: DataLoader[Any]) -> None:
    """Check that a position in the middle of an epoch means the same in this loader.

    `saved`: what `batching_of` gave when the state was saved; None: it isn't known. Raises `StateMismatch` if the
    position counts other batches.
    """
    if saved is None or position.draws.is_over or not position.num_yielded:
        return
    here = batching_of(loader)
    has_states = all(one.has_state for one in position.workers)
    counts_batches = not position.is_stream or position.num_sharing or not has_states
    names = [name for name in ("batch_size", "sampler", "num_samples") if name in saved and name in here]
    for name in names:
        if saved[name] != here[name] and (counts_batches or name != "batch_size"):
            raise StateMismatch(
                f"the state was saved with {name}={saved[name]!r} in the middle of an epoch, but this loader has "
                f"{name}={here[name]!r}. The state counts batches, which are others here. Give the former one, or "
                f"change it where an epoch is over. A ShuffleBatchSampler can continue with another batch size"
            )


def check_resumes(loader: Any, position: LoaderPosition) -> None:
    """Check that the loader can continue at a position. Raises `StateMismatch` if it can't."""
    shard = shard_of(loader)
    position.check_fits(
        num_workers=loader.num_workers,
        is_stream=isinstance(loader.dataset, IterableDataset),
        num_sharing=0 if shard is None else shard.world_size,
    )
