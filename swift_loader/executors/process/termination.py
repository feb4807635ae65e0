"""Stops processes in three stages, each with a time limit: wait for them to exit, then SIGTERM, then SIGKILL.

Signals go through pidfds. So they can't hit another process that was given the pid of one that ended.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Iterable

_STAGES: tuple[tuple[signal.Signals | None, float], ...] = ((None, 0.7), (signal.SIGTERM, 0.5), (signal.SIGKILL, 1.0))
"""(signal, seconds until the next stage). The first stage sends nothing: the processes were already told to exit."""


def stop_processes(pidfds: Iterable[int]) -> None:
    """Stop the processes, whose channels were closed before. Returns when all have ended, or after 2.2 s."""
    remaining = set(pidfds)
    for number, limit_s in _STAGES:
        if number is not None:
            for pidfd in remaining:
                _send(pidfd, number)
        remaining = _wait(remaining, limit_s)
        if not remaining:
            return


def _wait(pidfds: set[int], limit_s: float) -> set[int]:
    """Return the processes that didn't end within the limit."""
    deadline = time.monotonic() + limit_s
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    remaining = set(pidfds)
    while remaining and (left_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left_s * 1000):
            poll.unregister(pidfd)
            remaining.discard(pidfd)
    return remaining


def _send(pidfd: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:  # it ended meanwhile
        return
