"""Which samples of a stream are this rank's, if the loader shares the stream out. Pure.

Each rank reads the whole stream and keeps every n-th sample. So all ranks must get the same samples in the same order.
Within a rank, worker w of W builds the batches w, w + W, ..., and reads and drops those between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


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
