"""Puts into words how a process ended."""

from __future__ import annotations

import signal
import textwrap

from swift_loader.errors import WorkerDied
from swift_loader.executors.wording import LOADER_TERMS, Terms

_SIGKILL = 9
"""Windows has no `signal.SIGKILL`."""


def how_it_ended(exit_code: int | None) -> str:
    """Return in words how a process ended."""
    if exit_code is None:
        return "ended with an unknown exit status"
    return f"was ended by {_signal_name(-exit_code)}" if exit_code < 0 else f"exited with code {exit_code}"


def died(
    who: str,
    exit_code: int | None,
    consequence: str,
    *,
    traces: str = "",
    stderr: str = "",
    terms: Terms = LOADER_TERMS,
) -> WorkerDied:
    """Return the error for a process that died.

    `exit_code`: as from `os.waitstatus_to_exitcode`; None: unknown. `consequence`: what it means for the loop.
    `traces`: output of the fault handler, if it crashed. `stderr`: its last lines. `terms`: the words for the hint.
    """
    hint = ""
    if exit_code == -_SIGKILL:
        hint = f". The kernel sends SIGKILL when memory runs out: see dmesg, and use {terms.saving}"
    elif exit_code is not None and exit_code < 0:
        hint = f". The {terms.code}, or a library that it uses, crashed"
    elif exit_code is not None:
        hint = f". The {terms.code} ended the process: look for sys.exit and os._exit"
    return WorkerDied(f"{who} {how_it_ended(exit_code)}; {consequence}{hint}{attached(traces=traces, stderr=stderr)}")


def attached(*, traces: str = "", stderr: str = "") -> str:
    """Return a process's stack and stderr as the end of a message; empty if there are none."""
    parts = [("Its Python stack", traces), ("The last lines of its stderr", stderr)]
    return "".join(f"\n{title}:\n{textwrap.indent(text, '    ')}" for title, text in parts if text)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
