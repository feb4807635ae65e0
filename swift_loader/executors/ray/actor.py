"""One actor, seen from the trainer: what is sent to it, what comes back, and where it is.

    the thread that acts ──send──► Ray ──► actor
    Ray's thread ──a call is done──► announce       the thread that leads ──drain──► answers, in the order of the calls

A call's result is an object in the store of the actor's node. Ray fetches it as soon as it is there. The result of a
later call may be here first; it waits. Ray's thread only says that there may be an answer.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import SharedMemoryFull
from swift_loader.executors.called import CalledHandle, Failed
from swift_loader.executors.fleet import Fleet
from swift_loader.executors.ray.connection import Connection
from swift_loader.scheduler.messages import Event
from swift_loader.transport.messages import Batch, unpack
from swift_loader.transport.segments import Segment
from swift_loader.worker.actor import Location, machine_id
from swift_loader.worker.called import Reply

_HERE = machine_id()

_REQUEST_S = 0.5
"""How long an actor may take to answer a request, when somebody waits for it."""


def told_by_ray(loss: BaseException) -> str:
    """Return what Ray says of the end of an actor, as the end of a message, without its general advice."""
    lines = [line for line in str(loss).partition("Some common causes")[0].splitlines() if not line.startswith("\t")]
    return f"\nRay says:\n    {' '.join(' '.join(lines).split())}"


class Actor:
    """The trainer's end of what would be a pipe, and of what would be a process. See `executors.handle`.

    The thread that acts sends; the one that leads takes answers; any thread uses the rest.
    """

    def __init__(self, connection: Connection, actor: Any, fleet: Fleet, serial: int) -> None:
        """Ask the actor where it is. `actor`: Ray's handle.

        `fleet` is told when there may be something to take, and when the actor has a place, or never will. On any
        thread.
        """
        self.began_s = time.monotonic()
        self.loss: BaseException | None = None
        """Why nothing more comes from it, as Ray says."""
        self._connection = connection
        self._actor = actor
        """None: closed."""
        self._fleet, self._serial = fleet, serial
        self._error_of_call: type[BaseException] = connection.ray.exceptions.RayTaskError
        """An error of this type is the call's own, so the actor lives."""
        self._kept: list[bytes] = []
        """Messages that go with the next task."""
        self._calls: deque[Future[Any]] = deque()
        """Not taken yet, oldest first."""
        self._end: Future[Any] | None = None
        """Fails when the actor ends."""
        self._waits_for_results = True
        """Whether results that are on their way count if the actor has ended."""
        self._is_killed = False
        self._where: Location | None = None
        self._introduction: Future[Any] | None = self._future_of(actor.introduce.remote())

    def _future_of(self, ref: Any) -> Future[Any]:
        future: Future[Any] = ref.future()
        future.add_done_callback(lambda _: self._fleet.note_news(self._serial))  # on a thread of Ray
        return future

    # As a channel -----------------------------------------------------------------------------------------------------

    def begin(self, started: Any) -> None:
        """Listen to the actor. `started` is the object of its first answer."""
        self._end = self._future_of(self._actor.await_end.options(concurrency_group="end").remote())
        self._calls.append(self._future_of(started))

    outbox = ()

    def post(self, message: bytes, *, is_task: bool = False) -> None:
        """Send a message. What isn't a task waits for the next one.

        Raises `BrokenPipeError` if Ray can't call the actor any more.
        """
        self._kept.append(message)
        if not is_task:
            return
        kept, self._kept = self._kept, []
        with self._connection.held() as is_open:
            if not is_open:
                raise BrokenPipeError(errno.EPIPE, "this process isn't connected to Ray any more")
            try:
                self._calls.append(self._future_of(self._actor.build.remote(kept)))
            except Exception as error:  # the actor was forgotten
                raise BrokenPipeError(errno.EPIPE, f"calling an actor failed: {error}") from error

    def peek(self) -> Reply | Failed | None:
        """Return what `take` would return, and leave it there."""
        if self._calls and self._calls[0].done():
            error = self._calls[0].exception()
            if error is None:
                return Reply(*self._calls[0].result())
            return Failed(error, is_lost=not isinstance(error, self._error_of_call))
        end = self._end
        if end is not None and end.done() and not (self._calls and self._waits_for_results):
            return Failed(end.exception() or RuntimeError("the actor has returned"), is_lost=True)
        return None

    def take(self) -> Reply | Failed | None:
        """Return the next answer; None if it isn't here. After a loss there is none."""
        answer = self.peek()
        if isinstance(answer, Failed) and answer.is_lost:
            self.note_loss(answer.error)
        elif answer is not None:
            with self._connection.held():
                self._calls.popleft()
        return answer

    def drop_results(self) -> None:
        """From now on, the end of the actor is its next answer, even if results are on their way."""
        self._waits_for_results = False

    def fileno(self) -> int:
        """Return -1: there is no descriptor."""
        return -1

    # As a process -----------------------------------------------------------------------------------------------------

    @property
    def where(self) -> Location | None:
        """Where it runs. None: Ray hasn't placed it, or it never ran."""
        known = self._introduction
        if self._where is None and known is not None and known.done() and known.exception() is None:
            self._where = known.result()
        return self._where

    @property
    def is_placed(self) -> bool:
        """Whether Ray has placed it, or has given up."""
        return self._introduction is None or self._introduction.done()

    @property
    def pid(self) -> int:
        """Its process id on its node; 0 if it isn't known."""
        where = self.where
        return 0 if where is None else where.pid

    def describe(self) -> str:
        """Return where it runs, for messages."""
        where = self.where
        return "a Ray actor without a place" if where is None else f"a Ray actor, pid {where.pid} on {where.host}"

    def attach(self, slot: int | None, nbytes: int, descriptors: list[int]) -> Segment:  # noqa: ARG002
        """Return memory of this process: an actor shares none."""
        return Segment.private(nbytes)

    def num_fetched(self, length_address: int) -> int | None:  # noqa: ARG002 - it asks the actor
        """Return the number of samples fetched for its batch; None if unknown. Blocks for half a second at most."""
        number = self._ask("position")
        return number if isinstance(number, int) else None

    def use_generation(self, generation: int) -> None:
        """Have it skip tasks of earlier generations. Returns at once."""
        with suppress(Exception), self._connection.held() as is_open:  # it is gone
            if is_open:
                self._actor.use_generation.options(concurrency_group="requests").remote(generation)

    def ask_for_stacks(self, *, by_force: bool = False) -> str:  # noqa: ARG002 - no signal reaches other nodes
        """Return the Python stack of the thread that builds. Blocks for half a second at most."""
        stacks = self._ask("stacks")
        return str(stacks) if stacks is not None else "(none: the actor doesn't answer)"

    def _ask(self, method: str) -> Any:
        if self.where is None or self.has_ended:
            return None
        with suppress(Exception), self._connection.held() as is_open:  # it is gone, or is too slow
            if is_open:
                call = getattr(self._actor, method).options(concurrency_group="requests")
                return self._connection.ray.get(call.remote(), timeout=_REQUEST_S)
        return None

    def note_loss(self, reason: BaseException) -> None:
        """Note why nothing more comes from it, and make sure that it ends."""
        self.loss = reason
        self.close()

    @property
    def has_crashed(self) -> bool:
        """Whether its process has ended by itself, as far as Ray tells: not its node, and not the connection to it."""
        is_of_actor = type(self.loss).__name__ == "ActorDiedError"
        return is_of_actor and "node has died" not in str(self.loss)

    @property
    def has_ended(self) -> bool:
        """Whether Ray says that it has ended."""
        return self._is_killed or (self._end is not None and self._end.done())

    @property
    def exit_code(self) -> int | None:
        """0 if the loader ended it. Ray doesn't tell the others."""
        return 0 if self._is_killed else None

    def wait_end(self, limit_s: float | None) -> bool:
        """Wait until Ray says that it has ended. Return False if that takes longer."""
        end = self._end
        if end is not None and not end.done():
            with suppress(TimeoutError, FutureTimeout, CancelledError):
                end.exception(limit_s)
        return self.has_ended

    def kill(self) -> None:
        """Have Ray end it, whatever it does. Idempotent."""
        self._is_killed = True
        with suppress(Exception), self._connection.held() as is_open:  # it is gone
            if is_open and self._actor is not None:
                self._connection.ray.kill(self._actor, no_restart=True)

    terminate = kill

    def close(self) -> None:
        """End it, if it hasn't ended, and drop all that refers to it in Ray. Idempotent."""
        if self._actor is not None:
            self.kill()
            self._where = self.where
            with self._connection.held():
                self._calls.clear()
                self._actor = self._end = self._introduction = None


