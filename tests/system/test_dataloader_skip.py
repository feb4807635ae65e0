"""Batches that a DataLoader leaves out."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from swift_loader import DataLoader, ShuffleBatchSampler
from tests.support.helpers import LIKE_A_FORK

NUM_SAMPLES = 50
NUM_STEPS = 13


class Data:
    """Samples are their index; some can't be built."""

    def __init__(self, bad: set[int] | None = None) -> None:
        self.bad = bad or set()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError(f"sample {index} is bad")
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


def loader_of(
    workers: int, *, own_sampler: bool = False, bad: set[int] | None = None, **options: Any
) -> DataLoader[Any]:
    data: Any = Data(bad)
    if workers:
        options |= LIKE_A_FORK
    if own_sampler:  # it has a state
        return DataLoader(data, batch_sampler=ShuffleBatchSampler(data, 4, seed=3), num_workers=workers, **options)
    generator = torch.Generator().manual_seed(5)
    return DataLoader(data, 4, shuffle=True, num_workers=workers, generator=generator, **options)


def batches_of(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def without(steps: list[Any], *skipped: int) -> list[Any]:
    return [batch for step, batch in enumerate(steps) if step not in skipped]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own_sampler", [False, True])
def test_a_skip_is_about_the_next_epoch_or_the_present_one(workers: int, own_sampler: bool) -> None:
    plain = loader_of(workers, own_sampler=own_sampler)
    epochs = [batches_of(plain) for _ in range(2)]
    loader = loader_of(workers, own_sampler=own_sampler)
    loader.skip([0, 4, 12])
    assert batches_of(loader) == without(epochs[0], 0, 4, 12)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            loader.skip(torch.tensor([2, 3]))
            loader.skip(11)
    assert seen == without(epochs[1], 2, 3, 11)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_are_skipped_before_the_epoch_are_not_built(workers: int) -> None:
    epoch = batches_of(loader_of(workers))
    loader = loader_of(workers, bad={*epoch[0], *epoch[7]})
    loader.skip([0, 7])
    assert batches_of(loader) == without(epoch, 0, 7)


@pytest.mark.parametrize("own_sampler", [False, True])
@pytest.mark.parametrize(
    ("before", "after", "num_taken"), [(0, 0, 0), (0, 0, 3), (0, 2, 3), (2, 0, 1), (2, 0, 3), (2, 2, 3)]
)
def test_a_resumed_epoch_skips_the_same(own_sampler: bool, before: int, after: int, num_taken: int) -> None:
    epoch = batches_of(loader_of(0, own_sampler=own_sampler))
    loader = loader_of(before, own_sampler=own_sampler)
    iterator = iter(loader)
    loader.skip([1, 3, 4, 9])
    seen = [next(iterator).tolist() for _ in range(num_taken)]
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = loader_of(after, own_sampler=own_sampler)
    resumed.load_state_dict(state)
    resumed.skip(11)
    assert seen + batches_of(resumed) == without(epoch, 1, 3, 4, 9, 11)


def test_a_skip_of_the_next_epoch_is_in_the_state() -> None:
    loader = loader_of(0)
    epochs = [batches_of(loader), batches_of(loader)]
    loader = loader_of(0)
    batches_of(loader)
    loader.skip([2])
    resumed = loader_of(0)
    resumed.load_state_dict(loader.state_dict())
    assert batches_of(resumed) == batches_of(loader) == without(epochs[1], 2)
    assert "to_skip" not in loader.state_dict()


def test_a_skip_of_all_that_is_left_ends_the_epoch() -> None:
    loader = loader_of(2)
    epoch = batches_of(loader_of(0))
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 1:
            loader.skip(range(1, NUM_STEPS))
    assert seen == epoch[:1]
    assert len(batches_of(loader)) == NUM_STEPS


def test_out_of_order_the_others_all_come() -> None:
    epoch = batches_of(loader_of(0))
    loader = loader_of(2, in_order=False)
    iterator = iter(loader)
    seen = [next(iterator).tolist()]
    loader.skip([8, 9])
    seen += [batch.tolist() for batch in iterator]
    assert sorted(seen) == sorted(without(epoch, 8, 9))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        (-1, ValueError, "step=-1 is too small"),
        (NUM_STEPS, ValueError, "step 13 can't be skipped: the epoch has 13 steps"),
        ([5, 1], ValueError, "step 1 can't be skipped: the loop is beyond it"),
        (2.0, TypeError, "steps=2.0 is a float"),
        (["2"], TypeError, "step='2' is a str"),
    ],
)
def test_what_cannot_be_skipped_says_why_and_changes_nothing(
    workers: int, steps: Any, error: type[Exception], message: str
) -> None:
    epoch = batches_of(loader_of(0))
    loader = loader_of(workers)
    iterator = iter(loader)
    seen = [next(iterator).tolist(), next(iterator).tolist()]
    with pytest.raises(error, match=message):
        loader.skip(steps)
    assert seen + [batch.tolist() for batch in iterator] == epoch


def test_steps_of_a_stream_cannot_be_skipped() -> None:
    with pytest.raises(ValueError, match=r"steps \[1\] can't be skipped: the dataset is an IterableDataset"):
        DataLoader(Stream(), 3).skip(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_came_early_out_of_order_does_not_come_again(workers: int) -> None:
    epoch = batches_of(loader_of(0))
    loader = loader_of(0)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    state["_snapshot"]["_main_snapshot"]["ahead"] = [4, 6]  # as after steps 0, 1, 2, 4 and 6
    state["_snapshot"]["_snapshot_step"] = 5
    resumed = loader_of(workers)
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    seen = [next(iterator).tolist()]
    again = loader_of(workers)
    again.load_state_dict(resumed.state_dict())
    assert seen + batches_of(again) == without(epoch, 0, 1, 2, 4, 6)
