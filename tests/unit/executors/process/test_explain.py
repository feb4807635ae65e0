from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swift_loader.errors import WorkerDied, WorkerStalled
from swift_loader.executors.handle import Hang
from swift_loader.executors.process.explain import Explainer
from swift_loader.sampling.plan import Plan, PlanSettings, Uneven
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.scheduler.actions import Stall, TemplateLost, WorkerLost
from swift_loader.scheduler.events import Death
from swift_loader.scheduler.restarts import Decision
from swift_loader.scheduler.work import IndexWork, PlannedWork
from swift_loader.transport.by_value import Definitions

CASE = WorkerLost(
    worker=4,
    worker_id=1,
    decision=Decision.REPLACE,
    num_in_a_row=1,
    work=PlannedWork(0, 5),
    is_trial=False,
    num_lost=2,
    death=Death(exit_code=-9),
)


def explainer(max_restarts: int = 3) -> Explainer:
    order = OrderSettings.of(seed=0, shuffle=False, window=None, batch_size=2)
    plan = PlanSettings(order=order, batch_size=2, world_size=1, rank=0, uneven=Uneven.PAD, drop_last=False)
    options: Any = SimpleNamespace(num_workers=2, max_restarts=max_restarts, timeout_s=3.0)
    return Explainer(options, Plan.of(100, plan), Definitions(), build_s=2.0)


def worker(hang: Hang | None = None, position: int | None = None) -> Any:
    return SimpleNamespace(worker_id=1, place="pid 7", hang=hang, position_in_batch=lambda: position, tasks=())


def test_a_worker_that_is_replaced_is_told_of_with_how_and_where_it_ended() -> None:
    case = replace(CASE, death=Death(exit_code=-9, stderr="last words"))
    assert explainer().replacement(case, worker()) == (
        "worker 1 of 2 (rank 0, pid 7) was ended by SIGKILL; it was building batch 5 of epoch 0 (dataset indices 10, "
        "11). It is replaced (1 of worker_restarts=3 in a row), and nothing is lost\n"
        "The last lines of its stderr:\n    last words"
    )


@pytest.mark.parametrize(
    ("restarts", "decision", "reason"),
    [
        (0, Decision.TOO_MANY, "With worker_restarts=0, no worker is replaced"),
        (3, Decision.BATCH_IS_TO_BLAME, "The batch has ended two workers, so it isn't tried a third time"),
        (3, Decision.TOO_MANY, "4 workers in a row with this id have ended without a batch (worker_restarts=3)"),
    ],
)
def test_the_error_says_why_nobody_is_replaced_and_what_to_do(restarts: int, decision: Decision, reason: str) -> None:
    error = explainer(restarts).death(replace(CASE, decision=decision, num_in_a_row=4), worker())
    assert isinstance(error, WorkerDied)
    for part in ("was ended by SIGKILL", "dataset indices 10, 11", "2 batches are lost", reason, "dmesg"):
        assert part in str(error)


def test_a_death_between_two_batches_blames_none() -> None:
    error = explainer(0).death(replace(CASE, work=None, num_lost=0, decision=Decision.TOO_MANY), worker())
    assert str(error).startswith("worker 1 of 2 (rank 0, pid 7) was ended by SIGKILL; 0 batches are lost. With")


def test_the_trial_batch_and_batches_of_a_sampler_are_called_so() -> None:
    trial = replace(CASE, work=PlannedWork(0, 0), is_trial=True)
    assert "it was building the trial batch, batch 0 of epoch 0 (dataset" in explainer().replacement(trial, worker())
    chosen = replace(CASE, work=IndexWork(0, 5, (3, 99, 3)))
    assert "it was building batch 5 of epoch 0 (dataset indices 3, 99, 3)" in explainer().replacement(chosen, worker())


@pytest.mark.parametrize(
    ("position", "where"),
    [(None, ""), (1, ", at dataset index 11,"), (2, ", with all samples fetched,")],
)
def test_a_worker_that_hangs_is_told_of_with_the_sample(position: int | None, where: str) -> None:
    text = explainer().hang(Stall(4, PlannedWork(0, 5), 3.21, is_trial=False), worker(position=position))
    assert text == (
        f"has been at batch 5 of epoch 0 (dataset indices 10, 11){where} for 3.2 s, longer than timeout=3 s, and was "
        f"killed"
    )


def test_a_worker_that_hung_is_a_stall_with_its_stack() -> None:
    hang = Hang("has been at batch 5 for 3.0 s, longer than timeout=3 s, and was killed", "File x")
    error = explainer(0).death(replace(CASE, decision=Decision.TOO_MANY), worker(hang))
    assert isinstance(error, WorkerStalled)
    assert "longer than timeout=3 s" in str(error)
    assert str(error).endswith("Its Python stack:\n    File x")
    assert "has been at batch 5 for 3.0 s" in explainer().replacement(CASE, worker(hang))


def test_a_batch_that_no_worker_has_is_named_with_what_to_change() -> None:
    error = explainer().no_worker_error(Stall(None, PlannedWork(1, 2), 9.0, is_trial=False))
    assert str(error).startswith("no worker is ready to build batch 2 of epoch 1 (dataset indices 4, 5), for longer")
    assert "timeout=3 s plus 3 times the 2.0 s that the first build of the dataset took" in str(error)


def test_a_template_is_told_of_by_the_same_rule() -> None:
    lost = TemplateLost(WorkerDied("the template died"), 1)
    assert (
        explainer(1)
        .template_replacement(lost)
        .startswith("the template died\nIt is replaced (1 of worker_restarts=1 in a row) together with its workers")
    )
