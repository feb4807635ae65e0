"""Which samples of a stream are this rank's, if the loader shares the stream out. Pure.

Each rank reads the whole stream and keeps every n-th sample. So all ranks must get the same samples in the same order.
Within a rank, worker w of W builds the batches w, w + W, ..., and reads and drops those between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

# Which states of datasets and iterators a stream can be resumed from.
#
# An `IterableDataset` of the `datasets` package is a case of its own:
# - Its state leaves out what is in a shuffle buffer, so such a stream is resumed by skipping batches.
# - Once it has loaded a state, it begins there in each epoch of that number, and a state of its end gives no samples.

_HUGGINGFACE = "datasets.iterable_dataset.IterableDataset"
_SHUFFLE_BUFFER = "BufferShuffledExamplesIterable"
"""Both are looked for by name: the package needn't be there, and nothing public tells of a buffer."""


@runtime_checkable
class Stateful(Protocol):
    """A dataset, sampler or iterator that says where it is and continues there. It needn't derive from this class."""

    def state_dict(self) -> dict[str, Any]:
        """Return where it is. Pickled with the loader's state, so plain values are best."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""
        ...


def is_stateful(thing: Any) -> bool:
    """Return whether an object is `Stateful`, also by `__getattr__`, which `isinstance` doesn't see everywhere."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def has_exact_state(thing: Any) -> bool:
    """Return whether a dataset or an iterator can save a state that says all about where it is."""
    return is_stateful(thing) and not any(type(part).__name__ == _SHUFFLE_BUFFER for part in _parts(thing))


def is_huggingface(dataset: Any) -> bool:
    """Return whether a dataset is a stream of the `datasets` package."""
    return any(f"{kind.__module__}.{kind.__name__}" == _HUGGINGFACE for kind in type(dataset).__mro__)


def forget_state(dataset: Any) -> None:
    """Let a stream of the `datasets` package begin an epoch afresh. Leaves others alone: they know when one is over."""
    if is_huggingface(dataset):
        dataset.load_state_dict(None)


def _parts(dataset: Any) -> Iterator[Any]:
    """Yield what a stream of the `datasets` package is made of."""
    left = [getattr(dataset, "_ex_iterable", None)] if is_huggingface(dataset) else []
    while left:
        part = left.pop()
        if part is not None:
            yield part
            left += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]


@dataclass(frozen=True, slots=True)
class StreamShard:
    """One rank of those that share a stream."""

    rank: int = 0
    world_size: int = 1
    is_even: bool = False
    """Whether all ranks get the same number of samples. The last `world_size - 1` samples or fewer are left out."""


class RankSamples:
    """The samples of one rank of a stream. The rank that a sample belongs to gets the error in its place."""

    def __init__(self, stream: Iterator[Any], shard: StreamShard, num_to_skip: int = 0) -> None:
        """`stream` gives the samples of all ranks in turn. `shard`: which ones are wanted.

        `num_to_skip`: how many samples other ranks still get before it is rank 0's turn.
        """
        self._stream = stream
        self._shard = shard
        self.num_to_skip = num_to_skip
        """How many samples other ranks get before it is rank 0's turn."""

    def __iter__(self) -> RankSamples:
        return self

    def __next__(self) -> Any:
        self._finish_round()
        shard = self._shard
        for _ in range(shard.rank):
            self._pass()
        self.num_to_skip = shard.world_size - 1 - shard.rank
        if not shard.is_even:
            return next(self._stream)
        try:
            sample = next(self._stream)
        except StopIteration:
            raise
        except Exception:
            self._finish_round()
            raise
        self._finish_round()
        return sample

    def _finish_round(self) -> None:
        while self.num_to_skip:
            self.num_to_skip -= 1
            self._pass()

    def _pass(self) -> None:
        """Read a sample of another rank."""
        try:
            next(self._stream)
        except StopIteration:
            raise
        except Exception:
            return
