"""Builds batches in processes of this machine and in Ray actors, for one loader.

    WorkerExecutor    worker ids 0 to L-1    ──►  its inboxes  ──►  MixedInbox.wait ──► events of both
    ActorExecutor     worker ids from L on   ──►  Posted ──┘

The processes start first, and the loop doesn't wait for the actors. Ray's thread posts an actor that may have answered
where the processes' inboxes listen, so that one wait is for both. The two share nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from swift_loader.executors.base import Inbox, ToDo
from swift_loader.executors.executor import WorkerExecutor
from swift_loader.executors.fleet import Fleet
from swift_loader.executors.handle import Handle, HandledProcess
from swift_loader.executors.process.reader import MessageReader
from swift_loader.executors.ray.executor import ActorExecutor
from swift_loader.executors.ray.inbox import Posted, read_answers
from swift_loader.executors.ray.supervisor import FIRST_SERIAL, RaySupervisor
from swift_loader.process_owner import ProcessOwner
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.messages import Event, ReplaceTemplate, Stall, Start, TemplateLost, WorkerLost
from swift_loader.scheduler.queues import Limits
from swift_loader.worker.spec import WorkerSpec


class MixedStarter:
    """Starts both. See `executors.fleet.Fleet`."""

    def __init__(self, local: Fleet, remote: RaySupervisor) -> None:
        """Own two starters."""
        self.local = local
        self.remote = remote
        self.num_local = remote.options.num_local

    @property
    def owner(self) -> ProcessOwner:
        """The only process that may use it."""
        return self.local.owner

    @property
    def spec(self) -> WorkerSpec:
        """What is sent to the workers."""
        return self.local.spec

    def start_first(self) -> None:
        """Start the process that builds the dataset first. The actors start with the loader."""
        self.local.start_first()

    def wait_built(self) -> tuple[int, float]:
        """Wait until a process here has built the dataset. Return its length, and the seconds that it took."""
        return self.local.wait_built()

    def is_current(self) -> bool:
        """Return whether another start would build the same."""
        return self.local.is_current()

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Be ready for so many workers in all. Starts and ends none."""
        self.local.resize(min(num_workers, self.num_local), limits)
        self.remote.resize(num_workers, limits)

    def processes(self) -> Sequence[HandledProcess]:
        """Return the processes here, then the actors."""
        return [*self.local.processes(), *self.remote.processes()]

    def close(self) -> None:
        """Stop both, if no executor does. Idempotent."""
        try:
            self.local.close()
        finally:
            self.remote.close()

    def __repr__(self) -> str:
        return f"<MixedStarter of {self.local!r} and {self.remote!r}>"


class MixedInbox:
    """An inbox of the processes that also gets what actors answer. See `executors.base.Inbox`."""

    def __init__(self, inbox: Inbox, reader: MessageReader) -> None:
        """Extend an inbox. `reader` reads the answers of actors."""
        self._inbox = inbox
        self._reader = reader

    @property
    def interrupt(self) -> Exception | None:
        """See `Inbox`."""
        return self._inbox.interrupt

    @interrupt.setter
    def interrupt(self, value: Exception | None) -> None:
        self._inbox.interrupt = value

    @property
    def is_taking_in(self) -> bool:
        """See `Inbox`."""
        return self._inbox.is_taking_in

    @is_taking_in.setter
    def is_taking_in(self, value: bool) -> None:
        self._inbox.is_taking_in = value

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Return what has happened. See `Inbox`: an empty list, before the time, only if somebody woke it."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            posted: list[Any] = self._inbox.wait(left_s)
            events: list[Event] = []
            for one in posted:
                if isinstance(one, Handle):
                    read_answers(one, self._reader, self._inbox, events)
                else:
                    events.append(one)
            if events or not posted:
                return events  # else there was only what is no event

    def wake(self) -> None:
        """End the current `wait` and all later ones, until `sleep`. Thread-safe."""
        self._inbox.wake()

    def sleep(self) -> None:
        """Let `wait` block again."""
        self._inbox.sleep()

    def __repr__(self) -> str:
        return f"<MixedInbox over {self._inbox!r}>"


