"""Rows that a run excludes, against a direct model: the list of the epoch's order without them."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.errors import StateMismatch
from swift_loader.sampling.plan import BatchPlan, Plan, PlanSettings, Uneven
from swift_loader.sampling.run import Run
from swift_loader.sampling.skips import NO_SKIPS, Position, Skips, rows_of
from swift_loader.sampling.work import PlannedSource
from tests.unit.sampling.test_plan import settings_of, whole_order


class Rank:
    """One rank's loop over its batches, as a loader makes it."""

    def __init__(self, num_samples: int, chosen: PlanSettings, state: dict[str, Any] | None) -> None:
        self.run, self.chosen, self.num_samples = Run(chosen.order, frozenset()), chosen, num_samples
        self.run.note_length(num_samples)
        if state is not None:
            self.run.load_state_dict(state)

    def plan(self) -> Plan:
        return Plan.of(self.num_samples, replace(self.chosen, skips=self.run.skips))

    def begin_pass(self) -> None:
        begin = self.run.next_begin(self.num_samples)
        plan, step = self.plan().resumed_at(begin)
        self.run.begin_pass(PlannedSource(plan, begin, step))

    @property
    def is_over(self) -> bool:
        return self.run.this is None or self.run.this.has_all

    def take(self) -> BatchPlan:
        this = self.run.this
        assert this is not None
        if self.is_over:
            this.is_over = True
            return BatchPlan(np.empty(0, np.int64), 0)
        step = this.steps.first
        this.steps.note(step)
        return this.plan.batch(this.begin.epoch, step)

    def exclude(self, rows: list[int], *, in_pass: bool) -> None:
        this, since = self.run.this, None
        if in_pass and this is not None:
            since = Position(this.begin.epoch, this.position.num_samples)
        self.run.exclude(np.array(rows, np.int64), self.num_samples, since)
        if in_pass and this is not None and not self.is_over:
            plan, step = self.plan().resumed_at(this.position)
            this.replan(plan)
            assert step == this.steps.first, "what was delivered counts as before"


