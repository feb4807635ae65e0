"""Each decision of the scheduler, by example."""

from __future__ import annotations

import pytest

from swift_loader.errors import ProtocolError, WorkerDied
from swift_loader.scheduler.actions import (
    Dismiss,
    Fail,
    GiveUp,
    Kill,
    Reap,
    Release,
    Replace,
    ReplaceTemplate,
    Send,
    Stall,
    Start,
    TemplateLost,
    Warn,
    WorkerLost,
)
from swift_loader.scheduler.events import (
    Built,
    Death,
    Disconnected,
    Ended,
    ExecutorFailed,
    Failed,
    Ready,
    SampleFailed,
    Skipped,
    StreamEnded,
    TemplateEnded,
)
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.restarts import Decision
from swift_loader.scheduler.scheduler import Delivered, Scheduler, SchedulerSettings, SchedulerState
from swift_loader.scheduler.work import PlannedSource, PlannedWork

LIMITS = Limits(max_in_flight=4, max_ready_per_worker=4, max_tasks=10, in_order=True)
DEATH = Death(-9)


def scheduler_with(
    num_workers: int, *, max_restarts: int = 3, in_order: bool = True, warning_s: float | None = None
) -> Scheduler:
    limits = Limits(4, 4, 10, in_order)
    scheduler = Scheduler(SchedulerSettings(limits, max_restarts, warning_s, timeout_s=10.0))
    for worker in range(num_workers):
        scheduler.handle(Ready(worker, worker), 0.0)
    return scheduler


def resizable(num_workers: int) -> Scheduler:
    settings = SchedulerSettings(LIMITS, 3, None, timeout_s=10.0, num_workers=num_workers)
    scheduler = Scheduler(settings)
    for worker in range(num_workers):
        scheduler.handle(Ready(worker, worker), 0.0)
    return scheduler


def begin(scheduler: Scheduler, epoch: int = 0, *, keeps_meaning: bool = True) -> list[Send]:
    scheduler.begin(PlannedSource(epoch, 0, lambda _: 10), keeps_meaning=keeps_meaning)
    sends = [action for action in scheduler.decide(0.0) if isinstance(action, Send)]
    assert sends or not scheduler.ledger.queues.busy()
    return sends


def build(scheduler: Scheduler, task: Send, now_s: float = 0.0) -> None:
    scheduler.handle(Built(task.worker, task.generation, task.sequence, f"batch {task.work.step}", 0.1), now_s)


def end(scheduler: Scheduler, worker: int, death: Death = DEATH, worker_id: int | None = None) -> None:
    scheduler.handle(Disconnected(worker, worker if worker_id is None else worker_id), 0.0)
    assert scheduler.decide(0.0) == [Reap(worker)]
    scheduler.handle(Ended(worker, worker if worker_id is None else worker_id, death), 0.0)


def lost_worker(
    task: Send, decision: Decision = Decision.REPLACE, *, num_in_a_row: int = 1, num_lost: int = 2
) -> WorkerLost:
    return WorkerLost(
        worker=task.worker,
        worker_id=task.worker,
        decision=decision,
        num_in_a_row=num_in_a_row,
        work=task.work,
        is_trial=task.generation == 0,
        num_lost=num_lost,
        death=DEATH,
    )


# Batches and errors


def test_a_batch_is_delivered_with_the_failures_of_its_samples_as_they_were_reported() -> None:
    scheduler = scheduler_with(1)
    first, second = begin(scheduler)
    for position, failure in ((3, "c"), (1, "a"), (3, "C")):
        scheduler.handle(SampleFailed(0, first.generation, first.sequence, position, failure), 0.0)
    build(scheduler, first)
    build(scheduler, second)
    assert scheduler.take() == Delivered(PlannedWork(0, 0), 0, "batch 0", None, ("C", "a"))
    assert scheduler.take() == Delivered(PlannedWork(0, 1), 1, "batch 1", None, ())
    assert scheduler.take() is None


def test_an_error_comes_in_the_place_of_its_batch_and_the_next_one_follows() -> None:
    scheduler = scheduler_with(1)
    first, second = begin(scheduler)
    error = ValueError("bad")
    scheduler.handle(SampleFailed(0, first.generation, first.sequence, 0, "why"), 0.0)
    scheduler.handle(Failed(0, first.generation, first.sequence, error), 0.0)
    build(scheduler, second)
    assert scheduler.take() == Delivered(PlannedWork(0, 0), 0, None, error, ("why",))
    delivered = scheduler.take()
    assert delivered is not None
    assert delivered.outcome == "batch 1"


