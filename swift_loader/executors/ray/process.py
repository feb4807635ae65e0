"""An actor, as the process of a worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from swift_loader.executors.ray.calls import ActorCalls, future_of
from swift_loader.executors.ray.connection import Connection
from swift_loader.transport.segments import Segment
from swift_loader.worker.actor import Location, machine_id

_HERE = machine_id()

_REQUEST_S = 0.5
"""How long an actor may take to answer a request, when somebody waits for it."""


class ActorProcess:
    """See `executors.handle.HandledProcess`. Any thread."""

    def __init__(self, connection: Connection, actor: Any, calls: ActorCalls, note_placed: Callable[[], None]) -> None:
        """Ask the actor where it is. `note_placed` is called on a thread of Ray once it runs, or never will."""
        self._connection = connection
        self._actor = actor
        self._calls = calls
        self._is_killed = False
        self.loss: BaseException | None = None
        """Why nothing more comes from it, as Ray says."""
        self.began_s = time.monotonic()
        self._where: Location | None = None
        self._introduction: Future[Any] | None = future_of(actor.introduce.remote(), note_placed)
        """None: closed."""

    @property
    def where(self) -> Location | None:
        """Where it runs. None: Ray hasn't placed it, or it never ran."""
        known = self._introduction
        if self._where is None and known is not None and known.done() and known.exception() is None:
            self._where = known.result()
        return self._where

    @property
    def is_elsewhere(self) -> bool:
        """Whether it runs on another machine than this process."""
        return (where := self.where) is not None and where.machine != _HERE

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
        self.kill()

    @property
    def has_crashed(self) -> bool:
        """Whether its process has ended by itself, as far as Ray tells: not its node, and not the connection to it."""
        is_of_actor = type(self.loss).__name__ == "ActorDiedError"
        return is_of_actor and "node has died" not in str(self.loss)

    @property
    def has_ended(self) -> bool:
        """Whether Ray says that it has ended."""
        return self._is_killed or self._calls.has_ended

    @property
    def exit_code(self) -> int | None:
        """0 if the loader ended it. Ray doesn't tell the others."""
        return 0 if self._is_killed else None

    def wait_end(self, limit_s: float | None) -> bool:
        """Wait until it has ended. Return False if that takes longer."""
        self._calls.await_end(1e6 if limit_s is None else limit_s)
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
                self._actor = self._introduction = None

    def __repr__(self) -> str:
        return f"<ActorProcess {self.describe()}>"
