"""Waits until processes have left seats, and kills those that don't: they hang in a task of the seat.

Processes that work for another seat aren't waited for. They leave this one when they are done.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Iterable

from swift_loader.executors.pool.place import SeatProcess

__all__ = ["await_leaving"]

_STAGES: tuple[tuple[signal.Signals | None, float], ...] = ((None, 3.0), (signal.SIGTERM, 0.5), (signal.SIGKILL, 1.0))
"""(signal, seconds until the next stage). The first one is longer than where a loader's own processes are stopped,
because these work for other loaders, too: a batch that is merely slow shouldn't end them."""


def await_leaving(seats: Iterable[SeatProcess]) -> None:
    """Return when all processes have left these seats, or after 4.5 s. The seats' channels were closed before."""
    remaining = list(seats)
    for number, limit_s in _STAGES:
        remaining = [seat for seat in remaining if seat.is_served]
        if number is not None:
            for seat in remaining:
                seat.send_signal(number)
        remaining = _wait(remaining, limit_s)
        if not remaining:
            return


def _wait(seats: list[SeatProcess], limit_s: float) -> list[SeatProcess]:
    """Return the seats that weren't left within the limit."""
    deadline = time.monotonic() + limit_s
    poll = select.poll()
    by_descriptor = {number: seat for seat in seats for number in (seat.held, seat.pidfd)}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    remaining = {seat.number: seat for seat in seats}
    while remaining and (left_s := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(left_s * 1000):
            poll.unregister(descriptor)
            remaining.pop(by_descriptor[descriptor].number, None)
    return list(remaining.values())
