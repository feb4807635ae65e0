"""The calls of one actor: what is sent to it, and what comes back.

    the thread that acts ──send──► Ray ──► actor
    Ray's thread ──a call is done──► announce        the thread that leads ──take──► answers, in the order of the calls

A call's result is an object in the store of the actor's node. Ray fetches it as soon as it is there. The result of a
later call may be here first; it waits.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from swift_loader.transport.messages import Kind, unpack_frame
from swift_loader.worker.actor import Answer


@dataclass(frozen=True, slots=True)
class Lost:
    """Instead of an answer: the actor or its object is gone, and no further answer comes."""

    reason: BaseException


@dataclass(frozen=True, slots=True)
class Broken:
    """Instead of an answer: the actor lives, but the call has failed."""

    error: BaseException


def future_of(ref: Any, note: Callable[[], object]) -> Future[Any]:
    """Return the future of an object, and have `note` called on a thread of Ray once it is done."""
    future: Future[Any] = ref.future()
    future.add_done_callback(lambda _: note())
    return future


def told_by_ray(loss: BaseException) -> str:
    """Return what Ray says of the end of an actor, as the end of a message, without its general advice."""
    lines = [line for line in str(loss).partition("Some common causes")[0].splitlines() if not line.startswith("\t")]
    return f"\nRay says:\n    {' '.join(' '.join(lines).split())}"


class ActorCalls:
    """The trainer's end of what would be a pipe. The thread that acts sends; the one that leads takes answers."""

    def __init__(
        self,
        actor: Any,
        is_of_call: Callable[[BaseException], bool],
        announce: Callable[[], None],
        held: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        """Call nothing yet. `actor`: Ray's handle.

        `is_of_call` returns whether the error of a call is the call's own, so that the actor lives. `announce` is
        called when there may be something to take, on any thread. `held`: see `Connection`.
        """
        self._actor = actor
        self._is_of_call = is_of_call
        self._announce = announce
        self._held = held
        self._kept: list[bytes] = []
        """Messages that go with the next task."""
        self._calls: deque[Future[Any]] = deque()
        """Not taken yet, oldest first."""
        self._end: Future[Any] | None = None
        """Fails when the actor ends."""
        self._waits_for_results = True
        """Whether results that are on their way count if the actor has ended."""

    def begin(self, started: Any) -> None:
        """Listen to the actor. `started` is the object of its first answer."""
        self._end = future_of(self._actor.await_end.options(concurrency_group="end").remote(), self._announce)
        self._calls.append(future_of(started, self._announce))

    def send(self, message: bytes) -> None:
        """Send a message. A plan waits for the task that needs it.

        Raises `BrokenPipeError` if Ray can't call the actor any more.
        """
        self._kept.append(message)
        if unpack_frame(memoryview(message)).kind is Kind.PLAN:
            return
        kept, self._kept = self._kept, []
        with self._held() as is_open:
            if not is_open:
                raise BrokenPipeError(errno.EPIPE, "this process isn't connected to Ray any more")
            try:
                self._calls.append(future_of(self._actor.build.remote(kept), self._announce))
            except Exception as error:  # the actor was forgotten
                raise BrokenPipeError(errno.EPIPE, f"calling an actor failed: {error}") from error

    def peek(self) -> Answer | Lost | Broken | None:
        """Return what `take` would return, and leave it there."""
        if self._calls and self._calls[0].done():
            error = self._calls[0].exception()
            if error is None:
                return Answer(*self._calls[0].result())
            return Broken(error) if self._is_of_call(error) else Lost(error)
        has_ended = self._end is not None and self._end.done()
        if has_ended and not (self._calls and self._waits_for_results):
            assert self._end is not None
            return Lost(self._end.exception() or RuntimeError("the actor has returned"))
        return None

    def take(self) -> Answer | Lost | Broken | None:
        """Return the next answer; None if it isn't here. After `Lost` there is none."""
        answer = self.peek()
        if isinstance(answer, Lost):
            self.close()
        elif answer is not None:
            with self._held():
                self._calls.popleft()
        return answer

    def drop_results(self) -> None:
        """From now on, the end of the actor is its next answer, even if results are on their way."""
        self._waits_for_results = False

    @property
    def has_ended(self) -> bool:
        """Whether Ray says that the actor has ended."""
        return self._end is not None and self._end.done()

    def await_end(self, limit_s: float) -> None:
        """Wait until Ray says that the actor has ended, at most `limit_s`."""
        if self._end is not None and not self._end.done():
            with suppress(TimeoutError, FutureTimeout, CancelledError):
                self._end.exception(limit_s)

    def fileno(self) -> int:
        """Return -1: there is no descriptor."""
        return -1

    def close(self) -> None:
        """Forget the actor and all calls. Idempotent."""
        with self._held():
            self._calls.clear()
            self._actor = self._end = None
