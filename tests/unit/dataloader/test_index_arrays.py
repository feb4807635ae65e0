from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from swift_loader.dataloader.draws import batched_arrays


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [0, 1, 10, (1 << 16) + 5, 2 << 16])
def test_a_sequential_samplers_batches_are_torchs(length: int, drop_last: bool) -> None:
    sampler = SequentialSampler(range(length))
    torchs = BatchSampler(sampler, 1000, drop_last)
    ours = batched_arrays(sampler, torchs)
    assert ours is not None
    assert [one.to_list() for one in ours] == list(torchs)


class Reversed(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source) - 1, -1, -1))


@pytest.mark.parametrize(
    "sampler",
    [Reversed(range(3)), SubsetRandomSampler(range(3)), RandomSampler(range(3), replacement=True), [1, 2]],
    ids=lambda sampler: type(sampler).__name__,
)
def test_samplers_of_others_are_iterated_over(sampler: Any) -> None:
    assert batched_arrays(sampler, BatchSampler(sampler, 2, False)) is None
