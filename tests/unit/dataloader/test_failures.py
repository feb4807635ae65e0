"""A failure of the workers says what torch's says, and then what ours says."""

from __future__ import annotations

import signal

import pytest

from swift_loader.dataloader.failures import with_torch_text
from swift_loader.errors import RemoteTraceback, WorkerDied, WorkerStalled
from swift_loader.executors.process.deaths import died


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [
        (-signal.SIGSEGV, "DataLoader worker (pid 12) is killed by signal: Segmentation fault: "),
        (-signal.SIGKILL, "DataLoader worker (pid 12) is killed by signal: Killed: "),
        (3, "DataLoader worker (pid(s) 12) exited unexpectedly: "),
        (None, "DataLoader worker (pid(s) 12) exited unexpectedly: "),
    ],
)
def test_a_death_begins_with_torchs_words(exit_code: int | None, expected: str) -> None:
    error = died("worker 1 of 2 (rank 0, pid 12)", exit_code, "2 batches are lost")
    told = with_torch_text(error, 0)
    assert type(told) is WorkerDied
    assert isinstance(told, RuntimeError)
    assert str(told) == expected + str(error)


def test_a_timeout_begins_with_torchs_words() -> None:
    told = with_torch_text(WorkerStalled("worker 1 was killed"), 1.5)
    assert isinstance(told, RuntimeError)
    assert isinstance(told, TimeoutError)
    assert str(told) == "DataLoader timed out after 1.5 seconds: worker 1 was killed"


def test_a_cause_is_kept_and_other_errors_are_left_alone() -> None:
    error = WorkerStalled("worker 1 was killed")
    error.__cause__ = RemoteTraceback("where")
    assert with_torch_text(error, 1).__cause__ is error.__cause__
    other = ValueError("sample 3")
    assert with_torch_text(other, 1) is other
