"""The side of a rank that shares the batches of another one: an executor without workers.

    rank that loads ──► LeaderLink, with a stash ──► collect ◄── tasks of this rank's scheduler
                                                       │
                                                       └──events──► GroupInbox

Which batches this rank's loop gets, and when, its own scheduler decides. A task is answered with the batch of the same
plan, epoch and step.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from swift_loader.errors import LoaderClosed, RankStalled
from swift_loader.executors.base import ToDo
from swift_loader.executors.batch_reader import BatchReader
from swift_loader.executors.group.answers import Answers, Content
from swift_loader.executors.group.inbox import GroupInbox
from swift_loader.executors.group.leader_link import LeaderLink
from swift_loader.executors.group.messages import BatchId, Welcome, key_of
from swift_loader.executors.process.explain import Explainer
from swift_loader.executors.process.forks import FORKS
from swift_loader.metrics.metrics import Metrics
from swift_loader.notices import warn
from swift_loader.options import DeliveryOptions
from swift_loader.process_owner import ProcessOwner
from swift_loader.ranks.group import Group
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.actions import Send, Stall, TemplateLost, WorkerLost
from swift_loader.scheduler.events import Event, ExecutorFailed, Ready, Skipped
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.channel import Channel
from swift_loader.transport.descriptors import new_eventfd
from swift_loader.worker.spec import WorkerSpec

__all__ = ["GroupFollower"]

_WORKER = 0
"""The serial number and the id of the only worker, as the scheduler sees it: the rank that loads."""

_START_LIMIT_S = 1.0
"""How long `close` waits for a thread in `start` to leave the inbox."""


class GroupFollower:
    """Gets the batches of one loader from another rank.

    Its one lock guards the tasks, the signal, and its `LeaderLink` as well.
    """

    grace_s = 0.0
    """Nothing is replaced."""

    def __init__(
        self,
        group: Group,
        channel: Channel,
        spec: WorkerSpec,
        options: DeliveryOptions,
        metrics: Metrics,
        definitions: Definitions,
    ) -> None:
        """Make an executor that isn't started.

        Args:
            group: The ranks.
            channel: To the one that loads. This object owns it.
            spec: Which batches this rank gets.
            options: How they are delivered.
            metrics: Counts the stages.
            definitions: What travels by value, as this process would send it.
        """
        self.owner = ProcessOwner()
        self._group, self._spec, self._options, self._metrics = group, spec, options, metrics
        self._definitions = definitions
        self._starting = threading.RLock()
        """Held while `start` uses the inbox. Taken before the other lock."""
        self._lock = threading.RLock()  # reentrant: a signal handler may close the loader on the thread that holds it
        """Guards all that follows, see also `LeaderLink`."""
        self._link = LeaderLink(group, channel, self._lock, options.limits.max_in_flight)
        self._tasks: deque[tuple[Send, BatchId]] = deque()
        """Not answered, in the order in which they came."""
        self._events: deque[Event] = deque()
        """For the inbox that is used next."""
        self._plan_key = key_of(spec.plan)
        self._is_failed = False
        self._first_plan: Plan | None = None
        self._explainer: Explainer | None = None
        self._answers: Answers | None = None
        self._signal = -1
        self.inboxes: list[GroupInbox] = []
        """The loop's, then the one of the thread that leads while the loop is busy."""
        try:
            self._signal = new_eventfd()
            os.set_blocking(self._signal, False)
            FORKS.holders.add(self)
            for is_of_loop in (True, False):
                self.inboxes.append(GroupInbox(self, is_of_loop=is_of_loop))
        except BaseException:
            self.close()
            raise

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; -1 once closed."""
        return [self._signal, *self._link.descriptors()]

    @property
    def descriptors_to_watch(self) -> list[int]:
        """Readable when there is something to collect."""
        return [self._link.fileno(), self._signal]

    # What it is -------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that it starts with. Known after `start`."""
        assert self._first_plan is not None, "the executor hasn't started"
        return self._first_plan

    @property
    def largest_batch_nbytes(self) -> int:
        """Bytes of the largest batch that has come; 0 before the first."""
        return 0 if self._answers is None else self._answers.largest_batch_nbytes

    @property
    def loading_rank(self) -> int:
        """The rank that loads."""
        return self._group.leader.process

    # Starting and stopping --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait until the rank that loads has built the dataset.

        Raises:
            RankDied: It has ended, or couldn't build it.
            LoaderClosed: Another thread closed this loader.
        """
        with self._starting:
            welcome = self._await_welcome()
        self._definitions = self._link.in_order(self._definitions)
        self._first_plan = plan = Plan.of(welcome.num_samples, self._spec.plan)
        self._explainer = Explainer(self._options, plan, self._definitions, 0.0)
        batches = BatchReader(self._definitions, self._options.batch_decoder)
        self._answers = Answers(batches, self._explainer, self._metrics)
        self._events.append(Ready(_WORKER, _WORKER))
        self._ring()

    def _await_welcome(self) -> Welcome:
        def is_known() -> bool:
            return self._link.welcome is not None or self._link.end is not None

        began_s, warning_s = time.monotonic(), self._options.stall_warning_s
        if not self.inboxes[0].block_until(is_known, warning_s):
            if warning_s is not None and time.monotonic() - began_s >= warning_s:  # else `stop` ended the wait
                warn(f"{self._link.name}, hasn't built the dataset for {warning_s:g} s so far")
            self.inboxes[0].block_until(is_known, None)
        if self._link.welcome is not None:
            return self._link.welcome
        raise LoaderClosed("the loader was closed while it started") if self._link.end is None else self._link.end.error

    def stop(self) -> None:
        """Wake whoever waits in the loop's inbox. Any thread. Idempotent."""
        self.inboxes[0].wake()

    def close(self) -> list[Any]:
        """Free all resources, once no thread is in `start`: call `stop` before. Kept batches stay valid. Idempotent."""
        if self._starting.acquire(timeout=_START_LIMIT_S):
            self._starting.release()
        with self._lock:
            self._tasks.clear()
            segments = self._link.close()
            for inbox in self.inboxes:
                inbox.close()
            if self._signal >= 0:
                signal, self._signal = self._signal, -1  # first, see `Holder`
                os.close(signal)
        return list(segments)

    # Acting; the caller holds the dispatch lock -----------------------------------------------------------------------

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:  # noqa: ARG002
        """Use this plan from this generation on. Batches of earlier generations aren't needed any more."""
        assert self._explainer is not None
        with self._lock:
            self._explainer.current = (generation, plan)
            self._plan_key = key_of(plan.settings)
            for task, _ in self._tasks:
                self._events.append(Skipped(_WORKER, task.generation))
            self._tasks.clear()
            self._link.go_elsewhere()
        self._ring()

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Do nothing: the workers are those of another rank."""

    def carry_out(self, action: ToDo) -> list[Any]:
        """Keep a task for `collect`."""
        assert isinstance(action, Send), f"another rank can't be stopped or replaced: {action}"
        with self._lock:
            batch_id = BatchId(self._plan_key, action.work.epoch, action.work.step)
            self._tasks.append((action, batch_id))
            can_answer = len(self._tasks) == 1 and (self._link.end is not None or self._link.has(batch_id))
        if can_answer:
            self._ring()
        return []

    def error_of(self, cause: WorkerLost | Stall | BaseException) -> BaseException:
        """Return the error for the loop."""
        if isinstance(cause, Stall):
            return RankStalled(f"{self._stall(cause)}. That is longer than timeout={self._options.timeout_s:g} s")
        assert isinstance(cause, BaseException), f"another rank isn't replaced: {cause}"
        return cause

    def notice_of(self, about: WorkerLost | Stall | TemplateLost) -> str:
        """Return the warning for the user."""
        assert isinstance(about, Stall), f"another rank isn't replaced: {about}"
        return self._stall(about)

    def _stall(self, stall: Stall) -> str:
        assert self._explainer is not None
        what = "a batch" if stall.work is None else self._explainer.batch(stall.work)
        return (
            f"rank {self._group.process} has waited for {what} for {stall.busy_s:.1f} s. It comes from "
            f"rank {self._group.leader.process} (pid {self._group.leader.offer.pid}), whose loop may be elsewhere"
        )

    # The loop's thread ------------------------------------------------------------------------------------------------

    def note_taken(self, epoch: int, step: int) -> None:
        """Note that the loop takes a batch, and give slots back."""
        self._link.note_taken(BatchId(self._plan_key, epoch, step))

    def tell_awaited(self) -> None:
        """Tell the rank that loads which batch the loop waits for."""
        with self._lock:
            if self._tasks:
                self._link.tell_awaited(self._tasks[0][1])

    # The thread that leads --------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        with self._lock:
            if self._signal >= 0:
                os.eventfd_write(self._signal, 1)

    def collect(self, inbox: GroupInbox) -> list[Event]:
        """Take in what has come, and return what it means."""
        with self._lock:
            if self._signal < 0:
                return []
            with suppress(BlockingIOError):
                os.eventfd_read(self._signal)
        if self._link.end is None:
            self._receive()
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        while (found := self._next_answer()) is not None:
            assert self._answers is not None
            events += self._answers.of(*found, inbox)
        end = self._link.end
        if end is not None and not self._is_failed and (self._tasks or end.is_at_once):
            self._is_failed = True
            events.append(ExecutorFailed(end.error))
        return events

    def _next_answer(self) -> tuple[Send, Content] | None:
        with self._lock:
            if not self._tasks:
                return None
            task, batch_id = self._tasks[0]
            content = self._link.give(batch_id)
            if content is None:
                return None
            self._tasks.popleft()
            return task, content

    def _receive(self) -> None:
        self._link.receive()
        with self._lock:
            if self._link.end is not None and self._link.fileno() >= 0:
                for inbox in self.inboxes:
                    inbox.unwatch(self._link.fileno())

    def __repr__(self) -> str:
        return f"<GroupFollower, {self._link!r}>"
