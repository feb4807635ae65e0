"""The main function of a process that runs the user's dataset for the doctor.

stdin is the board with the request, stdout the pipe of reports, and stderr a temporary file. The user's code gets an
empty stdin, and its output goes to the file. Reports are pickles, one after the other; the last one is `Done`.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from swift_loader.cli import CommandError
from swift_loader.doctor.probes.board import Board, Request, Role, detach_stdin
from swift_loader.worker.process_exit import die_with_parent, end_process

__all__ = ["DUMP_SIGNAL", "Done", "Report", "Unusable", "main"]

DUMP_SIGNAL = getattr(signal, "SIGURG", None)
"""Makes the process write the stack of its main thread. None: the system has no such signal."""

Report = Callable[[object], None]
"""Sends a report to the doctor."""


@dataclass(frozen=True, slots=True)
class Done:
    """The process has done all that it was asked."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """The target or the collate function can't be found, in words for the user."""

    text: str


def main(parent: int) -> None:
    """Do what the request says. `parent` is the doctor's process id."""
    if sys.platform == "linux":
        die_with_parent(parent)
    board = Board(0)
    detach_stdin()
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    faulthandler.enable()
    if DUMP_SIGNAL is not None:
        faulthandler.register(DUMP_SIGNAL, all_threads=False)
    request = board.request()
    sys.path[:] = request.import_path
    try:
        _run(request, board, reports)
        _send(reports, Done())
    except CommandError as error:
        _send(reports, Unusable(str(error)))
    end_process(0)  # not sys.exit: the dataset's threads may go on for ever


def _run(request: Request, board: Board, reports: IO[bytes]) -> None:
    def report(thing: object) -> None:
        _send(reports, thing)

    if request.role is Role.EXAMINE:
        from swift_loader.doctor.probes.examine import examine

        examine(request, board, report)
    elif request.role is Role.COMPARE:
        from swift_loader.doctor.probes.compare import compare

        compare(request, board, report)
    else:
        from swift_loader.doctor.probes.resume import resume

        resume(request, board, report)


def _send(reports: IO[bytes], thing: Any) -> None:
    pickle.dump(thing, reports)
    reports.flush()
