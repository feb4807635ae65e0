"""Runs a process that runs the user's dataset, and reads its reports. The dataset may crash, hang or print.

A thread reads the pipe of reports and ends with the process. The caller's thread waits for it. A process whose board
doesn't change for too long is killed, with all that it started.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Generator
from contextlib import ExitStack, suppress
from typing import IO, Any

from swift_loader.cli import CommandError
from swift_loader.doctor.facts import Ended
from swift_loader.doctor.probes.board import Board, Phase, Progress, Request
from swift_loader.doctor.probes.child import DUMP_SIGNAL, Done, Unusable
from swift_loader.doctor.probes.own_code import as_shown, is_users_file
from swift_loader.doctor.rules.lines import line_in_dump
from swift_loader.doctor.units import time_text
from swift_loader.executors.environment import environ_for_workers, interpreter_command

__all__ = ["run_isolated"]

_START = "import sys; sys.path[:] = {path!r}; from swift_loader.doctor.probes.child import main; main({parent})"

_EXIT_S = 10.0
"""How long a process may take to end after its last report."""
_DUMP_S = 1.0
"""How long a hung process gets to write its stack."""

_JOIN_S = 2.0
"""How long the reader may take to see the end of the pipe."""

_MAX_OUTPUT = 1 << 14
_MAX_LINES = 4


class _EndOfReports:
    """There is nothing more to read."""


def run_isolated(request: Request) -> Generator[object, None, None]:
    """Yield the reports of a process as they come. If it dies or hangs, the last one is `Ended`.

    Closing the generator ends the process.

    Raises:
        CommandError: The target can't be found.
    """
    with ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile("a+b"))  # appending: both sides have one offset
        requests = stack.enter_context(tempfile.TemporaryFile())
        board = Board.create(requests, request)
        stack.callback(board.close)
        process = _start(request, requests, output)
        reports: queue.SimpleQueue[object] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(process.stdout, reports), name="swift_loader-doctor", daemon=True)
        stack.callback(_end, process, reader)
        reader.start()
        while True:
            report = _next(reports, board, request.settings.stall_s)
            if isinstance(report, Unusable):
                raise CommandError(report.text)
            if isinstance(report, Done):
                return
            if report is None or isinstance(report, _EndOfReports):
                yield _ended(process, board.read(), output, request.settings.stall_s, hangs=report is None)
                return
            yield report


def _start(request: Request, requests: IO[bytes], output: IO[bytes]) -> subprocess.Popen[bytes]:
    code = _START.format(path=list(request.import_path), parent=os.getpid())
    return subprocess.Popen(  # noqa: S603 - our own interpreter
        [*interpreter_command(), "-c", code],
        stdin=requests,
        stdout=subprocess.PIPE,
        stderr=output,
        env=environ_for_workers(),
        start_new_session=True,  # so that all that it starts can be killed with it
    )


def _read(pipe: IO[bytes], reports: queue.SimpleQueue[object]) -> None:
    """Put the reports into the queue. Runs on its own thread, until the process closes the pipe."""
    with suppress(EOFError, pickle.UnpicklingError, OSError, ValueError):  # it died in the middle of one
        while True:
            reports.put(pickle.load(pipe))
    reports.put(_EndOfReports())


def _next(reports: queue.SimpleQueue[object], board: Board, stall_s: float) -> Any:
    """Return the next report; None if there is neither a report nor progress for so long."""
    while True:
        before = board.read().count
        try:
            return reports.get(timeout=stall_s)
        except queue.Empty:
            if board.read().count == before:
                return None


def _ended(
    process: subprocess.Popen[bytes], progress: Progress, output: IO[bytes], stall_s: float, *, hangs: bool
) -> Ended:
    if hangs:
        how = f"made no progress for {time_text(stall_s)}"
        if DUMP_SIGNAL is not None:
            process.send_signal(DUMP_SIGNAL)  # it writes its stack
            with suppress(subprocess.TimeoutExpired):
                process.wait(_DUMP_S)
    else:
        how = _how(process.wait(_EXIT_S))
    index = progress.index if progress.phase is Phase.FETCHING else None
    printed = _printed(output)
    line = as_shown(line_in_dump(printed, is_users_file))
    return Ended(progress.phase.text, index, how, line, "" if line is not None else _last_lines(printed))


def _how(status: int) -> str:
    if status < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
    return f"ended itself with exit code {status}"


def _printed(output: IO[bytes]) -> str:
    """Return the last that the process printed."""
    end = os.fstat(output.fileno()).st_size
    output.seek(max(0, end - _MAX_OUTPUT))
    return output.read().decode(errors="replace")


def _last_lines(text: str) -> str:
    """Return the last lines in one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_MAX_LINES:])


def _end(process: subprocess.Popen[bytes], reader: threading.Thread) -> None:
    """Kill the process, if it is still there, and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
    reader.join(_JOIN_S)
    if process.stdout is not None and not reader.is_alive():  # else something that it started has the pipe
        process.stdout.close()
