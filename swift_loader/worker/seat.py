"""One loader that a process of a pool serves: its dataset, its tasks, its slots and its global state."""

from __future__ import annotations

import os
from contextlib import suppress

from swift_loader.transport.channel import Channel
from swift_loader.transport.messages import FailureStage
from swift_loader.transport.pool_messages import Seat as SeatRequest
from swift_loader.worker.dataset_builder import DatasetBuilder
from swift_loader.worker.failure import describe_failure
from swift_loader.worker.loop import TaskLoop, announce
from swift_loader.worker.seat_context import SeatContext
from swift_loader.worker.usage import ProcessUsage

__all__ = ["Seat"]

_GONE = (BrokenPipeError, ConnectionResetError)


class Seat:
    """A worker's place at one loader. A process has several, and works for one at a time.

    `begin`, `take_in` and `do_next` run in the seat's own state of the process, see `SeatContext`.
    """

    def __init__(self, request: SeatRequest, channel: Channel, held: int) -> None:
        """Do nothing yet.

        Args:
            request: What the trainer asked for.
            channel: Connects to the trainer; owned by the seat.
            held: A descriptor that shows the trainer that the seat is held; owned by the seat.
        """
        self.number = request.number
        self.context: SeatContext | None = None
        """The state of the process when another seat was served last. None: this one is served."""
        self._plan = request.plan
        self._channel = channel
        self._held = held
        self._loop: TaskLoop | None = None
        """None before `begin`, and if that has failed."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when there are tasks, or when the trainer has left."""
        return self._channel.fileno()

    def begin(self, worker: int, builder: DatasetBuilder, usage: ProcessUsage) -> None:
        """Read and build the dataset, unless that was done, and tell the trainer. If that fails, tell it why.

        Args:
            worker: Serial number of the worker.
            builder: Has the dataset, or reads it.
            usage: Measures this process, for all its seats.
        """
        with suppress(*_GONE):
            try:
                if builder.is_shared:
                    builder.set_up_torch()
                else:
                    builder.read()
                builder.use_plan(self._plan)
            except Exception as error:
                self._channel.send(describe_failure(error, FailureStage.BUILD, builder.definitions).pack())
                return
            service = builder.start_service(worker, self._channel, usage)
            if service is not None:
                self._loop = announce(self._channel, *service)

    @property
    def has_tasks(self) -> bool:
        """Whether there is something to do."""
        return self._loop is not None and self._loop.has_tasks

    def take_in(self) -> bool:
        """Read what the trainer has sent. Return False if it has left."""
        if self._loop is not None:
            return self._loop.refill(wait=False)
        try:
            return self._channel.receive(wait=False) is not None
        except BlockingIOError:
            return True

    def do_next(self) -> bool:
        """Answer a task. Return False if the trainer has left."""
        assert self._loop is not None, "it has tasks"
        try:
            self._loop.do_next()
        except _GONE:
            return False
        return True

    def leave(self) -> None:
        """Give up the dataset and all resources."""
        self._loop = None
        self._channel.close()
        os.close(self._held)

    def __repr__(self) -> str:
        return f"<Seat {self.number}{' with tasks' * self.has_tasks}>"
