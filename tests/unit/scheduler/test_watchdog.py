from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from swift_loader.scheduler.restarts import MAX_STOPS, Judgement, Watchdog

LIMITS = st.none() | st.floats(0.1, 100)


def watching(warn_after_s: float | None, limit_s: float | None, now_s: float, grace_s: float = 0.0) -> Watchdog:
    watchdog = Watchdog(warn_after_s, limit_s)
    watchdog.begin(now_s, grace_s)
    return watchdog


def test_each_wait_warns_once_and_gives_up_a_task_that_has_lasted_as_long_as_the_wait() -> None:
    watchdog = watching(2.0, 5.0, now_s=10.0)
    judged = [watchdog.judge(0, 9.0, now) for now in (10.5, 11.0, 12.0, 14.9, 15.0)]
    nothing = Judgement.NOTHING
    assert judged == [nothing, Judgement.WARN, nothing, nothing, Judgement.GIVE_UP]
    assert watchdog.judge(0, 14.0, 15.0) is nothing, "a task that has just begun isn't to blame for a long wait"
    watchdog.start_over(15.0)
    assert [watchdog.judge(0, 9.0, now) for now in (19.9, 20.0)] == [nothing, Judgement.GIVE_UP]
    watchdog.begin(24.0, 0.0)
    assert watchdog.deadline_s == 26.0
    assert [watchdog.judge(0, 9.0, now) for now in (26.0, 28.9, 29.0)] == [Judgement.WARN, nothing, Judgement.GIVE_UP]


@given(warn=LIMITS, limit=LIMITS, since=st.lists(st.floats(0, 100), max_size=3), grace=st.floats(0, 10))
def test_whatever_falls_due_is_seen_by_a_check_that_was_planned(
    warn: float | None, limit: float | None, since: list[float], grace: float
) -> None:
    """From check to check, each judgement comes within one period of the moment when it was due."""
    watchdog, now, warned, gave_up = watching(warn, limit, 100.0, grace), 100.0, False, False
    for _ in range(3000):
        judgements = [watchdog.judge(0, start, now) for start in since] or [watchdog.judge_itself(now)]
        warned |= Judgement.WARN in judgements
        gave_up |= Judgement.GIVE_UP in judgements
        if gave_up:
            break
        watchdog.plan_next_check(since, now)
        assert watchdog.deadline_s > now
        if watchdog.deadline_s == math.inf or watchdog.deadline_s > 1000:
            break
        now = watchdog.deadline_s
    assert gave_up or limit is None
    assert warned or warn is None or gave_up
    if gave_up and limit is not None:
        assert 100 + limit - 1e-6 <= now <= 100 + limit + (grace if not since else 0) + 1e-6


def test_time_in_which_the_process_was_stopped_is_counted_for_nobody() -> None:
    watchdog = watching(None, 5.0, now_s=10.0)
    watchdog.rest(11.0, 12.0)
    assert watchdog.wake(12.05) == 0.0, "a wait may end a little late"
    watchdog.rest(13.0, 14.0)
    assert watchdog.wake(113.0) == 100.0
    assert watchdog.deadline_s == 112.5
    assert [watchdog.judge(0, 109.0, now) for now in (114.9, 115.0)] == [Judgement.NOTHING, Judgement.GIVE_UP]
    assert watchdog.wake(1000.0) == 0.0, "nobody said when to expect it"


def test_if_every_rest_ends_late_only_the_delay_does_not_count() -> None:
    watchdog = watching(None, 5.0, now_s=0.0)
    stopped = []
    for start in range(0, 10 * (MAX_STOPS + 2), 10):
        watchdog.rest(start, start + 1)
        stopped.append(watchdog.wake(start + 2))
    assert stopped == [2.0] * MAX_STOPS + [1.0] * 2
