from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from swift_loader.engine.stalls import StallWatch, Step

LIMITS = st.none() | st.floats(0.1, 100)


def test_a_task_is_warned_of_once_and_given_up_when_it_and_the_wait_have_lasted() -> None:
    watch = StallWatch(2.0, 5.0, now_s=10.0)
    assert [watch.judge(9.0, now) for now in (10.5, 11.0, 12.0, 14.9)] == [
        Step.NOTHING,
        Step.WARN,
        Step.NOTHING,
        Step.NOTHING,
    ]
    assert watch.judge(9.0, 15.0) is Step.GIVE_UP
    assert watch.judge(14.0, 15.0) is Step.NOTHING, "a task that has just begun isn't to blame for a long wait"


def test_after_somebody_was_given_up_the_wait_begins_anew() -> None:
    watch = StallWatch(None, 5.0, now_s=0.0)
    assert watch.judge(0.0, 5.0) is Step.GIVE_UP
    watch.start_over(5.0)
    assert watch.judge(0.0, 9.9) is Step.NOTHING
    assert watch.judge(0.0, 10.0) is Step.GIVE_UP


def test_where_nobody_has_the_batch_a_replacement_may_take_its_time() -> None:
    watch = StallWatch(None, 1.0, now_s=0.0)
    assert watch.judge_itself(3.9, grace_s=3.0) is Step.NOTHING
    assert watch.judge_itself(4.0, grace_s=3.0) is Step.GIVE_UP


def test_without_limits_there_is_nothing_to_check() -> None:
    watch = StallWatch(None, None, now_s=0.0)
    assert watch.check_at_s == math.inf
    watch.plan_next_check([], 1e9, grace_s=0.0)
    assert watch.check_at_s == math.inf
    assert watch.judge(0.0, 1e9) is watch.judge_itself(1e9, 0.0) is Step.NOTHING


@given(warn=LIMITS, limit=LIMITS, since=st.lists(st.floats(0, 100), max_size=3), grace=st.floats(0, 10))
def test_whatever_falls_due_is_seen_by_a_check_that_was_planned(
    warn: float | None, limit: float | None, since: list[float], grace: float
) -> None:
    """Going from check to check, each step is taken within one period of the moment when it was due."""
    watch, now, warned, gave_up = StallWatch(warn, limit, now_s=100.0), 100.0, False, False
    for _ in range(3000):
        steps = [watch.judge(start, now) for start in since] or [watch.judge_itself(now, grace)]
        warned |= Step.WARN in steps
        gave_up |= Step.GIVE_UP in steps
        if gave_up:
            break
        watch.plan_next_check(since, now, grace)
        assert watch.check_at_s > now
        if watch.check_at_s == math.inf or watch.check_at_s > 1000:
            break
        now = watch.check_at_s
    assert gave_up or limit is None
    assert warned or warn is None or gave_up
    if gave_up and limit is not None:
        assert 100 + limit - 1e-6 <= now <= 100 + limit + (grace if not since else 0) + 1e-6


def test_the_state_can_be_read() -> None:
    assert repr(StallWatch(2.0, None, now_s=1.0)) == "<StallWatch since 1.0 s, checks at 3.0 s>"


def test_time_in_which_the_process_was_stopped_is_counted_for_nobody() -> None:
    watch = StallWatch(None, 5.0, now_s=10.0)
    watch.expect(11.0, 12.0)
    assert watch.note_time(12.05) == 0.0, "a wait may end a little late"
    watch.expect(13.0, 14.0)
    assert watch.note_time(113.0) == 100.0
    assert watch.check_at_s == 115.0
    assert watch.judge(109.0, 114.9) is Step.NOTHING
    assert watch.judge(109.0, 115.0) is Step.GIVE_UP
    assert watch.note_time(1000.0) == 0.0, "nobody said when to expect it"
