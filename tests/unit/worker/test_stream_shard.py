from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.worker.stream_shard import RankSamples, StreamShard


class Numbers:
    """Gives 0, 1, 2, ... Some of them are errors."""

    def __init__(self, size: int, bad: frozenset[int] = frozenset(), at: int = 0) -> None:
        self.size, self.bad, self.at = size, bad, at

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == self.size:
            raise StopIteration
        self.at += 1
        if self.at - 1 in self.bad:
            raise LookupError(self.at - 1)
        return self.at - 1


def outcomes(samples: Iterator[Any]) -> list[Any]:
    """Return the samples, and errors as text."""
    found: list[Any] = []
    while True:
        try:
            found.append(next(samples))
        except StopIteration:
            return found
        except LookupError as error:
            found.append(str(error))


sizes = st.integers(0, 30)
world_sizes = st.integers(1, 5)


@given(size=sizes, world_size=world_sizes, bad=st.frozensets(st.integers(0, 29)), is_even=st.booleans())
def test_each_sample_is_of_one_rank_and_so_is_its_error(
    size: int, world_size: int, bad: frozenset[int], is_even: bool
) -> None:
    of_ranks = [
        outcomes(RankSamples(Numbers(size, bad), StreamShard(rank, world_size, is_even))) for rank in range(world_size)
    ]
    used = size - size % world_size if is_even else size
    expected = [str(number) if number in bad else number for number in range(used)]
    assert of_ranks == [expected[rank::world_size] for rank in range(world_size)]


@given(size=sizes, world_size=world_sizes, rank=st.integers(0, 4), is_even=st.booleans(), num_taken=st.integers(0, 30))
def test_a_rank_continues_where_any_rank_was(
    size: int, world_size: int, rank: int, is_even: bool, num_taken: int
) -> None:
    for saved_rank in range(world_size):
        stream = Numbers(size)
        saved = RankSamples(stream, StreamShard(saved_rank, world_size, is_even))
        taken = sum(1 for _ in zip(range(num_taken), saved, strict=False))
        if taken < num_taken:
            continue  # the stream is over
        shard = StreamShard(rank % world_size, world_size, is_even)
        whole = outcomes(RankSamples(Numbers(size), shard))
        resumed = RankSamples(Numbers(size, at=stream.at), shard, saved.num_to_skip)
        assert outcomes(resumed) == whole[num_taken:]


def test_the_end_comes_again() -> None:
    samples = RankSamples(Numbers(3), StreamShard(1, 2))
    assert list(samples) == [1]
    with pytest.raises(StopIteration):
        next(samples)
