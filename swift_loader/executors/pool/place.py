"""The trainer's handle on one process of a pool, and on a seat there: what one loader has of the process.

Only the pool's thread starts processes and asks for seats. The thread that listens to a seat uses its `SeatProcess`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal

from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.worker_process import WorkerProcess
from swift_loader.transport.channel import Channel
from swift_loader.transport.descriptors import duplicate
from swift_loader.transport.pool_messages import LAST, NO_SEAT, SERVED, Page, Seat
from swift_loader.transport.segments import Segment

__all__ = ["Place", "SeatProcess"]

MAX_FRUITLESS = 3
"""How many processes in a row may end without a task before all loaders count the end as a death."""


class Place:
    """A worker process that serves several loaders."""

    def __init__(self, process: WorkerProcess, control: Channel, num_fruitless: int = 0) -> None:
        """Give the process its page, in which it shows for which seat it works.

        Args:
            process: Owned by the place.
            control: The trainer's end of the control channel; owned by the place.
            num_fruitless: How many processes in a row have ended in its place without a task.
        """
        self.process = process
        self._control = control
        self._page, descriptor = Segment.create(mmap.PAGESIZE)
        self._words = self._page.memory.cast("Q")
        self._num_fruitless = num_fruitless
        self.seats: set[int] = set()
        """Numbers of the seats whose handles aren't closed."""
        self._traces = ""
        """Its Python stack after a crash, once somebody has asked for it: it can be read once."""
        FORKS.holders.add(self)
        try:
            self._send(Page().pack(), descriptor)
        finally:
            os.close(descriptor)

    def descriptors(self) -> list[int]:
        """Return the descriptor that it owns, apart from those of its process; -1 once closed."""
        return [self._control.fileno()]

    @property
    def served(self) -> int:
        """The number of the seat for which the process works, or did when it ended; `NO_SEAT` if there is none."""
        return self._words[SERVED]

    @property
    def num_fruitless(self) -> int:
        """How many processes in a row, with this one, have ended without a task. It must have ended."""
        return 0 if self._words[LAST] != NO_SEAT else self._num_fruitless + 1

    def is_to_blame(self, number: int) -> bool:
        """Return whether this seat is the reason for the end of the process, as far as can be told.

        It is the seat that was being served; between two tasks, the one that was served last. If nobody had a task,
        chance may have ended the process, unless that has happened too often.
        """
        if self.served != NO_SEAT:
            return self.served == number
        return self._words[LAST] == number or self.num_fruitless > MAX_FRUITLESS

    def add_seat(self, seat: Seat, channel: Channel, payload: int, held: int) -> None:
        """Ask the process to serve one more loader. It gets its own copies of the descriptors."""
        self._send(seat.pack(), channel.fileno(), payload, held)

    def traces(self) -> str:
        """Return the Python stack that it has written as it crashed."""
        self._traces = self._traces or self.process.diagnostics.last_traces()
        return self._traces

    def request_exit(self) -> None:
        """Tell the process to exit. Idempotent and thread-safe."""
        self._control.shutdown()

    def close(self) -> None:
        """Close all that belongs to it. The process must have ended. Idempotent."""
        self._control.close()
        self.process.close()

    def _send(self, message: bytes, *descriptors: int) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end is noticed at the seats
            self._control.send(message, descriptors)

    def __repr__(self) -> str:
        return f"<Place of pid {self.process.pid}, serves {self.served}>"


class SeatProcess:
    """A place, as one loader's worker. See `executors.handle.HandledProcess`."""

    def __init__(self, place: Place, number: int, held: int) -> None:
        """Make the handle.

        Args:
            place: Where the seat is. Not owned.
            number: The seat's number.
            held: The end of a pipe that is readable once the process has left the seat; owned by this object.
        """
        self.place = place
        self.number = number
        self.held = held
        self.pid = place.process.pid
        self.pidfd = -1
        """Owned by this object, because a loader listens to it."""
        place.seats.add(number)
        try:
            self.pidfd = duplicate(place.process.pidfd)
        except BaseException:
            self.close()
            raise
        FORKS.holders.add(self)

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; -1 once closed."""
        return [self.held, self.pidfd]

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.pidfd < 0 or is_readable(self.pidfd)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process, see `WorkerProcess`."""
        return self.place.process.exit_code

    def wait_end(self, limit_s: float | None) -> bool:
        """Wait until the process has ended. Return False if that takes longer. Any thread."""
        return self.place.process.wait_end(limit_s)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    @property
    def is_served(self) -> bool:
        """Whether the process works for this seat, or did when it ended."""
        return self.place.served == self.number

    def send_signal(self, number: signal.Signals) -> None:
        """Send the process a signal. Does nothing if it has ended."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def attach(self, slot: int | None, nbytes: int, descriptors: list[int]) -> Segment:
        """Map memory that the process announced."""
        return self.place.process.attach(slot, nbytes, descriptors)

    def num_fetched(self, length_address: int) -> int | None:
        """Return the number of samples fetched for the seat's batch; None if unknown."""
        return self.place.process.num_fetched(length_address)

    def ask_for_stacks(self, *, by_force: bool = False) -> str:
        """Return the Python stacks of all threads of the process, or why there are none."""
        return self.place.process.ask_for_stacks(by_force=by_force)

    def close(self) -> None:
        """Close what belongs to the seat. The process stays. Idempotent."""
        owned, self.held, self.pidfd = (self.held, self.pidfd), -1, -1  # first, see `Holder`
        for descriptor in owned:
            if descriptor >= 0:
                os.close(descriptor)
        self.place.seats.discard(self.number)

    def __repr__(self) -> str:
        return f"<SeatProcess {self.number} at {self.place!r}>"


def is_readable(descriptor: int) -> bool:
    """Return whether a descriptor has something to read, or is at its end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
