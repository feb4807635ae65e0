"""The epochs of a DataLoader, with the interface of a SwiftLoader: `set_epoch`, `state_dict`, `close`.

Runs in the loop's thread. A pass begins with its first `next`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from swift_loader.checks import check_integer
from swift_loader.dataloader.dataloader import DataLoader
from swift_loader.device.prefetch import LazyPass
from swift_loader.errors import LoaderClosed, StateMismatch
from swift_loader.samplers.passes import Pass, Passes, PassState
from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.vision.batches import ImageBatches
from swift_loader.vision.states import VERSION, check_same, saved_fields
from swift_loader.worker.generators import preserved_generators

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["EpochLoader", "EpochSampler"]

_NAME = "create_loader"


class EpochLoader:
    """Yields the batches of a DataLoader, epoch by epoch.

    With `ImageBatches`, the state is a few integers, and resuming is O(1). A stream's state has that of the DataLoader.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        dataset: Any,
        batch_size: int,
        seed: int,
        has_own_seed: bool,
        rank: int,
        num_batches: int | None,
    ) -> None:
        """Starts no worker.

        Args:
            loader: Has `ImageBatches` as its batch sampler, or a stream and a generator of its own.
            dataset: What the user calls the dataset.
            batch_size: What the user calls the batch size.
            seed: Seed of all randomness of a stream; `ImageBatches` have their own.
            has_own_seed: Whether the user chose the seed. A state with another one raises `StateMismatch`.
            rank: This rank.
            num_batches: Of a stream: how many batches an epoch has at most.
        """
        self.dataset = dataset
        self.batch_size = batch_size
        self.batch_sampler: ImageBatches | None = None
        if isinstance(loader.batch_sampler, ImageBatches):
            self.batch_sampler, num_batches = loader.batch_sampler, len(loader.batch_sampler)
        self.collate_fn = loader.collate_fn
        self._passes = Passes() if self.batch_sampler is None else self.batch_sampler.passes
        self._loader: DataLoader[Any] | None = loader
        """None: closed."""
        self._stream_seed = seed
        self._has_own_seed = has_own_seed
        self._rank = rank
        self._num_batches = num_batches
        self._batches: Iterator[Any] | None = None
        """Of the pass that runs. It has the workers."""
        self._this: Pass | None = None
        """The pass that runs, or that was the last one to run."""
        self._saved: Any = None
        """Where a stream continues with the next pass."""

    # Iteration --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next pass, or the rest of a saved one. An older one becomes invalid."""
        return LazyPass(self._begin_pass)

    def _begin_pass(self) -> Callable[[], Any]:
        if self._loader is None:
            raise LoaderClosed("the loader was closed; make a new one")
        self._batches = None  # first: it gives the workers back
        this = self._this = self._passes.begin()
        if self.batch_sampler is not None:
            self.batch_sampler.begin(this)
        else:
            self._begin_stream(self._loader, this)
        if not this.at_end:
            with self._guard():
                self._batches = iter(self._loader)
        return partial(self._take, this)

    def _begin_stream(self, loader: DataLoader[Any], this: Pass) -> None:
        assert loader.generator is not None, "a stream's loader has one"
        key = derive_key(self.seed, Purpose.WORKER.value, this.epoch, self._rank)
        loader.generator.manual_seed(key)
        if this.position:
            loader.load_state_dict(self._saved)
        self._saved = None

    def _take(self, this: Pass) -> Any:
        """Return the next batch of a pass."""
        if self._this is not this:
            raise RuntimeError(
                "this iterator can't continue: it raised an error, or was superseded by a newer one, load_state_dict() "
                "or close() of the same loader. Begin a new one"
            )
        if this.at_end or self._batches is None:
            self._end(this)
            raise StopIteration
        try:
            with self._guard():
                batch = next(self._batches)
        except StopIteration:
            self._end(this)
            raise
        except Exception:
            self._this = self._batches = None
            raise
        this.advance(this.position + 1, at_end=this.position + 1 == self._num_batches)
        return batch

    def _end(self, this: Pass) -> None:
        this.end()
        self._batches = None

    def _guard(self) -> AbstractContextManager[None]:
        """Return what keeps the random generators of this process as they are, if the samples are seeded here."""
        is_seeded_here = self._loader is not None and not self._loader.num_workers and self.batch_sampler is not None
        return preserved_generators() if is_seeded_here else nullcontext()

    def __len__(self) -> int:
        """Return the number of batches of an epoch.

        For a stream, it is the smaller one of `num_batches` and what the dataset's length gives. timm's streams of
        unknown length have the length 0.

        Raises:
            TypeError: A stream has neither.
        """
        if self._num_batches is None:
            return len(self._open_loader)
        if self.batch_sampler is not None:
            return self._num_batches
        try:
            return min(len(self._open_loader) or self._num_batches, self._num_batches)
        except TypeError:
            return self._num_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, also on the dataset if it has a `set_epoch`."""
        self._passes.choose(check_integer("epoch", epoch, 0))
        if callable(choose := getattr(self.dataset, "set_epoch", None)):
            choose(epoch)

    @property
    def sampler(self) -> EpochSampler:
        """The sampler that frameworks expect, with `set_epoch`. A new object each time; it keeps the loader alive."""
        return EpochSampler(self)

    @property
    def seed(self) -> int:
        """Seed of the order and of all draws."""
        return self._stream_seed if self.batch_sampler is None else self.batch_sampler.seed

    def device_key(self) -> int:
        """Return the key of the last batch, see `device.keys.batch_key`. For a `DevicePrefetcher`."""
        this = self._passes.current if self._this is None else self._this
        return derive_key(self.seed, Purpose.DEVICE.value, this.epoch, max(0, this.position - 1), self._rank)

    # Resuming ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that the loop got. Without a stream: integers and a string."""
        this = self._passes.current
        state: dict[str, Any] = {
            "version": VERSION,
            "sampler": _NAME,
            "seed": self.seed,
            "epoch": this.epoch,
            "position": this.position,
            "finished": int(this.at_end),
            **self._facts,
        }
        if self.batch_sampler is None and this.position and not this.at_end:
            state["loader"] = self._open_loader.state_dict() if this.state is PassState.RUNNING else self._saved
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume there with the next pass. An iterator in use becomes invalid. An empty dict changes nothing.

        Raises:
            TypeError: The state isn't a dict.
            StateMismatch: It is of another loader, dataset, seed or order. Nothing has changed then.
        """
        if isinstance(state, Mapping) and not state:
            return
        fields = saved_fields(state, _NAME, ["seed", "epoch", "position", "finished", *self._facts])
        for name, present in self._facts.items():
            check_same(name, fields[name], present)
        if self._has_own_seed:
            check_same("seed", fields["seed"], self.seed)
        is_inside = bool(fields["position"]) and not fields["finished"]
        if self.batch_sampler is None and is_inside and "loader" not in state:
            raise StateMismatch("the state has no field 'loader'; pass the dict that state_dict() returned, unchanged")
        if self.batch_sampler is None:
            self._stream_seed = fields["seed"]
        else:
            self.batch_sampler.seed = fields["seed"]
        self._saved = state.get("loader")
        self._this = self._batches = None
        self._passes.restore(fields["epoch"], fields["position"], at_end=bool(fields["finished"]))

    @property
    def _facts(self) -> dict[str, int]:
        """What must be as it was when a state was saved."""
        return {"batch_size": self.batch_size} if self.batch_sampler is None else self.batch_sampler.facts

    # Life -------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let the workers go. Batches that the user keeps stay valid. Idempotent."""
        self._this = self._batches = None
        self._loader = None

    @property
    def _open_loader(self) -> DataLoader[Any]:
        if self._loader is None:
            raise LoaderClosed("the loader was closed; make a new one")
        return self._loader

    def __enter__(self) -> EpochLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<EpochLoader of {type(self.dataset).__name__}, {self._passes!r}>"


class EpochSampler:
    """Iterates over the dataset indices that this rank gets in the next epoch. A stream has none."""

    def __init__(self, loader: EpochLoader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, as `EpochLoader.set_epoch` does."""
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        for places in self._batches.next_epoch():
            yield from (place.sample_index for place in places)

    def __len__(self) -> int:
        return self._batches.num_items

    @property
    def _batches(self) -> ImageBatches:
        if self._loader.batch_sampler is None:
            raise TypeError(f"the samples of a {type(self._loader.dataset).__name__}, a stream, have no indices")
        return self._loader.batch_sampler