def test_a_sample_failure_of_a_worker_that_died_says_nothing_of_the_batch_that_was_rebuilt() -> None:
    scheduler = scheduler_with(1)
    first, _ = begin(scheduler)
    scheduler.handle(SampleFailed(0, first.generation, first.sequence, 0, "of the first worker"), 0.0)
    end(scheduler, 0)
    scheduler.handle(Ready(1, 0), 0.0)
    again = [action for action in scheduler.decide(0.0) if isinstance(action, Send)]
    build(scheduler, again[0])
    delivered = scheduler.take()
    assert delivered is not None
    assert delivered.failures == ()


def test_a_new_generation_gives_back_what_nobody_needs_and_ignores_what_comes_late() -> None:
    scheduler = scheduler_with(1)
    first, second = begin(scheduler)
    error = ValueError("bad")
    scheduler.handle(Failed(0, first.generation, first.sequence, error), 0.0)
    (third,) = (action for action in scheduler.decide(0.0) if isinstance(action, Send))
    scheduler.handle(SampleFailed(0, second.generation, second.sequence, 0, "why"), 0.0)
    build(scheduler, second)
    (fourth,) = (action for action in scheduler.decide(0.0) if isinstance(action, Send))
    assert scheduler.begin(PlannedSource(0, 3, lambda _: 10), keeps_meaning=True) == [error, "batch 1", "why"]
    scheduler.handle(SampleFailed(0, third.generation, third.sequence, 0, "late"), 0.0)
    build(scheduler, third)
    scheduler.handle(Skipped(0, fourth.generation), 0.0)
    assert scheduler.take() is None


def test_after_close_events_are_of_no_interest() -> None:
    scheduler = scheduler_with(1)
    tasks = begin(scheduler)
    scheduler.handle(SampleFailed(0, tasks[0].generation, tasks[0].sequence, 0, "why"), 0.0)
    build(scheduler, tasks[0])
    assert scheduler.close() == ["batch 0", "why"]
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
    assert scheduler.take() is not None
    assert scheduler.take() is None
    end(scheduler, 0)
    scheduler.handle(TemplateEnded(WorkerDied("also the template")), 0.0)
    assert scheduler.decide(0.0) == []
    assert scheduler.state is SchedulerState.FAILED


@pytest.mark.parametrize(
    "event",
    [
        Built(0, 1, 1, "out of order"),
        Built(0, 7, 0, "of no generation"),
        Built(5, 1, 0, "of an unknown worker"),
        Failed(0, 1, 1, ValueError()),
        Skipped(0, 1),
        Skipped(5, 1),
        StreamEnded(0, 1, 0),
        Ready(0, 0),
        Ended(0, 0, DEATH),
        Ended(5, 0, DEATH),
    ],
)
def test_an_event_that_makes_no_sense_is_refused(event: Built | Failed | Skipped | StreamEnded | Ready | Ended) -> None:
    scheduler = scheduler_with(1)
    begin(scheduler)
    with pytest.raises(ProtocolError, match=r"worker [05] "):
        scheduler.handle(event, 0.0)


# The trial batch


def test_the_trial_batch_can_be_looked_at_and_then_is_the_first_batch() -> None:
    scheduler = scheduler_with(1)
    scheduler.try_out(PlannedWork(0, 0))
    assert scheduler.take_trial() is None
    assert scheduler.decide(0.0) == [Send(0, 0, 0, PlannedWork(0, 0))]
    assert scheduler.ledger.work_of(0) == PlannedWork(0, 0)
    scheduler.handle(Built(0, 0, 0, "trial", 0.1), 0.0)
    trial = Delivered(PlannedWork(0, 0), 0, "trial", None, ())
    assert [scheduler.take_trial(), scheduler.take_trial()] == [trial, trial]
    assert scheduler.begin(PlannedSource(0, 0, lambda _: 10), keeps_meaning=True) == []
    assert scheduler.take() == trial


def test_a_trial_batch_that_is_forgotten_is_built_again() -> None:
    scheduler = scheduler_with(1)
    scheduler.try_out(PlannedWork(0, 0))
    assert scheduler.forget_trial() == []
    scheduler.decide(0.0)
    scheduler.handle(Built(0, 0, 0, "trial", 0.1), 0.0)
    assert scheduler.forget_trial() == ["trial"]
    assert begin(scheduler)[0] == Send(0, 1, 0, PlannedWork(0, 0))


