"""The side of a rank that shares the batches of another one: an executor without workers.

    rank that loads ──PUSH──► GroupInbox ──► stash ◄── tasks of this rank's scheduler
                    ◄──TAKEN, with free slots── note_taken, on the loop's thread

Which batches this rank's loop gets, and when, its own scheduler decides. A task is answered with the batch of the same
plan, epoch and step.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from swift_loader.errors import (
    DatasetMismatch,
    LoaderClosed,
    ProtocolError,
    RankDied,
    RankMismatch,
    RankStalled,
    SwiftLoaderError,
)
from swift_loader.executors.base import Inbox, ToDo
from swift_loader.executors.batch_reader import BatchReader
from swift_loader.executors.group.answers import Answers, Content
from swift_loader.executors.group.inbox import GroupInbox
from swift_loader.executors.group.messages import Awaited, Dropped, End, Ended, Place, Push, Taken, Welcome, key_of
from swift_loader.executors.group.stash import Stash, Stashed
from swift_loader.executors.process.explain import Explainer
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.memory import WorkerMemory
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
from swift_loader.transport.frames import Kind, Received, unpack_frame
from swift_loader.transport.messages import Batch, SegmentGone, SegmentMade
from swift_loader.transport.private_pages import PrivatePages
from swift_loader.transport.segments import Segment
from swift_loader.worker.spec import WorkerSpec

__all__ = ["GroupFollower"]

_WORKER = 0
"""The serial number and the id of the only worker, as the scheduler sees it: the rank that loads."""

_MANY = 1 << 30

_REPORTS = 4
"""So many times while as many batches as may be in flight are taken, the rank that loads hears of them."""

_ERRORS = {End.MISMATCH: RankMismatch, End.STALLED: RankStalled}


class GroupFollower:
    """Gets the batches of one loader from another rank."""

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
        on_segment: Callable[[Segment], None] | None,
    ) -> None:
        """Make an executor that isn't started.

        Args:
            group: The ranks.
            channel: To the one that loads. This object owns it.
            spec: Which batches this rank gets.
            options: How they are delivered.
            metrics: Counts the stages.
            definitions: What travels by value, as this process would send it.
            on_segment: See `ProcessExecutor`.
        """
        self.owner = ProcessOwner()
        self._group, self._channel = group, channel
        self._spec, self._options, self._metrics = spec, options, metrics
        self._definitions = definitions
        self._on_segment = on_segment
        self._lock = threading.RLock()  # reentrant: a signal handler may close the loader on the thread that holds it
        """Guards the tasks, the stash and what is sent."""
        self._tasks: deque[tuple[Send, Place]] = deque()
        """Not answered, in the order in which they came."""
        self._stash = Stash()
        self._memory = WorkerMemory(_MANY)
        """Of the workers of the rank that loads, by segment number."""
        self._events: deque[Event] = deque()
        """For the inbox that is used next."""
        self._unsent: deque[bytes] = deque()
        """What didn't fit into the socket."""
        self._num_taken = 0
        self._report_every = max(1, options.limits.max_in_flight // _REPORTS)
        self._plan_key = key_of(spec.plan)
        self._welcome: Welcome | None = None
        self._end: _End | None = None
        """Why no more batches come."""
        self._is_failed = False
        self._first_plan: Plan | None = None
        self._explainer: Explainer | None = None
        self._answers: Answers | None = None
        self._pages = PrivatePages()
        self._signal = new_eventfd()
        os.set_blocking(self._signal, False)
        FORKS.holders.add(self)
        FORKS.keep_from_children(channel)
        self._of_loop = GroupInbox(self, is_of_loop=True)
        self.inboxes: Sequence[Inbox] = [self._of_loop, GroupInbox(self, is_of_loop=False)]

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; -1 once closed."""
        return [self._channel.fileno(), self._signal, self._pages.fileno()]

    @property
    def descriptors_to_watch(self) -> list[int]:
        """Readable when there is something to collect."""
        return [self._channel.fileno(), self._signal]

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

    def _leader(self) -> str:
        leader = self._group.leader
        return f"rank {leader.process} (pid {leader.offer.pid}), which loads the batches of rank {self._group.process}"

    # Starting and stopping --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait until the rank that loads has built the dataset.

        Raises:
            RankDied: It has ended, or couldn't build it.
            LoaderClosed: Another thread closed this loader.
        """

        def is_known() -> bool:
            return self._welcome is not None or self._end is not None

        if not self._of_loop.block_until(is_known, self._options.stall_warning_s) and self._signal >= 0:
            if self._options.stall_warning_s is not None:
                warn(f"{self._leader()}, hasn't built the dataset for {self._options.stall_warning_s:g} s so far")
            self._of_loop.block_until(is_known, None)
        if self._welcome is None:
            raise LoaderClosed("the loader was closed while it started") if self._end is None else self._end.error
        self._check_definitions(self._welcome)
        self._first_plan = plan = Plan.of(self._welcome.num_samples, self._spec.plan)
        self._explainer = Explainer(self._options, plan, self._definitions, 0.0)
        batches = BatchReader(self._definitions, self._options.batch_decoder)
        self._answers = Answers(batches, self._explainer, self._metrics, self._on_segment)
        self._post(Ready(_WORKER, _WORKER))

    def _check_definitions(self, welcome: Welcome) -> None:
        ours = self._definitions.names()
        if ours != welcome.definitions:
            if sorted(ours) != sorted(welcome.definitions) or len(set(ours)) < len(ours):
                raise DatasetMismatch(
                    f"{self._leader()}, sends the dataset with other classes and functions of the script: "
                    f"{', '.join(welcome.definitions)} there, {', '.join(ours)} here. Run the same script on both, or "
                    f"call start(share_batches=False)"
                )
            self._definitions = Definitions(self._definitions[ours.index(name)] for name in welcome.definitions)

    def stop(self) -> None:
        """Wake whoever waits in the loop's inbox. Any thread. Idempotent."""
        self._of_loop.wake()

    def close(self) -> list[Any]:
        """Free all resources. Batches that the user keeps stay valid. Idempotent."""
        with self._lock:
            self._stash.clear()
            self._tasks.clear()
            self._channel.close()
            for inbox in self.inboxes:
                assert isinstance(inbox, GroupInbox)
                inbox.close()
            self._pages.close()
            if self._signal >= 0:
                signal, self._signal = self._signal, -1  # first, see `Holder`
                os.close(signal)
        return list(self._memory.take_segments())

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
            self._stash.go_elsewhere()
        self._ring()

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Do nothing: the workers are those of another rank."""

    def carry_out(self, action: ToDo) -> list[Any]:
        """Keep a task for `collect`."""
        assert isinstance(action, Send), f"another rank can't be stopped or replaced: {action}"
        with self._lock:
            place = Place(self._plan_key, action.work.epoch, self._step_of(action))
            self._tasks.append((action, place))
            can_answer = len(self._tasks) == 1 and (self._end is not None or self._stash.has(place))
        if can_answer:
            self._ring()
        return []

    @staticmethod
    def _step_of(action: Send) -> int:
        step: int = action.work.step
        return step

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
        with self._lock:
            place = Place(self._plan_key, epoch, step)
            self._num_taken += 1
            self._stash.take(place)
            if self._num_taken % self._report_every:
                return
            released, retired, segments = self._memory.take_returned()
            self._send(Taken(self._num_taken, place, released, retired).pack())
        del segments  # outside the lock

    def tell_awaited(self) -> None:
        """Tell the rank that loads which batch the loop waits for."""
        with self._lock:
            if self._tasks:
                place = self._tasks[0][1]
                self._send(Awaited(self._num_taken, *place).pack())

    def _send(self, message: bytes) -> None:
        self._unsent.append(message)
        while self._unsent:
            try:
                self._channel.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:  # it is gone, which is noted elsewhere
                pass
            self._unsent.popleft()

    # The thread that leads --------------------------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        self._events.append(event)
        self._ring()

    def _ring(self) -> None:
        if self._signal >= 0:
            os.eventfd_write(self._signal, 1)

    def collect(self, inbox: GroupInbox) -> list[Event]:
        """Take in what has come, and return what it means."""
        if self._signal < 0:
            return []
        with suppress(BlockingIOError):
            os.eventfd_read(self._signal)
        if self._end is None:
            self._receive()
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        while (found := self._next_answer()) is not None:
            assert self._answers is not None
            events += self._answers.of(*found, inbox)
        if self._end is not None and not self._is_failed and (self._tasks or self._end.is_at_once):
            self._is_failed = True
            events.append(ExecutorFailed(self._end.error))
        return events

    def _next_answer(self) -> tuple[Send, Content] | None:
        with self._lock:
            if not self._tasks:
                return None
            task, place = self._tasks[0]
            stashed = self._stash.give(place)
            if stashed is None:
                return None
            self._tasks.popleft()
            return task, stashed.content

    def _receive(self) -> None:
        """Take in all messages that have come."""
        try:
            while (received := self._channel.receive(wait=False)) is not None:
                self._note(received)
                if self._end is not None:
                    break
        except BlockingIOError:
            return
        except SwiftLoaderError as error:
            self._end = _End(error)
        except OSError:
            if self._channel.fileno() < 0:  # another thread closed it
                return
            raise
        if self._end is None:
            self._end = _End(RankDied(f"{self._leader()}, has ended"))
        for other in self.inboxes:
            assert isinstance(other, GroupInbox)
            other.unwatch(self._channel.fileno())

    def _note(self, received: Received) -> None:
        frame = unpack_frame(received.data)
        if frame.kind is Kind.PUSH:
            self._note_push(Push.unpack(frame))
        elif frame.kind is Kind.SEGMENT and len(received.descriptors) == 1:
            made = SegmentMade.unpack(frame)
            is_private = self._on_segment is None  # page-locked memory is only read
            segment = Segment.attach(received.descriptors[0], made.nbytes, private=is_private)
            if is_private:
                segment.renew = self._pages.restore
            self._memory.add(made.slot, segment)
            if self._on_segment is not None:
                self._on_segment(segment)
        elif frame.kind is Kind.SEGMENT_GONE:
            with suppress(ProtocolError):  # it was retired here
                self._memory.drop(SegmentGone.unpack(frame).slot)
        elif frame.kind is Kind.DROPPED:
            with self._lock:
                self._stash.drop(Dropped.unpack(frame))
        elif frame.kind is Kind.WELCOME:
            self._welcome = Welcome.unpack(frame)
        elif frame.kind is Kind.ENDED:
            self._end = self._error_of_end(Ended.unpack(frame))
        else:
            raise ProtocolError(f"{self._leader()}, sent an unexpected message: {frame.kind.name}")

    def _note_push(self, push: Push) -> None:
        frames = [bytes(frame) for frame in push.frames]
        last = unpack_frame(memoryview(frames[-1]))
        content = Content(frames, push.worker_id, push.pid)
        if last.kind is Kind.BATCH:
            batch = Batch.unpack(last)
            content.segment = self._memory.segment_of(batch)
            content.memory, content.lease, content.held = self._memory.share(batch)
        with self._lock:
            self._stash.add(Stashed(push.place, push.generation, content))

    def _error_of_end(self, ended: Ended) -> _End:
        if ended.why in _ERRORS:
            return _End(_ERRORS[ended.why](ended.text))
        what = f"stopped: {ended.text}" if ended.why is End.FAILED else "has closed its loader"
        return _End(RankDied(f"{self._leader()}, {what}"), is_at_once=False)

    def __repr__(self) -> str:
        return f"<GroupFollower of rank {self._group.leader.process}, {self._stash!r}>"


@dataclass(frozen=True, slots=True)
class _End:
    """Why no more batches come."""

    error: SwiftLoaderError
    is_at_once: bool = True
    """False: the loop gets the error in place of the first batch that isn't here."""
