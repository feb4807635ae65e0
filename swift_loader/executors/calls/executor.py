"""Calls functions: carries out what the scheduler decides, and reports what happens.

    loop's thread, or the receiver thread    ThreadInbox.wait; carry_out, under the dispatcher's dispatch lock
    the crew's threads                       the user's function

No call can be killed. A call that hangs ends the loop's wait with an error, if there is a timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swift_loader.errors import WorkerStalled
from swift_loader.executors.base import Inbox, ToDo
from swift_loader.executors.calls.crew import Crew
from swift_loader.executors.process.deaths import attached
from swift_loader.executors.thread.inbox import Mailbox
from swift_loader.process_owner import ProcessOwner
from swift_loader.sampling.plan import Plan, PlanSettings
from swift_loader.scheduler.messages import Event, ExecutorFailed, Kill, Ready, Send, Stall, TemplateLost, WorkerLost
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.work import Work

JOIN_LIMIT_S = 1.5
"""How long `close` waits for calls to return. Those that hang are left alone."""


class CallExecutor:
    """The workers of one stage."""

    grace_s = 0.0
    """Nothing is replaced."""
    largest_batch_nbytes = 0
    """What is handed over lies in no slot."""

    def __init__(
        self, crew: Crew, num_workers: int, name: str, settings: PlanSettings, describe: Callable[[Work], str]
    ) -> None:
        """Make an executor that isn't started.

        `num_workers`: tasks that the crew does at the same time. `name`: of the stage, for errors. `settings`: of a
        plan without samples. `describe` returns which item a work is, for errors.
        """
        self.owner = ProcessOwner()
        """A fork of it has none of the threads."""
        self.plan = Plan.of(0, settings)
        self._mailbox = Mailbox[Event]()
        self.inboxes: Sequence[Inbox] = [self._mailbox.of_loop, self._mailbox.of_receiver]
        """One thread takes over while the loop is busy, and sends the next tasks."""
        self._crew = crew
        self._num_workers = num_workers
        self._name = name
        self._describe = describe

    def start(self) -> None:
        """Start the crew."""
        self._crew.start(self._mailbox.post)
        self._mailbox.post(Ready(worker, worker) for worker in range(self._num_workers))

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Do nothing: a function depends on no plan."""

    def resize(self, num_workers: int, limits: Limits) -> None:  # noqa: ARG002
        """Raise: the crew is fixed."""
        raise RuntimeError(f"stage {self._name!r} has {self._num_workers} workers, and can't have {num_workers}")

    def carry_out(self, action: ToDo) -> list[Any]:
        """Send a task. Instead of killing a worker, give up: no call can be killed."""
        if isinstance(action, Send):
            self._crew.send(action)
        else:
            assert isinstance(action, Kill), f"a call is never lost: {action}"
            self._mailbox.post([ExecutorFailed(self._stalled(action.stall))])
        return []

    def _stalled(self, stall: Stall) -> WorkerStalled:
        stack = "" if stall.worker is None else self._crew.stack(stall.worker)
        item = "" if stall.work is None else f", {self._describe(stall.work)},"
        return WorkerStalled(
            f"stage {self._name!r}{item} has taken {stall.busy_s:.1f} s, longer than its timeout. A call can't be "
            f"killed, so its thread stays until the function returns{attached(traces=stack)}"
        )

    def error_of(self, cause: WorkerLost | Stall | BaseException) -> BaseException:
        """Return the error for the loop."""
        if isinstance(cause, Stall):
            return self._stalled(cause)
        assert isinstance(cause, BaseException), f"a call is never lost: {cause}"
        return cause

    def notice_of(self, about: WorkerLost | Stall | TemplateLost) -> str:
        """Return the warning for the user."""
        assert isinstance(about, Stall), f"a call is never lost: {about}"
        return str(self._stalled(about))

    def stop(self) -> None:
        """Begin no more calls, and wake whoever waits in the inbox. Any thread. Idempotent."""
        self._crew.stop()
        self._mailbox.of_loop.wake()

    def close(self) -> list[Any]:
        """Wait for the crew, at most `JOIN_LIMIT_S`. Idempotent."""
        self._crew.join(JOIN_LIMIT_S)
        return []

    def __repr__(self) -> str:
        return f"<CallExecutor {self._name!r}, {self._crew!r}>"
