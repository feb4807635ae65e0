"""Tracks the running copies to the device and the host memory they read, and bounds the loop's lead over the device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from swift_loader.device.streams import CopyStream, Event
from swift_loader.device.transfer import Transfer
from swift_loader.process_owner import ProcessOwner
from swift_loader.worker.torch_worker import ordinary_tensors

MIN_STEPS_QUEUED = 2
"""The device may always have two steps left: one runs, one waits. So it doesn't idle while the loop queues the next."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A batch whose copies were issued."""

    batch: Any
    """On the device. Complete once the event has passed."""
    transfer: Transfer
    event: Event


@dataclass(frozen=True, slots=True)
class _CopyInFlight:
    event: Event
    batch: Any
    """On the host."""
    sources: Sequence[Any]
    """On the device. Not the loop's tensors, which may be dropped earlier."""
    on_over: Callable[[], object]


class CopiesInFlight:
    """Keeps each host batch until its copy is over, and bounds how far the loop runs ahead of the device.

    While a reference to a host batch exists, its slot isn't written again and its memory stays mapped. This class holds
    that reference. The loop's thread uses it. Any thread may close it, at any time.

    A batch that the loop drops keeps its memory on the device until its step has run. A loop that never synchronises
    queues hundreds of steps. So `begin_step` blocks until at most `max_steps` of them are left to run.

    Rejected alternative: allocate on the loop's stream and let the side stream wait for it before each copy. Then each
    copy runs after all queued steps, so it can't overlap them. Host batches would also be kept for as many steps as the
    loop is ahead, without a bound.
    """

    def __init__(self, stream: CopyStream, depth: int = 1) -> None:
        """Create an empty tracker. `depth` is how many batches may be on the device ahead of the loop."""
        self._stream = stream
        self._max_steps = max(MIN_STEPS_QUEUED, depth)
        self._steps: deque[Event] = deque()
        """One at the start of each of the loop's last steps, oldest first."""
        # Reentrant: a finaliser or a signal handler may close the loader in a thread that holds the lock.
        self._lock = threading.RLock()
        """Guards the next two."""
        self._in_flight: deque[_CopyInFlight] = deque()
        """Oldest first."""
        self._is_closed = False
        self._process = ProcessOwner()

    def begin_step(self) -> None:
        """Record that the loop asks for its next batch, so it has queued all work on the earlier ones.

        Blocks until at most `max_steps` steps are left on the device.
        """
        self._steps.append(self._stream.mark())
        while len(self._steps) > self._max_steps:
            self._steps[0].synchronize()
            self._steps.popleft()  # last: a Ctrl-C before it changes nothing
        self.drop_finished()

    def issue(
        self, move: Callable[[Any, Transfer], Any], batch: Any, on_over: Callable[[], object] = lambda: None
    ) -> Issued:
        """Issue the copies of a batch and return it.

        `on_over` is called when a later call notices that the copies are over.
        """
        transfer = Transfer(self._stream)
        try:
            with ordinary_tensors(), self._stream.copying():
                moved = move(batch, transfer)
        finally:  # a move may issue some copies and then raise
            event = self._stream.record()
            with self._lock:
                self._in_flight.append(_CopyInFlight(event, batch, transfer.sources, on_over))
                if self._is_closed:  # closed meanwhile, so no later call lets it go
                    event.synchronize()
            self.drop_finished()
        return Issued(moved, transfer, event)

    def catch_up(self) -> None:
        """Make later copies wait for the work that the loop has queued so far."""
        self._stream.catch_up()

    def hand_over(self, issued: Issued) -> None:
        """Give a moved batch to the loop: its later work waits for the copy."""
        self._stream.hand_over(issued.transfer.parts, issued.event)

    def drop_finished(self) -> None:
        """Drop the host batches whose copies are over. Doesn't block."""
        dropped: deque[_CopyInFlight] = deque()
        with self._lock:
            while self._in_flight and self._in_flight[0].event.query():
                dropped.append(self._in_flight.popleft())
        for over in dropped:
            over.on_over()
        del dropped  # outside the lock: the user's objects may have finalisers

    def wait(self) -> None:
        """Block until the copies issued so far are over."""
        with self._lock:
            last = self._in_flight[-1].event if self._in_flight else None
        if last is not None:
            last.synchronize()
            self.drop_finished()

    def close(self) -> None:
        """Wait until all copies are over, and drop the host batches. Idempotent."""
        if not self._process.is_here():  # a fork of the trainer has no running copies and no device
            return
        with self._lock:
            self._is_closed = True
            dropped, self._in_flight = self._in_flight, deque()
            if dropped:
                dropped[-1].event.synchronize()  # copies end in the order in which they were issued

    def __repr__(self) -> str:
        return f"<CopiesInFlight {len(self._in_flight)} under way>"
