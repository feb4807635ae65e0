"""The content of a DataLoader's `state_dict()`, and the check of one that is loaded.

The fields have the names that torchdata's `StatefulDataLoader` gives to the same things. Fields of our own have no
underscore in front.

    version                     of these fields
    _steps_since_snapshot       always 0: the position is exact
    _iterator_finished          whether the loop has met the end of the epoch
    epoch                       in which a resume begins; only for the user
    batching                    what the count of batches depends on, and the seed
    _snapshot
        _snapshot_step              batches that the loop got in this epoch
        _last_yielded_worker_id     which worker's shard gave the last one; streams only
        _main_snapshot              the draws, see `DrawsState`
        _worker_snapshots           by worker: the state of its dataset or of the iterator over it

What has other keys in each state is in a tuple: torch.distributed.checkpoint takes a dict apart, but not a tuple.
"""

from __future__ import annotations

import base64
import json
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from swift_loader.batch.digests import difference
from swift_loader.dataloader.options import shard_of
from swift_loader.errors import StateMismatch
from swift_loader.samplers.base import chain_of, facts_of_sampler, num_ranks_of
from swift_loader.sampling.integers import ANYTHING, Form, field_of, from_state, in_state, integer, state_kind, to_state
from swift_loader.worker.torch_worker import Resume, Snapshot, is_stateful

SamplerState = tuple[Any, Any]
"""The states of a sampler and of its iterator. None: this one has none."""

VERSION = 2
"""Version 1 had no tuples."""

_MAX_INTEGER = 2**63 - 1

# What a field must be -------------------------------------------------------------------------------------------------


