from __future__ import annotations

from dataclasses import replace

import pytest

from swift_loader.engine.coroner import Case, Coroner
from swift_loader.errors import WorkerDied, WorkerStalled

CASE = Case(
    who="worker 1 of 2 (rank 0, pid 7)",
    place=1,
    exit_code=-9,
    batch=(0, 5),
    where="batch 5 of epoch 0 (dataset indices 20, 21)",
    num_lost=2,
    stall="",
    traces="",
    stderr="",
)


def test_a_worker_that_is_replaced_is_told_of_with_how_and_where_it_ended() -> None:
    finding = Coroner(3).examine(replace(CASE, stderr="last words"))
    assert finding.error is None
    assert finding.notice == (
        "worker 1 of 2 (rank 0, pid 7) was ended by SIGKILL; it was building batch 5 of epoch 0 (dataset indices 20, "
        "21). It is replaced (1 of worker_restarts=3 in a row), and nothing is lost\n"
        "The last lines of its stderr:\n    last words"
    )


@pytest.mark.parametrize(
    ("restarts", "deaths", "reason"),
    [
        (0, 1, "With worker_restarts=0, no worker is replaced"),
        (3, 2, "The batch has ended two workers, so it isn't tried a third time"),
    ],
)
def test_the_error_says_why_nobody_is_replaced_and_what_to_do(restarts: int, deaths: int, reason: str) -> None:
    coroner = Coroner(restarts)
    error = [coroner.examine(CASE).error for _ in range(deaths)][-1]
    assert isinstance(error, WorkerDied)
    for part in ("was ended by SIGKILL", "dataset indices 20, 21", "2 batches are lost", reason, "dmesg"):
        assert part in str(error)


def test_too_many_in_a_row_are_counted() -> None:
    coroner = Coroner(2)
    findings = [coroner.examine(replace(CASE, batch=None, where="", exit_code=7)) for _ in range(3)]
    assert [finding.error is None for finding in findings] == [True, True, False]
    assert "3 workers in a row have ended in this place without a batch (worker_restarts=2)" in str(findings[-1].error)


def test_a_worker_that_hung_is_a_stall_with_its_stack() -> None:
    stalled = replace(
        CASE, stall="has been at batch 5 for 3.0 s, longer than timeout=3 s, and was killed", traces="File x"
    )
    error = Coroner(0).examine(stalled).error
    assert isinstance(error, WorkerStalled)
    assert "longer than timeout=3 s" in str(error)
    assert str(error).endswith("Its Python stack:\n    File x")


def test_a_template_is_replaced_by_the_same_rule() -> None:
    coroner = Coroner(1)
    error = WorkerDied("the template died")
    assert coroner.examine_template(error).notice.startswith(
        "the template died\nIt is replaced (1 of worker_restarts=1"
    )
    assert coroner.examine_template(error).error is error
