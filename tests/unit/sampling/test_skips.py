"""What a run leaves out of its epochs: the arithmetic, and what is delivered around it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.errors import StateMismatch
from swift_loader.sampling.plan import Plan, PlanReader, Uneven
from swift_loader.sampling.skips import NO_SKIPS, Gaps, SkippedRange, Skips
from tests.unit.sampling.test_plan import SETTINGS, plans_of_all_ranks, settings_of, whole_order

ranges = st.builds(
    lambda epoch, begin, length: SkippedRange(epoch, begin, begin + length),
    st.integers(0, 2),
    st.integers(0, 60),
    st.integers(1, 20),
)
some_ranges = st.lists(ranges, max_size=6)


def gaps_of(skips: Skips, epoch: int) -> Gaps:
    return Plan.of(100, replace(SETTINGS, skips=skips)).gaps(epoch)


def positions(skips: Skips, epoch: int) -> set[int]:
    return {position for one in skips.ranges if one.epoch == epoch for position in range(one.begin, one.end)}


@given(first=some_ranges, more=some_ranges)
def test_added_ranges_are_the_union_however_they_come(first: list[SkippedRange], more: list[SkippedRange]) -> None:
    skips = NO_SKIPS.added(first).added(more)
    assert skips == NO_SKIPS.added([*more, *first])
    for epoch in range(3):
        wanted = {p for one in first + more if one.epoch == epoch for p in range(one.begin, one.end)}
        assert positions(skips, epoch) == wanted
        assert gaps_of(skips, epoch).num_positions == len(wanted)
    ends = [(one.epoch, one.end) for one in skips.ranges]
    assert all((one.epoch, one.begin) not in ends for one in skips.ranges), "ranges that touch are one"


@given(skips=some_ranges.map(NO_SKIPS.added), epoch=st.integers(0, 2))
def test_places_count_what_is_not_skipped(skips: Skips, epoch: int) -> None:
    left = [position for position in range(100) if position not in positions(skips, epoch)]
    places = np.arange(len(left))
    gaps = gaps_of(skips, epoch)
    assert gaps.positions_of(places).tolist() == left
    assert [gaps.position_of(place) for place in places.tolist()] == left
    for position in range(100):
        assert gaps.place_of(position) == sum(other < position for other in left)


@given(skips=some_ranges.map(NO_SKIPS.added))
def test_skips_survive_json(skips: Skips) -> None:
    assert Skips.from_dict(json.loads(json.dumps(skips.to_dict())), 100) == skips


@pytest.mark.parametrize("kind", [np.array, lambda rows: [tuple(map(np.int64, row)) for row in rows]])
def test_a_checkpoint_may_convert_the_ranges(kind: Any) -> None:
    state = {"skipped": kind([[0, 2, 4], [1, 0, 3]])}
    assert Skips.from_dict(state, 10) == Skips((SkippedRange(0, 2, 4), SkippedRange(1, 0, 3)))


@pytest.mark.parametrize(
    "value",
    [3, "text", {"a": 1}, [3], [[0, 1]], [[0, 1, 2, 3]], [[0, 4, 4]], [[-1, 0, 1]], [[0, -1, 1]], [[0, 1, 2.5]]],
)
def test_anything_else_in_a_state_is_refused(value: Any) -> None:
    with pytest.raises(StateMismatch, match=r"skipped=.* must be a list of ranges"):
        Skips.from_dict({"skipped": value}, 10)


def test_a_range_beyond_the_dataset_is_refused() -> None:
    with pytest.raises(StateMismatch, match="up to 11, which is beyond its num_samples=10"):
        Skips.from_dict({"skipped": [[0, 5, 11]]}, 10)


# The plan ---------------------------------------------------------------------------------------------------------

small = st.integers(1, 9)


def kept(plan: Plan, epoch: int, step: int) -> list[int]:
    """The samples of a batch, without its padding."""
    batch = plan.batch(epoch, step)
    return [int(index) for index in batch.indices[: len(batch.indices) - batch.num_padding]]


@given(data=st.data(), num_samples=st.integers(1, 150), batch_size=small, world_size=st.integers(1, 4))
@settings(max_examples=75, deadline=None)
def test_skipping_steps_leaves_all_others_as_they_are(
    data: st.DataObject, num_samples: int, batch_size: int, world_size: int
) -> None:
    uneven, drop_last = data.draw(st.sampled_from(Uneven)), data.draw(st.booleans())
    chosen = settings_of(batch_size=batch_size, world_size=world_size, uneven=uneven, drop_last=drop_last)
    for plan in plans_of_all_ranks(num_samples, chosen):
        num_steps = Plan(plan.order, replace(plan.settings, rank=0)).num_batches(1)
        if not num_steps:
            continue
        steps = data.draw(st.sets(st.integers(0, num_steps - 1)))
        skips = NO_SKIPS.added(plan.range_of(1, step) for step in steps)
        less = Plan(plan.order, replace(plan.settings, skips=skips))
        left = [step for step in range(plan.num_batches(1)) if step not in steps]
        assert [kept(less, 1, step) for step in range(less.num_batches(1))] == [kept(plan, 1, step) for step in left]
        assert [less.number_in_epoch(1, step) for step in range(less.num_batches(1))] == left[: less.num_batches(1)]
        reader = PlanReader(less)
        for step in range(less.num_batches(1)):
            assert reader.batch(1, step).indices.tolist() == less.batch(1, step).indices.tolist()


@given(num_samples=st.integers(1, 100), batch_size=small, world_size=st.integers(1, 5), cut=some_ranges)
@settings(max_examples=75, deadline=None)
def test_no_skipped_sample_is_padding(
    num_samples: int, batch_size: int, world_size: int, cut: list[SkippedRange]
) -> None:
    skips = NO_SKIPS.added(replace(one, epoch=0) for one in cut if one.end <= num_samples)
    plans = plans_of_all_ranks(num_samples, settings_of(batch_size=batch_size, world_size=world_size))
    order = whole_order(plans[0])
    skipped = {order[position] for position in positions(skips, 0)}
    delivered = [
        index
        for plan in plans
        for less in [Plan(plan.order, replace(plan.settings, skips=skips))]
        for step in range(less.num_batches(0))
        for index in less.batch(0, step).indices.tolist()
    ]
    assert set(delivered) == set(order) - skipped


def test_an_epoch_is_irregular_if_a_part_of_it_is_skipped() -> None:
    skips = NO_SKIPS.added([SkippedRange(0, 0, 20), SkippedRange(1, 15, 20)])
    plan = Plan.of(20, replace(settings_of(batch_size=8), skips=skips))
    assert (plan.num_batches(0), plan.num_batches(1)) == (0, 2)
    assert plan.last_irregular_epoch == 1


@pytest.mark.parametrize("step", [-1, 5])
def test_the_range_of_a_step_that_an_epoch_lacks_is_an_index_error(step: int) -> None:
    with pytest.raises(IndexError, match="outside an epoch of 5 steps"):
        Plan.of(50, settings_of(batch_size=5, world_size=2)).range_of(0, step)


# The run ----------------------------------------------------------------------------------------------------------