class MixedExecutor:
    """The workers of one loader: processes and actors."""

    def __init__(self, local: WorkerExecutor, remote: ActorExecutor, num_local: int) -> None:
        """Make an executor that isn't started. It owns both. Workers with ids below `num_local` are processes."""
        self._local = local
        self._remote = remote
        self._num_local = num_local
        self._inboxes: list[MixedInbox] = []
        """One for each inbox of the processes."""

    def start(self) -> None:
        """Start the processes, then the actors. Blocks until a process has built the dataset.

        Raises `ImportError` if Ray isn't installed, `ConnectionError` if there is no cluster, or what starting the
        processes raised.
        """
        local = self._local
        self._remote.connect()  # first, because it may fail at once
        local.start()
        self._remote.start_beside(local.plan, local.explainer.build_s, local.fleet.datasets, self._post)
        local.explainer.options = self._remote.options

    def _post(self, posted: Sequence[Posted]) -> None:
        """Post where the processes' inboxes listen. Any thread."""
        for one in posted:
            self._local.fleet.post(cast(Any, one))  # a worker is for `MixedInbox.wait`, which gets it back as it is

    @property
    def owner(self) -> ProcessOwner | None:
        """The process that started the workers."""
        return self._local.owner

    @property
    def inboxes(self) -> Sequence[Inbox]:
        """The loop's inbox, then one for each thread that takes over while the loop is busy."""
        known, reader = self._local.inboxes, self._remote.reader
        assert reader is not None
        self._inboxes += [MixedInbox(inbox, reader) for inbox in known[len(self._inboxes) :]]
        return self._inboxes

    @property
    def plan(self) -> Plan:
        """The plan that the workers start with. Known after `start`."""
        return self._local.plan

    @property
    def largest_batch_nbytes(self) -> int:
        """Bytes of the largest batch that has come from a worker; 0 before the first."""
        return max(self._local.largest_batch_nbytes, self._remote.largest_batch_nbytes)

    @property
    def grace_s(self) -> float:
        """Seconds that replacing a worker may take."""
        return self._local.grace_s

    # Acting

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Use this plan from this generation on."""
        self._local.use_plan(generation, plan, resume)
        self._remote.use_plan(generation, plan, resume)

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Be ready for so many workers in all: the first ones are processes."""
        self._local.resize(min(num_workers, self._num_local), limits)
        self._remote.resize(num_workers, limits)
        self._local.explainer.options = self._remote.options

    def carry_out(self, action: ToDo) -> list[Any]:
        """Have the one do it whose worker it is about."""
        if isinstance(action, ReplaceTemplate):
            return self._local.carry_out(action)
        is_local = action.worker_id < self._num_local if isinstance(action, Start) else action.worker < FIRST_SERIAL
        return (self._local if is_local else self._remote).carry_out(action)

    def error_of(self, cause: WorkerLost | Stall | BaseException) -> BaseException:
        """Return the error for the loop."""
        return self._of(cause).error_of(cause)

    def notice_of(self, about: WorkerLost | Stall | TemplateLost) -> str:
        """Return the warning for the user."""
        return self._of(about).notice_of(about)

    def _of(self, cause: object) -> WorkerExecutor:
        is_remote = isinstance(cause, (WorkerLost, Stall)) and (cause.worker or 0) >= FIRST_SERIAL
        return self._remote if is_remote else self._local

    # Stopping

    def stop(self) -> None:
        """End all workers, and wake whoever waits in the loop's inbox. Any thread. Idempotent."""
        try:
            self._local.stop()
        finally:
            self._remote.stop()

    def close(self) -> list[Any]:
        """Free all resources. Nobody may wait in an inbox any more. Idempotent."""
        return [*self._remote.close(), *self._local.close()]

    def __repr__(self) -> str:
        return f"<MixedExecutor of {self._local!r} and {self._remote!r}>"