def test_a_trial_batch_is_sent_to_another_worker_if_the_first_one_dies_and_is_blamed_for_two() -> None:
    scheduler = scheduler_with(1)
    scheduler.try_out(PlannedWork(0, 0))
    (first,) = scheduler.decide(0.0)
    assert isinstance(first, Send)
    end(scheduler, 0)
    assert scheduler.decide(0.0) == [Warn(lost_worker(first, num_lost=1)), Replace(0, 0)]
    scheduler.handle(Ready(1, 0), 0.0)
    assert scheduler.decide(0.0) == [Send(1, 0, 0, PlannedWork(0, 0))]
    end(scheduler, 1, worker_id=0)
    (fail,) = scheduler.decide(0.0)
    assert isinstance(fail, Fail)
    assert isinstance(fail.cause, WorkerLost)
    assert (fail.cause.decision, fail.cause.is_trial) == (Decision.BATCH_IS_TO_BLAME, True)


# Deaths


def test_a_worker_that_dies_is_replaced_and_its_batches_go_to_others_after_the_warning() -> None:
    scheduler = scheduler_with(2)
    tasks = begin(scheduler)
    mine = [task for task in tasks if task.worker == 0]
    scheduler.handle(Disconnected(0, 0), 0.0)
    assert scheduler.decide(0.0) == [Reap(0)], "its batches stay with it until its end is judged"
    for task in tasks:
        if task.worker == 1:
            build(scheduler, task)
    assert all(action.worker == 1 for action in scheduler.decide(0.0) if isinstance(action, Send))
    scheduler.handle(Ended(0, 0, DEATH), 0.0)
    warning, replacement, *sends = scheduler.decide(0.0)
    assert (warning, replacement) == (Warn(lost_worker(mine[0], num_lost=len(mine))), Replace(0, 0))
    assert [send.work for send in sends if isinstance(send, Send)] == [task.work for task in mine]


def test_a_worker_may_die_before_it_is_ready() -> None:
    scheduler = scheduler_with(0)
    end(scheduler, 7, Death(1), worker_id=2)
    warning, replacement = scheduler.decide(0.0)
    assert replacement == Replace(7, 2)
    assert warning == Warn(WorkerLost(7, 2, Decision.REPLACE, 1, None, False, 0, Death(1)))


def test_one_death_more_than_the_budget_in_a_row_is_too_many() -> None:
    scheduler = scheduler_with(0, max_restarts=2)
    decided = []
    for worker in range(3):
        end(scheduler, worker, worker_id=0)
        decided += scheduler.decide(0.0)
    *before, last = decided
    assert [type(action) for action in before] == [Warn, Replace] * 2
    assert isinstance(last, Fail)
    assert isinstance(last.cause, WorkerLost)
    assert (last.cause.decision, last.cause.num_in_a_row) == (Decision.TOO_MANY, 3)


def test_without_a_budget_the_first_death_is_the_end() -> None:
    scheduler = scheduler_with(1, max_restarts=0)
    first, _ = begin(scheduler)
    end(scheduler, 0)
    assert scheduler.decide(0.0) == [Fail(lost_worker(first, Decision.TOO_MANY))]


def test_a_batch_that_was_not_begun_or_that_means_another_one_now_is_not_to_blame() -> None:
    scheduler = scheduler_with(2)
    begin(scheduler)
    end(scheduler, 0, Death(-9, is_at_work=False))
    (warning,) = [action.about for action in scheduler.decide(0.0) if isinstance(action, Warn)]
    assert isinstance(warning, WorkerLost)
    assert (warning.work, warning.num_lost) == (None, 2)
    scheduler.handle(Disconnected(1, 1), 0.0)
    assert scheduler.decide(0.0) == [Reap(1)]
    begin(scheduler, keeps_meaning=False)
    scheduler.handle(Ended(1, 1, DEATH), 0.0)
    (warning,) = [action.about for action in scheduler.decide(0.0) if isinstance(action, Warn)]
    assert isinstance(warning, WorkerLost)
    assert (warning.work, warning.num_lost) == (None, 0)


