from __future__ import annotations

import signal

import pytest

from swift_loader.errors import WorkerDied
from swift_loader.executors.process.deaths import attached, died, how_it_ended


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (None, "ended with an unknown exit status"),
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-signal.SIGSEGV, "was ended by SIGSEGV"),
        (-(signal.SIGRTMIN + 3), f"was ended by signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_an_end_is_an_exit_code_a_signal_or_unknown(exit_code: int | None, words: str) -> None:
    assert how_it_ended(exit_code) == words


@pytest.mark.parametrize(
    ("exit_code", "hint"),
    [
        (None, ""),
        (1, ". The dataset's code ended the process: look for sys.exit and os._exit"),
        (-signal.SIGSEGV, ". The dataset's code, or a library that it uses, crashed"),
        (
            -signal.SIGKILL,
            ". The kernel sends SIGKILL when memory runs out: see dmesg, and use fewer workers or smaller batches",
        ),
    ],
)
def test_the_error_says_who_how_what_is_lost_and_where_to_look(exit_code: int | None, hint: str) -> None:
    error = died("worker 1", exit_code, "2 batches are lost", stderr="oh")
    assert type(error) is WorkerDied
    assert str(error) == (
        f"worker 1 {how_it_ended(exit_code)}; 2 batches are lost{hint}\nThe last lines of its stderr:\n    oh"
    )


def test_a_stack_and_stderr_are_indented_and_an_empty_one_is_left_out() -> None:
    assert attached() == ""
    assert attached(traces="a\nb") == "\nIts Python stack:\n    a\n    b"
    assert attached(traces="a", stderr="b") == "\nIts Python stack:\n    a\nThe last lines of its stderr:\n    b"