@pytest.mark.slow
@given(data=st.data(), num_samples=st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_a_run_delivers_the_order_without_the_rows_through_resumes_with_other_ranks(
    data: st.DataObject, num_samples: int
) -> None:
    uneven, drop_last = data.draw(st.sampled_from(Uneven)), data.draw(st.booleans())
    window = data.draw(st.sampled_from([None, 0, 5, 17]))
    common = settings_of(uneven=uneven, drop_last=drop_last, window=window, shuffle=data.draw(st.booleans()))
    order = [whole_order(Plan.of(num_samples, common), epoch) for epoch in range(80)]
    excluded: set[int] = set()
    epoch = reached = 0  # of the model
    state: Any = None
    seen: list[tuple[PlanSettings, Position, BatchPlan]] = []
    for _ in range(data.draw(st.integers(1, 3), "legs")):
        world_size, batch_size = data.draw(st.sampled_from([1, 2, 3, 5])), data.draw(st.integers(1, 7))
        chosen = replace(common, world_size=world_size, batch_size=batch_size)
        ranks = [Rank(num_samples, replace(chosen, rank=rank), state) for rank in range(world_size)]
        in_pass = False
        for _ in range(data.draw(st.integers(1, 14), "steps")):
            rows = data.draw(st.none() | st.lists(st.integers(0, num_samples - 1), max_size=6, unique=True))
            if rows and len(excluded | set(rows)) < num_samples:
                excluded |= set(rows)
                for rank in ranks:
                    rank.exclude(sorted(rows), in_pass=in_pass)
            if not in_pass:
                for rank in ranks:
                    rank.begin_pass()
                begin = ranks[0].run.this.begin  # type: ignore[union-attr]
                if begin.epoch != epoch:
                    epoch, reached = begin.epoch, 0
                in_pass = True
            left = [row for row in order[epoch][reached:] if row not in excluded]
            befores = [rank.run.position for rank in ranks]
            batches = [rank.take() for rank in ranks]
            taken = [row for one in batches for row in one.indices[: len(one.indices) - one.num_padding].tolist()]
            assert taken == left[: len(taken)]
            assert not excluded & {row for one in batches for row in one.indices.tolist()}, "not as padding either"
            if not any(len(one.indices) for one in batches):
                in_pass = False
                num_dropped = chosen.samples_per_step if drop_last else world_size if uneven is Uneven.DROP else 1
                assert len(left) < num_dropped
            if taken:
                reached = order[epoch].index(taken[-1]) + 1
            is_full = len(taken) == chosen.samples_per_step
            assert is_full or len(taken) == len(left) or uneven is Uneven.DROP or drop_last
            seen += [
                (rank.chosen, before, one)
                for rank, before, one in zip(ranks, befores, batches, strict=True)
                if len(one.indices)
            ]
            assert len({json.dumps(rank.run.state_dict()) for rank in ranks}) == 1 or uneven is Uneven.EXACT
        state = json.loads(json.dumps(ranks[0].run.state_dict()))
    skips = Skips.from_dict(state, num_samples)
    assert skips == ranks[0].run.skips
    assert sorted(row for one in skips.exclusions for row in one.rows.tolist()) == sorted(excluded)
    for settings_then, before, batch in seen:  # as replay does
        plan, step = Plan.of(num_samples, replace(settings_then, skips=skips)).resumed_at(before)
        again = plan.batch(before.epoch, step)
        assert (again.indices.tolist(), again.num_padding) == (batch.indices.tolist(), batch.num_padding)
    plan = ranks[0].plan()
    last = plan.last_irregular_epoch
    assert len({plan.num_batches(later) for later in range(last + 1, last + 4)}) == 1
    assert plan.num_samples(last + 1) == sum(
        len(plan.batch(last + 1, s).indices) for s in range(plan.num_batches(last + 1))
    )


events = st.tuples(st.integers(0, 2), st.integers(0, 20), st.sets(st.integers(0, 40), min_size=1))


@given(given=st.lists(events, max_size=5))
def test_exclusions_are_the_same_value_however_they_come_and_survive_json(given: list[Any]) -> None:
    def all_of(asked: list[Any]) -> Skips:
        skips = NO_SKIPS
        for epoch, position, rows in asked:
            skips = skips.excluding(Position(epoch, position), np.array(sorted(rows)))
        return skips

    skips = all_of(given)
    assert skips == all_of(given[::-1])
    assert Skips.from_dict(json.loads(json.dumps(skips.to_dict())), 50) == skips
    first = {row: min((e, p) for e, p, rows in given if row in rows) for _, _, rows in given for row in rows}
    found = {row: (one.since.epoch, one.since.num_samples) for one in skips.exclusions for row in one.rows.tolist()}
    assert found == first, "each row is held once, since it was excluded first"


@pytest.mark.parametrize(
    "value",
    [3, "text", [3], [[0, 1]]]
    + [[[0, 1, rows]] for rows in (2, [[1, 2]], "", "2", "3:3", "1:2.5", "-1:2", f"0:{2**63}", "1:2,", "1-2", "1:2:3")]
    + [[[*begin, "1:2"]] for begin in ((-1, 0), (0, 1.5), (True, 0))],
)
def test_anything_else_in_a_state_is_refused(value: Any) -> None:
    with pytest.raises(StateMismatch, match=r"excluded=.* must be a list"):
        Skips.from_dict({"excluded": value}, 10)


@pytest.mark.parametrize(("position", "end", "num_samples"), [(11, 3, 10), (3, 11, 10), (0, 1, None)])
def test_rows_or_a_position_beyond_the_dataset_are_refused(position: int, end: int, num_samples: int | None) -> None:
    with pytest.raises(StateMismatch, match=f"beyond its num_samples={num_samples}"):
        Skips.from_dict({"excluded": [[0, position, f"0:{end}"]]}, num_samples)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (3, [3]),
        (np.int32(3), [3]),
        ([4, 2, 4], [2, 4]),
        ({7}, [7]),
        (iter((1, 0)), [0, 1]),
        (np.array([[9], [8]], np.uint64), [8, 9]),
        ([], []),
        (lambda rows: rows % 4 == 1, [1, 5, 9]),
    ],
)
def test_rows_are_indices_or_a_function(asked: Any, found: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift_loader.sampling.skips.BLOCK_INDICES", 4)
    assert rows_of(asked, 10).tolist() == found


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (10, ValueError, "rows 10 to 10 aren't all in the dataset, whose last is 9"),
        ([0, -1], ValueError, "rows -1 to 0 aren't all"),
        (np.array([2**64 - 1], np.uint64), ValueError, "aren't all"),
        (1.0, TypeError, "the rows are float64; they must be integers"),
        (None, TypeError, "the rows are object"),
        ("12", TypeError, "the rows are <U1"),
        ([True, False], TypeError, "the rows are bool"),
        (lambda rows: rows, TypeError, r"returned int64 of the shape \(10,\); it must return bools"),
        (lambda rows: rows[:3] > 0, TypeError, r"of the shape \(3,\); .* the shape \(10,\), one for each index"),
        (lambda _rows: True, TypeError, r"returned bool of the shape \(\)"),
    ],
)
def test_rows_that_are_none_say_why(asked: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rows_of(asked, 10)


@pytest.mark.slow
def test_a_hundred_thousand_rows_are_found_once_per_epoch_and_take_a_search_per_batch() -> None:
    rows = np.random.default_rng(0).choice(10**6, 10**5, replace=False)
    skips = NO_SKIPS.excluding(Position(0, 5000), np.sort(rows))
    plan = Plan.of(10**6, replace(settings_of(batch_size=64, window=None), skips=skips))
    for epoch in (0, 1):
        order = np.array(whole_order(plan, epoch))
        kept = np.isin(order, rows, invert=True)
        kept[: 5000 if epoch == 0 else 0] = True
        assert plan.num_samples(epoch) == kept.sum()
        assert plan.batch(epoch, 9000).indices.tolist() == order[kept][9000 * 64 : 9001 * 64].tolist()
        assert plan.gaps(epoch) is plan.gaps(epoch)


def test_many_rows_that_are_excluded_bit_by_bit_are_kept_once() -> None:
    parts, skips = np.random.default_rng(0).permutation(20_000).reshape(40, 500), NO_SKIPS
    tracemalloc.start()
    try:
        for rows in parts:
            skips = skips.excluding(Position(0, 0), np.sort(rows))
        nbytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [one.num_rows for one in skips.exclusions] == [20_000]
    assert nbytes < 1 << 20