def _read_flag(value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError
    return bool(value)


def _read_generator(text: Any) -> Any:
    as_torch(text)  # raises; only the generator, which may be a GPU's, knows whether it is a state of its own
    return text


def _read_states(packed: Any) -> Any:
    states = unpack_states(packed)
    generators: dict[str, Any] = {
        "torch": torch.Generator(),
        "python": random.Random(),  # noqa: S311 - a check
        "numpy": np.random.RandomState(),
    }
    set_states(generators, states)
    return packed


_COUNT, _SEED = integer(0, _MAX_INTEGER), integer(-_MAX_INTEGER - 1, _MAX_INTEGER)
_FLAG = Form("True or False", _read_flag)
_GENERATOR_STATES = Form("the state of a generator", _read_generator).several()
_GLOBAL_STATES = Form("states of global generators", _read_states)
_MAIN, _WORKERS = "_snapshot._main_snapshot.", "_snapshot._worker_snapshots"


def _in_tuple(form: Form) -> Form:
    """Return the form of such a value as the only element of a tuple. JSON makes a list of it."""

    def read(value: Any) -> Any:
        (inner,) = value if isinstance(value, (tuple, list)) else ()
        return form.read(inner)

    return Form(f"a tuple of {form.what}", read, lambda value: (value,))


_WORKER = Form("a worker's state", lambda state: from_state(WorkerSnapshot, state))
_IS_STREAM = Form("workers' states", lambda states: any(one["fetcher_state"] is not None for one in states))


# The records ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrawsState:
    """How to draw the rest of an epoch again."""

    base_seed: Any = in_state(_SEED.or_none(), f"{_MAIN}_base_seed")
    """An integer. None: no epoch has begun, and the first one draws it."""
    epoch: int = in_state(_COUNT, f"{_MAIN}epoch")
    num_drawn: int = in_state(_COUNT, f"{_MAIN}_sampler_iter_yielded", default=0)
    of_sampler: Any = in_state(_in_tuple(ANYTHING), f"{_MAIN}_index_sampler_state", default=None)
    """The state of the sampler; None if it has none."""
    draws_again: bool = in_state(_FLAG, f"{_MAIN}draws_again", default=False)
    """Whether `of_sampler` is as the epoch began, because it doesn't tell the place."""
    of_iterator: Any = in_state(_in_tuple(ANYTHING), f"{_MAIN}_sampler_iter_state", default=None)
    """The state of the sampler's iterator; None if it has none."""
    generators: list[str] = in_state(_GENERATOR_STATES, f"{_MAIN}generators", default_factory=list)
    """States of the samplers' own generators: when the epoch began; at its end if the epoch is over."""
    global_states: dict[str, Any] = in_state(_in_tuple(_GLOBAL_STATES), f"{_MAIN}global_states", default_factory=dict)
    """States of the global generators when the epoch began, of those that the sampler has drawn from."""
    is_begun: bool = in_state(_FLAG, f"{_MAIN}is_begun", default=False)
    """Whether the first index was asked for. Samplers of torch draw a seed then."""
    draws_seed: bool = in_state(_FLAG, f"{_MAIN}draws_seed", default=True)
    """Whether the base seed was drawn when the epoch began."""
    begins_twice: bool = in_state(_FLAG, f"{_MAIN}begins_twice", default=False)
    """Whether the sampler was iterated twice when the epoch began, as torch does with new workers."""
    sampler_epochs: list[int] = in_state(_SEED.several(), f"{_MAIN}sampler_epochs", default_factory=list)
    """What `set_epoch` had set on the samplers when this epoch was drawn, outermost first."""
    dataset_epoch: int | None = in_state(_SEED.or_none(), f"{_MAIN}dataset_epoch", default=None)
    """What `set_epoch` has set on the dataset. None: it has no epoch."""
    is_over: bool = in_state(_FLAG, "_iterator_finished", default=False)
    """Whether the epoch is over, so that the next one begins."""

    @property
    def begins_epoch(self) -> bool:
        """Whether an epoch begins here: the one before is over, or there was none."""
        return self.is_over or self.base_seed is None

    @property
    def next_epoch(self) -> int:
        """The epoch in which a resume begins."""
        return self.epoch + self.is_over

    @property
    def sampler_state(self) -> SamplerState | None:
        """The states of the sampler and its iterator. None if neither has one."""
        has_state = self.of_sampler is not None or self.of_iterator is not None
        return (self.of_sampler, self.of_iterator) if has_state else None


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """The state of a worker's dataset at some batch, and how many batches the loop got from it since."""

    dataset_state: Any = in_state(ANYTHING, "dataset_state", default=None)
    """What the dataset's `state_dict()` returned; None if it has none, or if it is its own iterator."""
    iterator_state: Any = in_state(ANYTHING, "fetcher_state.dataset_iter_state", older=None)
    """What the `state_dict()` of the iterator over a stream returned; None if it has none."""
    has_ended: bool = in_state(_FLAG, "has_ended", default=False)
    """Whether the state was taken when its shard of the stream was over."""
    num_since: int = in_state(_COUNT, "steps_since_snapshot", default=0)
    """How many batches the loop got from it after the state was taken. They are skipped."""
    num_batches: int = in_state(_COUNT, "num_batches", default=0)
    """How many batches of its shard the loop got in this epoch. If the loader shares the stream out: how many batches
    of the rank's part had been read when the state was taken."""
    num_to_skip: int = in_state(_COUNT, "num_to_skip", default=0)
    """How many samples other ranks get first when the state is restored; see `RankSamples`."""
    is_over: bool = in_state(_FLAG, "fetcher_state.fetcher_ended", older=False)
    """Whether the loop got all batches of its shard, and it is known that there are no more."""
    next_batch: int | None = in_state(_COUNT.or_none(), "next_batch", default=None)
    """If the loader shares the stream out: which batch of the rank's part the worker builds next."""

    @classmethod
    def of(cls, taken: Snapshot) -> WorkerSnapshot:
        """Return what a worker has just said."""
        return cls(taken.dataset, taken.iterator, taken.has_ended, 0, taken.num_batches, taken.num_to_skip)

    def resume(self, *, anew: bool = False) -> bytes:
        """Return where a worker's dataset continues, for `Engine.begin`. `anew`: it is the end of an epoch."""
        if not self.has_state:
            return Resume(None, 0 if anew else self.num_batches).pack()
        num_batches = self.num_batches - self.num_since
        taken = Snapshot(
            num_batches, self.has_ended, self.iterator_state, self.dataset_state, num_to_skip=self.num_to_skip
        )
        return Resume(taken.pack(), 0 if anew else self.num_since, begins_anew=anew).pack()

    def pack(self, *, is_stream: bool) -> dict[str, Any]:
        """Return it as it is in the state."""
        packed = to_state(replace(self, is_over=self.has_ended or self.is_over), {})
        return packed if is_stream else packed | {"fetcher_state": None}

    @property
    def has_state(self) -> bool:
        """Whether it can be restored without skipping all batches."""
        return self.dataset_state is not None or self.iterator_state is not None


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """Where a DataLoader is in its epoch."""

    draws: DrawsState = in_state(DrawsState)
    is_stream: bool = in_state(_IS_STREAM, _WORKERS)
    num_workers: int = in_state(_COUNT, f"{_MAIN}_num_workers")
    num_yielded: int = in_state(_COUNT, "_snapshot._snapshot_step")
    """Batches that the loop got in this epoch."""
    last_worker: int = in_state(integer(-1, _MAX_INTEGER), "_snapshot._last_yielded_worker_id", default=-1)
    """The worker whose shard gave the last batch; -1 before the first. Only for streams."""
    ahead: list[int] = in_state(_COUNT.several(), f"{_MAIN}ahead", default_factory=list)
    """Later steps that the loop won't get: it got them before earlier ones, with `in_order=False`."""
    workers: Sequence[WorkerSnapshot] = in_state(_WORKER.several(), _WORKERS, default=())
    """By worker id. One, with `num_workers=0`."""
    length_called: int | None = in_state(_COUNT.or_none(), f"{_MAIN}_IterableDataset_len_called", default=None)
    """What `len` of the stream returned, if the user has asked the loader for its length."""
    num_sharing: int = in_state(_COUNT, f"{_MAIN}num_sharing", default=0)
    """How many ranks the loader shares the stream out to, and to its workers. 0: the dataset does that."""
    epoch: int | None = in_state(_COUNT.or_none(), older=None)
    """In which a resume begins. `DataLoader.state_dict` fills in this and the next."""
    batching: Mapping[str, Any] | None = in_state(Form("a dict", lambda value: {**value}).or_none(), older=None)
    steps_since_snapshot: int = in_state(integer(0, 0), "_steps_since_snapshot", default=0)

    @property
    def next_batch(self) -> int | None:
        """Which batch of a shared stream is next. None: later ones came before it."""
        batches = [one.next_batch or 0 for one in self.workers]
        first = min(batches, default=0)
        return first if max(batches, default=0) - first < max(1, len(batches)) else None

    def latest(self, max_batches: int | None) -> WorkerSnapshot:
        """Return the latest state of a dataset that isn't after so many batches of a shared stream. None: any."""
        usable = [one for one in self.workers if max_batches is None or one.num_batches <= max_batches]
        return max(usable, key=lambda one: one.num_batches, default=WorkerSnapshot())

    def to_dict(self) -> dict[str, Any]:
        """Return the state. Nothing in it changes later."""
        state = to_state(self, {"version": VERSION})
        state["_snapshot"]["_worker_snapshots"] = tuple(one.pack(is_stream=self.is_stream) for one in self.workers)
        return deepcopy(state)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> LoaderPosition:
        """Return the position that a state describes. Raises as `check_state` does, or names a field."""
        if state_kind(state) == "DataLoader":
            state = _upgraded(deepcopy(dict(state)))
        position = from_state(cls, state, "DataLoader", VERSION)
        workers, num_workers, draws = position.workers, position.num_workers, position.draws
        for is_right, problem in (
            (len(workers) == max(1, num_workers), f"of {len(workers)} workers, but _num_workers={num_workers}"),
            (position.last_worker < max(1, num_workers), f"of worker {position.last_worker} of {num_workers}"),
            (
                position.num_yielded <= draws.num_drawn + len(position.ahead),
                f"of {position.num_yielded} batches, but _sampler_iter_yielded={draws.num_drawn}",
            ),
            (position.epoch in (None, draws.next_epoch), f"of epoch {draws.epoch}, but another one is in epoch"),
            (all(one.num_since <= one.num_batches for one in workers), "of steps_since_snapshot above num_batches"),
        ):
            if not is_right:
                raise StateMismatch(f"the state is {problem}; pass the dict that state_dict() returned, unchanged")
        return position


def _upgraded(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state, of version 2 if it is of version 1."""
    if state.get("version") != 1:
        return state
    workers, draws = field_of(state, _WORKERS), field_of(state, _MAIN[:-1])
    num_workers = len(workers) if isinstance(workers, Mapping) else 1
    state["version"] = VERSION
    state["_snapshot"]["_worker_snapshots"] = [field_of(workers, f"worker_{number}") for number in range(num_workers)]
    for name in ("_index_sampler_state", "_sampler_iter_state", "global_states"):
        draws[name] = (field_of(draws, name),)
    draws.setdefault("draws_again", False)  # each state was taken for a place
    # Without workers, it had these here, too.
    return {name: value for name, value in state.items() if name not in ("dataset_state", "fetcher_state")}


# Whether a loader can continue there ----------------------------------------------------------------------------------


def batching_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what the loader's batches depend on, as plain types."""
    used = loader._index_sampler  # noqa: SLF001 - torch's
    is_stream = isinstance(loader.dataset, IterableDataset)
    is_elastic = is_stream or any(map(is_stateful, chain_of(used)))
    return {
        "batch_size": loader.batch_size,
        "samplers": None if is_stream else facts_of_sampler(used) or None,
        "num_replicas": None if is_elastic else num_ranks_of(used),
    }


def check_resumes(loader: Any, position: LoaderPosition, batching: Any = None) -> None:
    """Check that a loader can continue at a position. Raises `StateMismatch` if it can't.

    The position of a sampler, or in a stream that the loader shares out, suits any number of workers; that in another
    stream only the same. The states of a map-style dataset need as many workers as they are of, see
    `needs_its_workers`. `batching`: what `batching_of` gave when the state was saved; None: it isn't known.
    """
    if position.draws.begins_epoch:
        return
    if position.draws.dataset_epoch is not None and not hasattr(loader.dataset, "set_epoch"):
        raise StateMismatch(
            f"the state is of a dataset in epoch {position.draws.dataset_epoch}, but a {type(loader.dataset).__name__} "
            f"has no set_epoch() to be told it; give the dataset that the state was saved with, or begin without "
            f"load_state_dict()"
        )
    if not position.num_yielded:
        return
    shard = shard_of(loader)
    num_sharing, is_stream = 0 if shard is None else shard.world_size, isinstance(loader.dataset, IterableDataset)
    if position.is_stream != is_stream:
        kinds = "a map-style dataset", "an IterableDataset"
        raise StateMismatch(
            f"the state is of {kinds[position.is_stream]}, but this loader has {kinds[is_stream]}; give the dataset "
            f"that the state was saved with, or begin without load_state_dict()"
        )
    if position.num_sharing != num_sharing:
        raise StateMismatch(
            f"the state is of a stream that {_sharing(position.num_sharing)}, but here {_sharing(num_sharing)}; give "
            f"the shard_stream, and as many ranks, that the state was saved with, or change them where an epoch is over"
        )
    is_free = num_sharing and position.next_batch is not None
    is_kept = loader.num_workers and position.num_workers and loader.executor is None and not is_stream
    if not is_kept and not is_free and needs_its_workers(loader, position):
        reason = "share out an IterableDataset by their number" if is_stream else "have datasets in different states"
        raise StateMismatch(
            f"the state was saved with num_workers={position.num_workers} in the middle of an epoch, but this loader "
            f"has num_workers={loader.num_workers}. The workers {reason}, so its position can't be carried over. Give "
            f"num_workers={position.num_workers}, or change it where an epoch is over"
        )
    here, saved = batching_of(loader), batching if isinstance(batching, Mapping) else {}
    counts_batches = not is_stream or num_sharing or not all(one.has_state for one in position.workers)
    for name in here:
        is_known = name == "batch_size" or None not in (saved.get(name), here[name])  # else a sampler isn't torch's
        if is_known and saved.get(name, here[name]) != here[name] and (counts_batches or name != "batch_size"):
            raise StateMismatch(
                f"the state was saved with {name}={saved[name]!r} in the middle of an epoch, but this loader has "
                f"{name}={here[name]!r}. The state counts batches, which are others here. Give the former one, or "
                f"change it where an epoch is over. A ShuffleBatchSampler can continue with another batch size"
            )


def needs_its_workers(loader: Any, position: LoaderPosition) -> bool:
    """Return whether only as many workers as saved a position can continue there, and the loader has another number.

    So it is in a stream, and with a map-style dataset whose states aren't that of the loader's dataset as it is now.
    """
    if position.num_workers == loader.num_workers or position.draws.begins_epoch:
        return False
    states = [one.dataset_state for one in position.workers if one.dataset_state is not None]
    if position.is_stream or not states:
        return position.is_stream
    here = loader.dataset.state_dict() if is_stateful(loader.dataset) else None
    return {position.num_workers, loader.num_workers} != {0, 1} and any(difference(one, here) for one in states)


def _sharing(num_ranks: int) -> str:
    return f"the loader shares out to {num_ranks} ranks" if num_ranks else "the dataset shares out itself"


# States of random generators, as JSON types ---------------------------------------------------------------------------


def pack_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return states of global generators by name, as JSON types."""
    return {name: _PACKING[name][0](state) for name, state in states.items()}


def unpack_states(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states that `pack_states` was called with."""
    return {name: _PACKING[name][1](state) for name, state in packed.items()}


def set_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Set generators to states, by name."""
    for name, state in states.items():
        (generators[name].setstate if name == "python" else generators[name].set_state)(state)


def pack_generator(generator: Any) -> str:
    """Return the state of a generator of torch, NumPy or `random` as text."""
    if isinstance(generator, torch.Generator):
        return pack_bytes(generator.get_state().numpy().tobytes())
    is_of_numpy = isinstance(generator, np.random.Generator)
    state = generator.bit_generator.state if is_of_numpy else generator.__getstate__()
    return pack_bytes(json.dumps(state, default=np.ndarray.tolist).encode())


def set_generator(generator: Any, packed: str) -> None:
    """Set a generator to the state that `pack_generator` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(as_torch(packed))
    else:
        state = json.loads(_unpacked(packed))
        generator.__setstate__((state[0], tuple(state[1]), state[2]) if isinstance(state, list) else state)


@lru_cache(maxsize=16)  # Accelerate asks for the state after each batch, and most generators stay as they are
def pack_bytes(state: bytes) -> str:
    """Return the bytes of a state as text."""
    return base64.b64encode(zlib.compress(state, 1)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def as_torch(text: str) -> torch.Tensor:
    """Return the state that `pack_bytes` was given, as torch takes it."""
    return torch.frombuffer(bytearray(_unpacked(text)), dtype=torch.uint8)


def _pack_words(words: Any) -> str:
    return pack_bytes(np.asarray(words, np.uint32).tobytes())


def _words(text: str) -> Any:
    return np.frombuffer(_unpacked(text), np.uint32)


_PACKING: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "torch": (lambda state: pack_bytes(state.numpy().tobytes()), as_torch),
    "python": (lambda s: [s[0], _pack_words(s[1]), s[2]], lambda s: (s[0], tuple(_words(s[1]).tolist()), s[2])),
    "numpy": (
        lambda s: [str(s[0]), _pack_words(s[1]), *map(float, s[2:])],
        lambda s: (s[0], _words(s[1]), int(s[2]), int(s[3]), s[4]),
    ),
}
"""By generator: what makes JSON types of its state, and what makes the state of these."""