def test_a_worker_that_died_with_the_template_is_replaced_without_a_word() -> None:
    scheduler = scheduler_with(2, max_restarts=1)
    begin(scheduler)
    error = WorkerDied("the template died")
    scheduler.handle(TemplateEnded(error), 0.0)
    assert scheduler.decide(0.0) == [Warn(TemplateLost(error, 1)), ReplaceTemplate()]
    for worker in (0, 1):
        end(scheduler, worker, Death(with_template=True))
        assert Replace(worker, worker) in scheduler.decide(0.0)
    scheduler.handle(TemplateEnded(error), 0.0)
    assert scheduler.decide(0.0) == [Fail(error)]


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
        5: [Warn(Stall(0, first.work, 5.0, False))],
        11: [Kill(0, Stall(0, first.work, 11.0, False))],
        21: [Reap(0)],
    }
    scheduler.handle(Disconnected(0, 0), 21.0)
    assert scheduler.decide(21.0) == [], "it is reaped once"
    scheduler.handle(Ended(0, 0, Death(None)), 22.0)
    warning, _ = scheduler.decide(22.0)
    assert isinstance(warning, Warn)
    assert isinstance(warning.about, WorkerLost)
    assert warning.about.work == first.work


def test_a_killed_worker_may_still_answer_but_gets_no_more_tasks() -> None:
    scheduler = scheduler_with(1)
    first, second = begin(scheduler)
    scheduler.watchdog.begin(0.0, 0.0)
    scheduler.tick(10.0)
    assert [type(action) for action in scheduler.decide(10.0)] == [Kill]
    build(scheduler, first, 11.0)
    build(scheduler, second, 11.0)
    assert scheduler.decide(11.0) == []
    assert [scheduler.take() is not None for _ in range(3)] == [True, True, False]
    scheduler.watchdog.begin(12.0, 0.0)
    scheduler.tick(22.0)
    assert scheduler.decide(22.0) == [Reap(0)], "it neither ends nor builds anything"


def test_a_stall_at_a_batch_that_is_not_needed_any_more_is_told_as_such() -> None:
    scheduler = scheduler_with(1)
    begin(scheduler)
    begin(scheduler, 3)
    scheduler.watchdog.begin(0.0, 0.0)
    scheduler.tick(10.0)
    assert scheduler.decide(10.0) == [Kill(0, Stall(0, None, 10.0, False))]


def test_out_of_order_only_one_worker_is_given_up_at_a_time() -> None:
    scheduler = scheduler_with(2, in_order=False)
    begin(scheduler)
    scheduler.watchdog.begin(0.0, 0.0)
    scheduler.tick(10.0)
    assert [type(action) for action in scheduler.decide(10.0)] == [Kill]


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
    assert decided[3] == [Warn(Stall(None, work, 3.0, False))]
    assert decided[15] == [GiveUp(Stall(None, work, 15.0, False))]
    assert {now for now, actions in decided.items() if actions} <= {3, 15, 18}
    assert scheduler.state is SchedulerState.RUNNING


def test_a_worker_that_is_not_to_be_replaced_keeps_its_batch_and_the_loop_gets_the_error_with_each_wait() -> None:
    limits = Limits(max_in_flight=4, max_ready_per_worker=4, max_tasks=10, in_order=True)
    scheduler = Scheduler(SchedulerSettings(limits, timeout_s=10.0, replaces_stalled=False))
    scheduler.handle(Ready(0, 0), 0.0)
    begin(scheduler)
    scheduler.decide(0.0)
    for began in (0, 10):
        scheduler.watchdog.begin(float(began), 0.0)
        scheduler.tick(began + 9.0)
        assert scheduler.decide(began + 9.0) == []
        scheduler.tick(began + 10.0)
        assert scheduler.decide(began + 10.0) == [GiveUp(Stall(0, PlannedWork(0, 0), began + 10.0, False))]
    assert scheduler.state is SchedulerState.RUNNING


def test_while_the_trainer_is_stopped_no_worker_is_to_blame() -> None:
    scheduler = scheduler_with(1)
    begin(scheduler)
    scheduler.watchdog.begin(0.0, 0.0)
    scheduler.watchdog.rest(1.0, 10.0)
    scheduler.wake(1000.0)
    scheduler.tick(1000.0)
    assert scheduler.decide(1000.0) == []
    scheduler.tick(1009.0)
    assert [type(action) for action in scheduler.decide(1009.0)] == [Kill]


def test_a_failure_says_nothing_about_how_long_a_batch_takes() -> None:
    scheduler = Scheduler(SchedulerSettings(Limits(40, 40, 40, in_order=True)))
    scheduler.handle(Ready(0, 0), 0.0)
    sent = begin(scheduler)
    scheduler.handle(Failed(0, sent[0].generation, sent[0].sequence, ValueError("one sample")), 0.0)
    scheduler.take()
    build(scheduler, sent[1])  # takes 0.1 s
    scheduler.take()
    assert len(scheduler.decide(0.0)) == len(sent) == 2, "tasks wait at a worker as if its batches took no time"


