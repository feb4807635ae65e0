"""Each decision of the scheduler, by example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from swift_loader.errors import ProtocolError, WorkerDied
from swift_loader.sampling.work import PlannedWork
from swift_loader.scheduler.messages import (
    Answered,
    Death,
    Disconnected,
    Dismiss,
    Ended,
    Event,
    ExecutorFailed,
    Fail,
    GiveUp,
    Kill,
    Look,
    NoBatch,
    Ready,
    Reap,
    Release,
    SampleFailed,
    Send,
    Stall,
    Start,
    TemplateEnded,
    Warn,
    WorkerLost,
)
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.scheduler import Scheduler, SchedulerSettings, SchedulerState
from tests.support.work import planned

LIMITS = Limits(max_in_flight=4, max_ready_per_worker=4, in_order=True)
DEATH = Death(-9)


def scheduler_with(ready: int, *, num_workers: int | None = None, warning_s: float | None = None) -> Scheduler:
    scheduler = Scheduler(SchedulerSettings(LIMITS, 3, warning_s, timeout_s=10.0, num_workers=num_workers))
    for worker in range(ready):
        scheduler.handle(Ready(worker, worker), 0.0)
    return scheduler


def resizable(num_workers: int) -> Scheduler:
    return scheduler_with(num_workers, num_workers=num_workers)


def begin(scheduler: Scheduler) -> list[Send]:
    scheduler.begin(planned(0, 0, lambda _: 10), keeps_meaning=True)
    return [action for action in scheduler.decide(0.0) if isinstance(action, Send)]


def build(scheduler: Scheduler, task: Send) -> None:
    scheduler.handle(Answered(task, f"batch {task.work.step}", build_s=0.1), 0.0)


# Batches and errors


def test_a_batch_is_delivered_with_the_failures_of_its_samples_as_they_were_reported() -> None:
    scheduler = scheduler_with(1)
    first, second = begin(scheduler)
    for failure in ("c", "a"):
        scheduler.handle(SampleFailed(first, failure), 0.0)
    build(scheduler, first)
    build(scheduler, second)
    found = [scheduler.ledger.deliver() for _ in range(3)]
    assert [(one.work, one.batch, one.failures) for one in found if one is not None] == [
        (PlannedWork(0, 0), "batch 0", ("c", "a")),
        (PlannedWork(0, 1), "batch 1", ()),
    ]


def test_after_close_events_are_of_no_interest() -> None:
    scheduler = scheduler_with(1)
    tasks = begin(scheduler)
    scheduler.handle(SampleFailed(tasks[0], "why"), 0.0)
    build(scheduler, tasks[0])
    (ledger,) = scheduler.close()
    assert [(one.batch, one.failures) for one in ledger.in_flight()] == [("batch 0", ("why",)), (None, ())]
    build(scheduler, tasks[1])
    scheduler.handle(Disconnected(0, 0), 0.0)
    scheduler.fail(ValueError("too late"))
    assert scheduler.decide(0.0) == []
    assert scheduler.state is SchedulerState.CLOSED
    assert repr(scheduler) == "<Scheduler closed, <Ledger generation 0, tasks sent: none, 0 ready>>"


def test_once_it_has_failed_it_gives_no_tasks_but_delivers_what_is_ready() -> None:
    scheduler = scheduler_with(1)
    tasks = begin(scheduler)
    error = ValueError("datasets differ")
    build(scheduler, tasks[0])
    scheduler.handle(ExecutorFailed(error), 0.0)
    scheduler.fail(KeyError("only the first error counts"))
    assert scheduler.decide(0.0) == [Fail(error)]
    assert scheduler.ledger.deliver() is not None
    assert scheduler.ledger.deliver() is None
    scheduler.handle(Disconnected(0, 0), 0.0)
    assert scheduler.decide(0.0) == [Reap(0)]
    scheduler.handle(Ended(0, DEATH), 0.0)
    scheduler.handle(TemplateEnded(WorkerDied("also the template")), 0.0)
    assert scheduler.decide(0.0) == []
    assert scheduler.state is SchedulerState.FAILED


@pytest.mark.parametrize(
    "event",
    [
        lambda first, second: Answered(second, "out of order"),
        lambda first, second: Answered(replace(first), "of another one's task"),
        lambda first, second: Answered(replace(first, worker=5), "of an unknown worker"),
        lambda first, second: NoBatch(first),
        lambda first, second: Ready(0, 0),
        lambda first, second: Ended(0, DEATH),
    ],
)
def test_an_event_that_makes_no_sense_is_refused_and_changes_nothing(event: Callable[[Send, Send], Event]) -> None:
    scheduler = scheduler_with(1)
    first, second = begin(scheduler)
    with pytest.raises(ProtocolError, match=r"worker [05] "):
        scheduler.handle(event(first, second), 0.0)
    assert scheduler.ledger.deliver() is None
    build(scheduler, first)
    assert scheduler.ledger.deliver() is not None


# Stalls


def test_a_worker_that_hangs_is_warned_of_and_killed_and_given_up_if_that_has_no_effect() -> None:
    scheduler = scheduler_with(1, warning_s=4.0)
    first, _ = begin(scheduler)
    scheduler.watchdog.begin(1.0, 0.0)
    decided = {}
    for now in range(1, 25):
        if now >= scheduler.watchdog.deadline_s:
            scheduler.tick(now)
            if actions := scheduler.decide(now):
                decided[now] = actions
    assert decided == {
        5: [Warn(Stall(0, first.work, 5.0))],
        6: [Look(0)],
        11: [Kill(0, Stall(0, first.work, 11.0))],
        21: [Reap(0)],
    }
    scheduler.handle(Disconnected(0, 0), 21.0)
    assert scheduler.decide(21.0) == [], "it is reaped once"
    scheduler.handle(Ended(0, Death(None)), 22.0)
    warning, *_ = scheduler.decide(22.0)
    assert isinstance(warning, Warn)
    assert isinstance(warning.about, WorkerLost)
    assert warning.about.work == first.work


def test_each_worker_that_hangs_at_its_first_task_is_warned_of_if_the_loop_waits_for_any() -> None:
    scheduler = Scheduler(SchedulerSettings(Limits(4, 4, in_order=False), stall_warning_s=1.0))
    for worker in range(3):
        scheduler.handle(Ready(worker, worker), 0.0)
    begin(scheduler)
    scheduler.watchdog.begin(0.0, 0.0)
    warned = []
    for now in (1.1, 2.2):
        scheduler.tick(now)
        warned += [action.about for action in scheduler.decide(now) if isinstance(action, Warn)]
    assert [stall.worker for stall in warned if isinstance(stall, Stall)] == [0, 1, 2]


def test_if_no_worker_has_the_batch_only_this_wait_ends() -> None:
    scheduler = scheduler_with(0, warning_s=3.0)
    begin(scheduler)
    scheduler.watchdog.begin(0.0, 5.0)
    decided = {}
    for now in range(20):
        if now >= scheduler.watchdog.deadline_s:
            scheduler.tick(now)
            decided[now] = scheduler.decide(now)
    work = PlannedWork(0, 0)
    assert decided[3] == [Warn(Stall(None, work, 3.0))]
    assert decided[15] == [GiveUp(Stall(None, work, 15.0))]
    assert {now for now, actions in decided.items() if actions} <= {3, 15, 18}
    assert scheduler.state is SchedulerState.RUNNING


def test_a_worker_that_is_not_to_be_replaced_keeps_its_batch_and_the_loop_gets_the_error_with_each_wait() -> None:
    limits = Limits(max_in_flight=4, max_ready_per_worker=4, in_order=True)
    scheduler = Scheduler(SchedulerSettings(limits, timeout_s=10.0, replaces_stalled=False))
    scheduler.handle(Ready(0, 0), 0.0)
    begin(scheduler)
    scheduler.decide(0.0)
    for began in (0, 10):
        scheduler.watchdog.begin(float(began), 0.0)
        scheduler.tick(began + 9.0)
        assert scheduler.decide(began + 9.0) == []
        scheduler.tick(began + 10.0)
        assert scheduler.decide(began + 10.0) == [GiveUp(Stall(0, PlannedWork(0, 0), began + 10.0))]
    assert scheduler.state is SchedulerState.RUNNING


def test_a_failure_says_nothing_about_how_long_a_batch_takes() -> None:
    scheduler = Scheduler(SchedulerSettings(Limits(40, 40, in_order=True)))
    scheduler.handle(Ready(0, 0), 0.0)
    sent = begin(scheduler)
    scheduler.handle(Answered(sent[0], error=ValueError("one sample")), 0.0)
    scheduler.ledger.deliver()
    build(scheduler, sent[1])  # takes 0.1 s
    scheduler.ledger.deliver()
    assert len(scheduler.decide(0.0)) == len(sent) == 2, "tasks wait at a worker as if its batches took no time"


# Another number of workers


def test_a_dismissed_worker_whose_stream_is_seen_to_end_twice_is_reaped_once() -> None:
    scheduler = resizable(2)
    scheduler.resize(1, LIMITS)
    assert scheduler.decide(0.0) == [Dismiss(1)]
    scheduler.handle(Disconnected(1, 1), 0.0)
    scheduler.handle(Disconnected(1, 1), 0.0)
    assert scheduler.decide(0.0) == [Reap(1)]
    scheduler.handle(Ended(1, DEATH), 0.0)
    assert scheduler.decide(0.0) == [Release(1)]


def test_the_place_of_one_that_was_dismissed_is_taken_if_it_is_wanted_again() -> None:
    scheduler = resizable(2)
    scheduler.resize(1, LIMITS)
    scheduler.resize(2, LIMITS)
    assert scheduler.decide(0.0) == [Dismiss(1)]
    scheduler.handle(Disconnected(1, 1), 0.0)
    scheduler.handle(Ended(1, DEATH), 0.0)
    assert scheduler.decide(0.0) == [Reap(1), Release(1), Start(1)]


def test_renewed_it_gives_back_what_is_in_flight_and_begins_with_other_workers() -> None:
    scheduler = resizable(2)
    sent = begin(scheduler)
    build(scheduler, sent[0])
    (dropped,) = scheduler.renew()
    assert [one.batch for one in dropped.in_flight()] == ["batch 0", None, None, None]
    assert scheduler.decide(0.0) == []
    scheduler.handle(Ready(2, 0), 0.0)
    assert begin(scheduler)[0].work == sent[0].work
