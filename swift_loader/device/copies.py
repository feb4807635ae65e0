"""Copies to the device that are under way, the host memory they read, and the loop's steps that use what was copied."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from swift_loader.device.streams import CopyStream, Event
from swift_loader.device.transfer import Transfer

__all__ = ["Copies", "Issued"]

MIN_STEPS_QUEUED = 2
"""Steps that the device may have before it in any case: one that runs, and one that waits, so that it never idles while
the loop queues the next."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A batch whose copies were issued."""

    batch: Any
    """As it is on the device, once the event has passed."""
    transfer: Transfer
    event: Event


@dataclass(frozen=True, slots=True)
class _UnderWay:
    event: Event
    batch: Any
    """On the host."""
    sources: Sequence[Any]
    """On the device. Not what the loop gets: that may be dropped earlier."""
    on_over: Callable[[], object]


class Copies:
    """Keeps each batch on the host until its copy is over, and the loop from running too far ahead of the device.

    While a reference to the host's batch exists, its slot isn't written again and its memory stays mapped; holding one
    here is all it takes. Used by the loop's thread, and closed by any, at any time.

    A batch that the loop drops keeps its memory on the device until the step that it was for has run. A loop that never
    synchronises queues hundreds of steps. So `begin_step` blocks until at most `max_steps` of them are left to run.

    The alternative is to allocate that memory on the loop's stream, and to have the side stream wait for that stream
    before each copy. It was rejected: a copy would come after all steps that are queued, so a batch that is late could
    not be copied beside them; and the host's batches would be kept for as many steps as the loop is ahead, which
    nothing bounds.
    """

    def __init__(self, stream: CopyStream, depth: int = 1) -> None:
        """Get ready; `depth` is how many batches may be on the device ahead of the loop."""
        self._stream = stream
        self._max_steps = max(MIN_STEPS_QUEUED, depth)
        self._steps: deque[Event] = deque()
        """At the beginnings of the loop's last steps, oldest first."""
        # Reentrant: a finaliser or a signal handler may close the loader at any point of a thread that has it.
        self._lock = threading.RLock()
        self._under_way: deque[_UnderWay] = deque()
        """Oldest first."""
        self._is_closed = False
        self._owner_pid = os.getpid()

    def begin_step(self) -> None:
        """Take note that the loop asks for its next batch: it has queued all that it does with those before.

        Blocks until the device has at most `max_steps` steps left to do.
        """
        self._steps.append(self._stream.mark())
        while len(self._steps) > self._max_steps:
            self._steps[0].synchronize()
            self._steps.popleft()  # last: a Ctrl-C before it changes nothing
        self.let_go()

    def issue(
        self, move: Callable[[Any, Transfer], Any], batch: Any, on_over: Callable[[], object] = lambda: None
    ) -> Issued:
        """Return what `move` makes of a batch; `on_over` is called once its copies are over, if that is noticed."""
        transfer = Transfer(self._stream)
        try:
            with _ordinary_tensors(), self._stream.copying():
                moved = move(batch, transfer)
        finally:  # a move that raises may have issued some copies before
            event = self._stream.record()
            with self._lock:
                self._under_way.append(_UnderWay(event, batch, transfer.sources, on_over))
                if self._is_closed:  # in the meantime, and nobody comes back to let it go
                    event.synchronize()
            self.let_go()
        return Issued(moved, transfer, event)

    def catch_up(self) -> None:
        """Have the copies from now on come after what the loop has queued so far."""
        self._stream.catch_up()

    def hand_over(self, issued: Issued) -> None:
        """Make a moved batch the loop's: what it does from here on comes after the copy."""
        self._stream.hand_over(issued.transfer.parts, issued.event)

    def let_go(self) -> None:
        """Drop the host's batches whose copies are over; doesn't wait."""
        dropped: deque[_UnderWay] = deque()
        with self._lock:
            while self._under_way and self._under_way[0].event.query():
                dropped.append(self._under_way.popleft())
        for over in dropped:
            over.on_over()
        del dropped  # outside the lock: the user's objects may have finalisers

    def wait(self) -> None:
        """Block until the copies issued so far are over."""
        with self._lock:
            last = self._under_way[-1].event if self._under_way else None
        if last is not None:
            last.synchronize()
        self.let_go()

    def close(self) -> None:
        """Wait until all copies are over, and drop the host's batches. Idempotent."""
        if os.getpid() != self._owner_pid:  # a fork of the trainer has no copies under way, and no device
            return
        with self._lock:
            self._is_closed = True
            dropped, self._under_way = self._under_way, deque()
            if dropped:
                dropped[-1].event.synchronize()  # they are over in the order in which they were issued

    def __repr__(self) -> str:
        return f"<Copies {len(self._under_way)} under way>"


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Return a context in which tensors are made that autograd takes, also within `torch.inference_mode()`.

    A batch that is moved ahead may be for the step after that. Whether gradients are recorded stays as it is.
    """
    import torch

    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield
