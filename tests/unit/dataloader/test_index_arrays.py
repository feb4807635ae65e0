from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from swift_loader.dataloader.indices import batched_arrays
from swift_loader.transport.task import IndexArray

SEED = 5


def states_and_batches(
    batches: Iterator[Any], generator: torch.Generator | None
) -> list[tuple[list[int] | None, bytes, bytes | None]]:
    """Return each batch, None at the end, with the states of the generators after it."""
    found = []
    batch: Any = []
    while batch is not None:
        batch = next(batches, None)
        own = None if generator is None else generator.get_state().numpy().tobytes()
        indices = batch.to_list() if isinstance(batch, IndexArray) else batch
        found.append((indices, torch.default_generator.get_state().numpy().tobytes(), own))
    return found


@given(
    st.integers(1, 12),
    st.integers(1, 15),
    st.booleans(),
    st.none() | st.integers(1, 40),
    st.booleans(),
)
def test_a_random_samplers_batches_and_draws_are_torchs(
    length: int, batch_size: int, drop_last: bool, num_samples: int | None, has_own: bool
) -> None:
    runs = []
    for ours in (False, True):
        torch.manual_seed(SEED)
        generator = torch.Generator().manual_seed(SEED) if has_own else None
        sampler = RandomSampler(range(length), num_samples=num_samples, generator=generator)
        torchs = BatchSampler(sampler, batch_size, drop_last)
        batches = batched_arrays(sampler, torchs) if ours else iter(torchs)
        assert batches is not None
        runs.append(states_and_batches(batches, generator))
    assert runs[1] == runs[0]


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