class ActorHandle(CalledHandle):
    """A worker that is an actor."""

    @property
    def place(self) -> str:
        """Where it runs."""
        described: str = self.process.describe()
        return described

    def own(self, memory: NDArray[np.uint8] | None) -> NDArray[np.uint8] | None:
        """Return a copy: Ray's object can't be written, and would stay in its store as long as the batch."""
        return None if memory is None else memory.copy()

    def in_our_time(self, message: bytes) -> memoryview:
        """Return a message in which a batch of another machine, which has another clock, ends when it is here."""
        where: Location | None = self.process.where
        if where is None or where.machine == _HERE or not isinstance(batch := unpack(message), Batch):
            return memoryview(message)
        began_ns = time.perf_counter_ns() - batch.fetch_ns - batch.collate_ns - batch.encode_ns
        return memoryview(batch._replace(began_ns=began_ns, meta=bytes(batch.meta)).pack())

    def failure(self, error: BaseException) -> Event:
        """Return the event of a call that failed although the actor lives: above all, its result couldn't be stored."""
        if type(error).__name__ in ("ObjectStoreFullError", "OutOfDiskError"):
            error = SharedMemoryFull(
                f"the object store of a Ray node has no room for a batch ({error}). Give the node more "
                f"(`ray start --object-store-memory`), lower batch_size or data_queue_size (DataLoader: "
                f"prefetch_factor), or keep fewer batches"
            )
        return super().failure(error)
