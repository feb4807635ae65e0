"""A worker process of a pool: it serves several loaders, one task at a time.

    trainer ──SEAT──► control channel            one more loader
    trainer ◄──tasks, batches──► seat's channel  as a worker of that loader alone

Runs on the process's main thread, and blocks in poll(2) on all channels while no seat has a task. Seats with tasks take
turns. A task that takes long holds up those of the other seats. The page that the trainer reads says for which seat the
process works, also after its death.
"""

from __future__ import annotations

import gc
import os
import select
from collections import deque
from collections.abc import Callable
from functools import partial

from swift_loader.errors import ProtocolError
from swift_loader.transport.channel import Channel
from swift_loader.transport.frames import Kind, Received, unpack_frame
from swift_loader.transport.payload import read_environment, read_payload
from swift_loader.transport.pool_messages import LAST, NO_SEAT, SERVED
from swift_loader.transport.pool_messages import Seat as SeatRequest
from swift_loader.transport.segments import Segment
from swift_loader.worker.dataset_builder import DatasetBuilder
from swift_loader.worker.seat import Seat
from swift_loader.worker.seat_context import SeatContext
from swift_loader.worker.usage import ProcessUsage

__all__ = ["PoolWorker"]


class PoolWorker:
    """Serves the seats of one process."""

    def __init__(
        self, worker: int, control: Channel, page: Segment, take_shared: Callable[[int], DatasetBuilder | None]
    ) -> None:
        """Serve nobody yet.

        Args:
            worker: Serial number of the worker.
            control: Brings requests for seats.
            page: Shows for which seat the process works.
            take_shared: Returns a dataset that the template has built, by its key; None if it has none. Called once
                for each key.
        """
        self._worker = worker
        self._control = control
        self._page = page
        self._words = page.memory.cast("Q")
        self._take_shared = take_shared
        self._seats: dict[int, Seat] = {}
        """By descriptor."""
        self._turns: deque[Seat] = deque()
        """Those with tasks. The first one is next."""
        self._served: Seat | None = None
        """Whose state the process has."""
        self._fresh = SeatContext.take()
        """The state that a new seat begins with."""
        self._usage = ProcessUsage()
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)

    def serve(self) -> None:
        """Serve until the trainer closes the control channel or dies."""
        with self._usage:
            while self._take_in():
                if self._turns:
                    self._work(self._turns.popleft())

    def _take_in(self) -> bool:
        """Read what has come; block if there is nothing to do. Return False if the trainer has hung up."""
        for descriptor, _ in self._poll.poll(0 if self._turns else None):
            if descriptor == self._control.fileno():
                received = self._control.receive()
                if received is None:
                    return False
                self._add(received)
            elif (seat := self._seats.get(descriptor)) is not None and seat not in self._turns:
                if not seat.take_in():
                    self._leave(seat)
                elif seat.has_tasks:
                    self._turns.append(seat)
        return True

    def _add(self, received: Received) -> None:
        frame = unpack_frame(received.data)
        if frame.kind is not Kind.SEAT or len(received.descriptors) != 3:  # noqa: PLR2004 - channel, payload, pipe
            raise ProtocolError(f"a worker of a pool was sent {frame.kind.name} instead of SEAT")
        request = SeatRequest.unpack(frame)
        channel, payload, held = received.descriptors
        seat = Seat(request, Channel.from_descriptor(channel), held)
        self._seats[seat.fileno()] = seat
        self._poll.register(seat.fileno(), select.POLLIN)
        self._enter(seat)
        builder = self._take_shared(request.key)
        if builder is None:
            builder = _read_later(request, payload)
        else:
            os.close(payload)
        seat.begin(self._worker, builder, self._usage)
        self._words[SERVED] = NO_SEAT

    def _work(self, seat: Seat) -> None:
        """Answer one task of a seat. Read what came for it first: another epoch may have begun."""
        self._enter(seat)  # first: if the trainer leaves after `take_in`, it must see that the seat is being served
        self._words[LAST] = seat.number
        if not seat.take_in() or not seat.do_next():
            self._leave(seat)
        elif seat.has_tasks:
            self._turns.append(seat)
        self._words[SERVED] = NO_SEAT

    def _enter(self, seat: Seat) -> None:
        """Make the seat's state that of the process."""
        self._words[SERVED] = seat.number
        if self._served is seat:
            return
        if self._served is not None:
            self._served.context = SeatContext.take()
        self._served = seat
        context, seat.context = seat.context or self._fresh, None
        context.restore()

    def _leave(self, seat: Seat) -> None:
        """Stop serving a seat whose loader is closed."""
        self._poll.unregister(seat.fileno())
        del self._seats[seat.fileno()]
        if self._served is seat:
            self._served = None
            self._fresh.restore()  # else `get_worker_info` would keep the dataset
        seat.leave()
        del seat
        gc.collect()

    def __repr__(self) -> str:
        return f"<PoolWorker of {len(self._seats)} seats>"


def _read_later(request: SeatRequest, payload: int) -> DatasetBuilder:
    """Return what reads the payload, in memory of its own: seats may change their datasets."""
    segment = Segment.attach(payload, request.layout.total_nbytes, private=True)
    environment = read_environment(request.layout, segment)
    return DatasetBuilder(partial(read_payload, request.layout, segment), environment)
