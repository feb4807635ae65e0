"""The interface between the engine and the places where batches are built.

    scheduler ──actions──► Executor                 what happens there ──events──► Inbox.wait ──► scheduler

An executor decides nothing and calls nobody back: each event comes out of `wait`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swift_loader.runtime import ProcessOwner
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler import messages
from swift_loader.scheduler.messages import Event, Send, Stall
from swift_loader.scheduler.queues import Limits

ToDo = (
    Send
    | messages.Look
    | messages.Kill
    | messages.Reap
    | messages.Release
    | messages.Start
    | messages.Dismiss
    | messages.ReplaceTemplate
)
"""The actions that an executor carries out."""


class Inbox:
    """A source of events. One thread at a time uses it. Subclasses wait, and some ring a bell that ends the wait."""

    def __init__(self) -> None:
        self.is_waiting = False
        """Whether `wait` blocks, so that an exception of a signal handler loses nothing. The caller resets it then."""
        self._is_woken = False

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Return what has happened. Blocks until something has, but no longer than `timeout_s`.

        Without a timeout, it returns an empty list only if somebody woke it.
        """
        raise NotImplementedError

    def ring(self) -> None:
        """End the current `wait`, or the next one. Thread-safe. Does nothing once closed."""

    def wake(self) -> None:
        """End the current `wait` and all later ones, until `sleep`. Thread-safe."""
        self._is_woken = True
        self.ring()

    def sleep(self) -> None:
        """Let `wait` block again."""
        self._is_woken = False


class Executor:
    """A place where batches are built. What is here is right for workers that can't die or hang.

    The thread that holds the dispatch lock calls its methods, unless one says otherwise. Any thread reads what it is.
    """

    owner: ProcessOwner | None = None
    """The only process that can use the executor. None: its forks can, too."""
    grace_s = 0.0
    """Seconds that replacing a worker may take."""
    plan: Plan
    """The plan that it starts with. Known after `start`."""

    @property
    def inboxes(self) -> Sequence[Inbox]:
        """The loop's inbox, which gets all events, then one for each thread that takes over while the loop is busy."""
        raise NotImplementedError

    @property
    def largest_batch_nbytes(self) -> int:
        """Bytes of the largest batch that has come from a worker; 0 before the first, or if nothing is in flight."""
        return 0

    def start(self) -> None:
        """Get ready to build batches. Blocks until the dataset is built. The caller holds no lock.

        Raises `WorkerDied`, or what building the dataset raised.
        """
        raise NotImplementedError

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Use this plan from this generation on. Batches of earlier generations aren't needed any more.

        `resume`: where each worker's dataset continues, by the worker's id: a packed `Resume`.
        """
        raise NotImplementedError

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Be ready for so many workers from now on. Actions start and dismiss them. There may be more inboxes then.

        `num_workers`: at least 1. `limits`: how far ahead of the loop they may work. Raises `RuntimeError` if their
        number can't change; nothing has changed then.
        """
        raise NotImplementedError

    def renew(self) -> list[Any]:
        """Start other workers in place of all, which end or are left alone. Of these no event comes any more.

        Blocks until they have ended. Nobody may wait in an inbox. Returns the same as `carry_out`.
        """
        raise NotImplementedError

    def carry_out(self, action: ToDo) -> list[Any]:
        """Do what the scheduler decided: see `ToDo`.

        Returns:
            What the caller must drop outside its locks, because freeing it takes a while.
        """
        raise NotImplementedError

    def error_of(self, cause: messages.WorkerLost | Stall | BaseException) -> BaseException:
        """Return the error for the loop."""
        assert isinstance(cause, BaseException), f"such a worker is never lost, and can't hang: {cause}"
        return cause

    def notice_of(self, about: messages.WorkerLost | Stall | messages.TemplateLost) -> str:
        """Return the warning for the user."""
        raise AssertionError(f"such a worker is never lost, and can't hang: {about}")

    def stop(self) -> None:
        """End all processes, and wake whoever waits in the first inbox. Any thread. Idempotent."""

    def close(self) -> list[Any]:
        """Free all resources. Nobody may wait in an inbox any more. Idempotent. Returns the same as `carry_out`."""
        return []
