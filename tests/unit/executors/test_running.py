"""What executors of worker processes share: the plan that a worker gets with a task, and the words about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swift_loader.errors import WorkerDied, WorkerStalled
from swift_loader.executors.process.explain import Explainer
from swift_loader.executors.process.resume import ResumePoints
from swift_loader.executors.running import RunningWorkers
from swift_loader.sampling.plan import Plan, PlanSettings
from swift_loader.scheduler.actions import Send, Stall, WorkerLost
from swift_loader.scheduler.events import Death
from swift_loader.scheduler.restarts import Decision
from swift_loader.scheduler.work import PlannedWork
from swift_loader.transport.by_value import Definitions

FIRST, OTHER = (PlanSettings.of_seed(seed) for seed in (1, 2))
TASK = Send(worker=4, generation=2, sequence=0, work=PlannedWork(0, 3))
HANG = Stall(worker=4, work=PlannedWork(0, 3), busy_s=9.0, is_trial=False)


class FakeWorker:
    """Notes the plans that it is sent."""

    worker_id, place, hang, tasks = 1, "pid 7", None, ()

    def __init__(self) -> None:
        self.plans: list[tuple[int, PlanSettings]] = []
        self.asked_by_force: list[bool] = []

    def send(self, task: Send, generation: int, plan: PlanSettings, resumes: ResumePoints) -> list[Any]:
        self.plans.append((generation, plan))
        return []

    def position_in_batch(self) -> int | None:
        return None

    def ask_for_stacks(self, *, by_force: bool = False) -> str:
        self.asked_by_force.append(by_force)
        return "the stack"


def running_with(worker: FakeWorker, *, sends_each_plan: bool = False) -> RunningWorkers[Any]:
    plan = Plan.of(100, FIRST)
    options: Any = SimpleNamespace(num_workers=2, max_restarts=3, timeout_s=5.0, stall_warning_s=5.0)
    workers: dict[int, Any] = {4: worker}
    explainer = Explainer(options, plan, Definitions(), build_s=2.0)
    reader: Any = None
    return RunningWorkers(lambda: workers, plan, explainer, reader, ResumePoints(), sends_each_plan=sends_each_plan)


@pytest.mark.parametrize(
    ("sends_each_plan", "expected"),
    [(False, [(0, FIRST), (0, FIRST), (3, OTHER)]), (True, [(0, FIRST), (2, FIRST), (3, OTHER)])],
)
def test_a_plan_that_stays_is_sent_again_only_where_a_new_iteration_needs_it(
    sends_each_plan: bool, expected: list[tuple[int, PlanSettings]]
) -> None:
    worker = FakeWorker()
    running = running_with(worker, sends_each_plan=sends_each_plan)
    running.send(TASK)
    for generation, plan in ((2, FIRST), (3, OTHER)):
        running.use_plan(generation, Plan.of(100, plan), None)
        running.send(TASK)
    assert worker.plans == expected
    assert running.explainer.is_needed(3)
    assert not running.explainer.is_needed(2)


def test_a_task_for_a_worker_that_was_closed_goes_nowhere() -> None:
    worker = FakeWorker()
    assert running_with(worker).send(Send(5, 2, 0, PlannedWork(0, 3))) == []
    assert not worker.plans


def test_a_replacement_may_take_three_times_as_long_as_the_first_build() -> None:
    assert running_with(FakeWorker()).grace_s == 6.0


def test_each_cause_has_its_error() -> None:
    running = running_with(FakeWorker())
    lost = WorkerLost(
        4, 1, Decision.TOO_MANY, 4, PlannedWork(0, 3), is_trial=False, num_lost=1, death=Death(exit_code=1)
    )
    error = running.error_of(lost)
    assert isinstance(error, WorkerDied)
    assert "worker 1 of 2 (rank 0, pid 7)" in str(error)
    stalled = running.error_of(HANG)
    assert isinstance(stalled, WorkerStalled)
    assert "batch 3 of epoch 0" in str(stalled)
    assert "the stack" in str(stalled)
    nobody = running.error_of(Stall(worker=None, work=None, busy_s=9.0, is_trial=False))
    assert "no worker is ready to build" in str(nobody)
    cause = ValueError("of the user")
    assert running.error_of(cause) is cause


def test_a_hung_worker_is_asked_for_its_stack_before_it_is_killed() -> None:
    worker = FakeWorker()
    running = running_with(worker)
    assert "the stack" in running.notice_of(HANG)
    running.note_hang(worker, HANG)
    assert worker.asked_by_force == [False, True]
    hang: Any = worker.hang
    assert "longer than timeout=5 s, and was killed" in hang.text
    assert hang.traces == "the stack"
