from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.vision.schedule import ConstantSchedule, SizeSchedule, Step


@given(st.integers(1, 100), st.integers(1, 20), st.booleans())
def test_batches_of_one_size_cover_the_samples(num_items: int, batch_size: int, drop_last: bool) -> None:
    schedule = ConstantSchedule(num_items, batch_size, drop_last, None)
    steps = schedule.steps(3)
    rest = num_items % batch_size if drop_last else 0
    assert len(schedule) == len(steps)
    assert sum(step.num_samples for step in steps) == num_items - rest
    assert all(step == Step(0, batch_size) for step in steps[:-1])


def test_a_number_of_batches_is_kept_whatever_the_dataset_has() -> None:
    assert ConstantSchedule(5, 4, True, 3).steps(0) == [Step(0, 4)] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 5},
        {"seed": 5, "choice_weights": [0.0, 1.0, 3.0]},
        {"seed": 2, "num_batches": 40},
        {"seed": 2, "choice_schedule": "progressive", "schedule_epochs": 4, "schedule_random_mix": 0.0},
    ],
    ids=str,
)
def test_batches_of_several_sizes_are_timms(timm_data: Any, options: dict[str, Any]) -> None:
    sizes = [4, 6, 9]
    ours = SizeSchedule(100, sizes, **options)
    theirs = timm_data.scheduled_sampler.ScheduledBatchSampler(range(100), sizes, **options)
    for epoch in (0, 3, 1):
        theirs.set_epoch(epoch)
        assert ours.steps(epoch) == [(batch[0][1], len(batch)) for batch in theirs]
        assert len(ours) == len(theirs) == len(ours.steps(epoch))
    assert (ours.batch_sizes, ours.average_batch_size) == (theirs.batch_sizes, theirs.average_batch_size)