# Another number of workers


def test_more_workers_get_the_lowest_free_ids() -> None:
    scheduler = resizable(1)
    scheduler.resize(3, LIMITS)
    assert scheduler.decide(0.0) == [Start(1), Start(2)]
    scheduler.resize(4, LIMITS)
    assert scheduler.decide(0.0) == [Start(3)]


def test_a_worker_without_tasks_is_dismissed_at_once_and_its_end_is_no_death() -> None:
    scheduler = resizable(2)
    scheduler.resize(1, LIMITS)
    assert scheduler.decide(0.0) == [Dismiss(1)]
    scheduler.handle(Disconnected(1, 1), 0.0)
    assert scheduler.decide(0.0) == [Reap(1)]
    scheduler.handle(Ended(1, 1, DEATH), 0.0)
    assert scheduler.decide(0.0) == [Release(1)]


def test_a_dismissed_worker_whose_stream_is_seen_to_end_twice_is_reaped_once() -> None:
    scheduler = resizable(2)
    scheduler.resize(1, LIMITS)
    assert scheduler.decide(0.0) == [Dismiss(1)]
    scheduler.handle(Disconnected(1, 1), 0.0)
    scheduler.handle(Disconnected(1, 1), 0.0)
    assert scheduler.decide(0.0) == [Reap(1)]
    scheduler.handle(Ended(1, 1, DEATH), 0.0)
    assert scheduler.decide(0.0) == [Release(1)]


def test_a_worker_that_leaves_finishes_what_it_has_first() -> None:
    scheduler = resizable(2)
    tasks = [task for task in begin(scheduler) if task.worker == 1]
    scheduler.resize(1, LIMITS)
    for task in tasks:
        assert scheduler.decide(0.0) == []
        scheduler.handle(Built(1, task.generation, task.sequence, "batch"), 0.0)
    assert scheduler.decide(0.0) == [Dismiss(1)]


def test_a_worker_that_is_leaving_stays_if_it_is_wanted_again() -> None:
    scheduler = resizable(2)
    begin(scheduler)
    scheduler.resize(1, LIMITS)
    scheduler.resize(2, LIMITS)
    assert scheduler.decide(0.0) == []
    assert {task.worker for task in begin(scheduler, 1)} == {0, 1}


def test_the_place_of_one_that_was_dismissed_is_taken_if_it_is_wanted_again() -> None:
    scheduler = resizable(2)
    scheduler.resize(1, LIMITS)
    scheduler.resize(2, LIMITS)
    assert scheduler.decide(0.0) == [Dismiss(1)]
    scheduler.handle(Disconnected(1, 1), 0.0)
    scheduler.handle(Ended(1, 1, DEATH), 0.0)
    assert scheduler.decide(0.0) == [Reap(1), Replace(1, 1)]


def test_a_worker_that_hangs_while_it_leaves_is_killed_and_not_replaced() -> None:
    scheduler = resizable(2)
    tasks = begin(scheduler)
    for task in tasks:
        if task.worker == 0:
            scheduler.handle(Built(0, task.generation, task.sequence, "batch"), 0.0)
            scheduler.take()
    scheduler.resize(1, LIMITS)
    scheduler.decide(0.0)
    scheduler.watchdog.begin(0.0, 0.0)
    scheduler.tick(11.0)
    assert [type(action) for action in scheduler.decide(11.0)] == [Kill]
    scheduler.handle(Disconnected(1, 1), 11.0)
    scheduler.handle(Ended(1, 1, DEATH), 11.0)
    reap, warn, release, *sends = scheduler.decide(11.0)
    assert (reap, release) == (Reap(1), Release(1))
    assert isinstance(warn, Warn)
    assert isinstance(warn.about, WorkerLost)
    assert warn.about.decision is Decision.LET_GO
    assert {send.worker for send in sends if isinstance(send, Send)} == {0}


def test_after_a_failure_nobody_is_started_or_dismissed() -> None:
    scheduler = resizable(2)
    scheduler.fail(ValueError("no more"))
    scheduler.decide(0.0)
    scheduler.resize(1, LIMITS)
    scheduler.resize(3, LIMITS)
    assert scheduler.decide(0.0) == []
