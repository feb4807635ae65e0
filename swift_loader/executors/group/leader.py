"""The side of the rank that loads: it hands each batch on to the ranks that share it.

    receiving thread ──publish──► sockets of the other ranks          the slot is kept until all have released it
    this thread ◄── TAKEN, AWAITED ── the other ranks                 drops what they have released
    loop's thread: await_others, note_taken

Guarantees: it never waits for another rank while it publishes. It is at most `max_ahead` batches ahead of the slowest
rank: `await_others` blocks until that one has caught up, or is gone.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swift_loader.errors import LoaderClosed, RankMismatch, RankStalled, SwiftLoaderError
from swift_loader.executors.group.messages import Awaited, Dropped, End, Ended, Place, Push, Taken, Welcome, key_of
from swift_loader.executors.group.steps import Steps
from swift_loader.executors.handle import AnyHandle
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.lease import LeasedMemory
from swift_loader.notices import warn
from swift_loader.ranks.group import Group
from swift_loader.sampling.plan import PlanSettings
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.channel import Channel
from swift_loader.transport.descriptors import duplicate, new_epoll, new_eventfd
from swift_loader.transport.frames import Kind, unpack_frame
from swift_loader.transport.messages import NO_SLOT, Batch, SegmentGone, SegmentMade
from swift_loader.transport.private_pages import PrivatePages
from swift_loader.transport.segments import Segment

__all__ = ["GroupLeader"]

_FLUSH_LIMIT_S = 1.0
"""How long `close` tries to hand on what doesn't fit into the sockets."""

_JOIN_LIMIT_S = 1.0


@dataclass(slots=True)
class _Follower:
    """A rank that shares the batches."""

    process: int
    channel: Channel
    held: dict[int, LeasedMemory] = field(default_factory=dict)
    """What it hasn't released, by segment number."""
    backlog: deque[tuple[bytes, list[int]]] = field(default_factory=deque)
    """Messages that didn't fit into the socket, with descriptors that this object owns."""


class GroupLeader:
    """Hands the batches of one loader on to other ranks."""

    def __init__(self, group: Group, channels: Mapping[int, Channel], plan: PlanSettings, max_ahead: int) -> None:
        """Start the thread that listens to the other ranks.

        Args:
            group: The ranks.
            channels: To each of them, by rank. This object owns them.
            plan: Of generation 0.
            max_ahead: How many batches the loop may be ahead of the slowest rank.
        """
        self.max_ahead = max_ahead
        self.on_awaited: Callable[[], None] = _do_nothing
        """Called when another rank waits for a batch. The thread of this object calls it."""
        self._group = group
        self._changed = threading.Condition(threading.RLock())  # reentrant: a finaliser may run at any point
        """Guards all that follows."""
        self._followers = {process: _Follower(process, channel) for process, channel in channels.items()}
        self._steps = Steps(list(channels))
        self._keys = {0: key_of(plan)}
        """By generation: the key of its plan."""
        self._generation = 1
        self._numbers: dict[int, int] = {}
        """The number of each segment, by the id of the object."""
        self._num_segments = 0
        self._gone: deque[int] = deque()
        """Segments that were unmapped. Any thread appends, also in a finaliser."""
        self._failures: dict[int, list[bytes]] = {}
        """Messages about samples that failed in a worker's next batch, by the worker's serial number."""
        self._error: SwiftLoaderError | None = None
        self._is_closed = False
        self._pages = PrivatePages()
        self._epoll = new_epoll()
        self._wake = new_eventfd()
        FORKS.holders.add(self)
        self._epoll.register(self._wake, select.EPOLLIN)
        for follower in self._followers.values():
            FORKS.keep_from_children(follower.channel)
            self._epoll.register(follower.channel.fileno(), select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="swift_loader-group", daemon=True)
        self._thread.start()

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; -1 once closed."""
        channels = [follower.channel.fileno() for follower in list(self._followers.values())]
        return [self._wake, self._pages.fileno(), -1 if self._epoll.closed else self._epoll.fileno(), *channels]

    # What the workers send; whichever thread receives -----------------------------------------------------------------

    def welcome(self, num_samples: int, definitions: Definitions) -> None:
        """Tell the other ranks that the dataset is built."""
        message = Welcome(num_samples, definitions.names()).pack()
        with self._changed:
            self._send_all(message)

    def map(self, descriptor: int, nbytes: int, *, private: bool) -> Segment:
        """Map the memory of a worker, and hand it on. The descriptor is owned by this call."""
        with self._changed:
            self._num_segments = number = self._num_segments + 1
            message = SegmentMade(number, nbytes).pack()
            for follower in list(self._followers.values()):
                self._send(follower, message, descriptor)
            segment = Segment.attach(descriptor, nbytes, private=private)
            if private:
                segment.renew = self._pages.restore
            self._numbers[id(segment)] = number
            weakref.finalize(segment, self._note_end_of_segment, id(segment), number).atexit = False
        return segment

    def note_failed_sample(self, worker: AnyHandle, frame: bytes) -> None:
        """Keep a worker's message about a sample until its batch comes."""
        self._failures.setdefault(worker.serial, []).append(frame)

    def publish_batch(
        self, worker: AnyHandle, batch: Batch, segment: Segment | None, held: LeasedMemory | None
    ) -> None:
        """Hand a worker's batch on, see `Publisher`."""
        number = NO_SLOT if segment is None else self._numbers[id(segment)]
        slot, batch.slot = batch.slot, number
        frame = batch.pack()
        batch.slot = slot
        self._publish(worker, batch.generation, frame, number, held)

    def publish_failure(self, worker: AnyHandle, generation: int, frame: bytes) -> None:
        """Hand on a worker's failure, see `Publisher`."""
        self._publish(worker, generation, frame, NO_SLOT, None)

    def _publish(
        self, worker: AnyHandle, generation: int, frame: bytes, number: int, held: LeasedMemory | None
    ) -> None:
        frames = [*self._failures.pop(worker.serial, ()), frame]
        if not worker.tasks:
            return
        work = worker.tasks[0].work
        place = Place(self._keys[generation], work.epoch, work.step)
        message = Push(place, max(1, generation), worker.worker_id, worker.process.pid, frames).pack()
        with self._changed:
            self._tell_of_gone()
            for follower in list(self._followers.values()):
                if held is not None:
                    follower.held[number] = held
                self._send(follower, message)

    # The loop's thread ------------------------------------------------------------------------------------------------

    def use_plan(self, generation: int, plan: PlanSettings) -> None:
        """Note that the loop goes elsewhere: it won't take what was built before."""
        with self._changed:
            before = self._generation
            self._keys = {0: self._keys[0], before: self._keys.get(before, 0), generation: key_of(plan)}
            self._generation = generation
            if generation > 1:
                last = self._steps.last
                self._send_all(Dropped(generation, *((-1, -1) if last is None else last[1:])).pack())

    def note_taken(self, epoch: int, step: int) -> None:
        """Note that the loop takes a batch."""
        with self._changed:
            place = Place(self._keys[self._generation], epoch, step)
            other = self._steps.take(place)
            if other is not None:
                self._end_for_mismatch(other[0], other[1], place)

    @property
    def may_go_on(self) -> bool:
        """Whether `await_others` would return at once."""
        with self._changed:
            return self._error is None and not self._is_ahead()

    def await_others(self, stall_warning_s: float | None, timeout_s: float | None) -> None:
        """Wait until the slowest rank has caught up.

        Raises:
            RankMismatch: The ranks take different batches.
            RankStalled: It took longer than `timeout_s`.
            LoaderClosed: Another thread closed the loader.
        """
        if self.may_go_on:
            return
        began_s, has_warned = time.monotonic(), False
        with self._changed:
            while self._error is None and not self._is_closed and self._is_ahead():
                waited_s = time.monotonic() - began_s
                if timeout_s is not None and waited_s >= timeout_s:
                    self._end(End.STALLED, RankStalled(f"{self._waiting()} for longer than timeout={timeout_s:g} s"))
                    break
                if stall_warning_s is not None and waited_s >= stall_warning_s and not has_warned:
                    has_warned = True
                    warn(f"{self._waiting()} for {waited_s:.1f} s now")
                limits_s = [timeout_s, None if has_warned else stall_warning_s]
                self._changed.wait(
                    min((limit_s - waited_s for limit_s in limits_s if limit_s is not None), default=None)
                )
            if self._error is not None:
                raise self._error
            if self._is_closed:
                raise LoaderClosed("the loader was closed; make a new one")

    def _is_ahead(self) -> bool:
        slowest = self._steps.slowest()
        return slowest is not None and slowest[1] >= self.max_ahead

    def _waiting(self) -> str:
        slowest = self._steps.slowest()
        assert slowest is not None
        last = self._steps.last
        at = "" if last is None else f" after {last.text}"
        return (
            f"rank {self._group.process} loads for rank {slowest[0]}, too, at most {self.max_ahead} batches ahead "
            f"(data_queue_size). It is so far ahead now{at}, and has waited for rank {slowest[0]}"
        )

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that no more batches come."""
        with self._changed:
            self._send_all(Ended(End.FAILED, f"{type(error).__name__}: {error}").pack())

    def _end_for_mismatch(self, process: int, theirs: Place, ours: Place) -> None:
        number = self._steps.num_taken
        text = (
            f"ranks {self._group.process} and {process} share batches, but don't take the same ones: of the first "
            f"{number}, rank {self._group.process} has taken {ours.text} where rank {process} takes {theirs.text}"
        )
        if theirs[1:] == ours[1:]:
            text += ", of another order or with other samples skipped"
        hint = (
            "Let all ranks with the same data break, skip and load states at the same batches; or call "
            "start(share_batches=False), so that each loads its own"
        )
        self._end(End.MISMATCH, RankMismatch(f"{text}. {hint}"))

    def _end(self, why: End, error: SwiftLoaderError) -> None:
        if self._error is None:
            self._error = error
            self._send_all(Ended(why, str(error)).pack())
            self._changed.notify_all()

    # Sending; the caller holds the lock -------------------------------------------------------------------------------

    def _tell_of_gone(self) -> None:
        while self._gone:
            self._send_all(SegmentGone(self._gone.popleft()).pack())

    def _send_all(self, message: bytes) -> None:
        for follower in list(self._followers.values()):
            self._send(follower, message)

    def _send(self, follower: _Follower, message: bytes, descriptor: int | None = None) -> None:
        """Send a message, or keep it until there is room in the socket."""
        descriptors = [] if descriptor is None else [descriptor]
        if not follower.backlog and self._try_send(follower, message, descriptors):
            return
        follower.backlog.append((message, [duplicate(number) for number in descriptors]))
        if len(follower.backlog) == 1 and follower.channel.fileno() >= 0:
            self._epoll.modify(follower.channel.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _try_send(self, follower: _Follower, message: bytes, descriptors: Sequence[int]) -> bool:
        """Return False if there is no room. If the rank is gone, its end is noted elsewhere."""
        try:
            follower.channel.send(message, descriptors)
        except BlockingIOError:
            return False
        except OSError:  # it is gone
            return True
        return True

    def _flush(self, follower: _Follower) -> None:
        while follower.backlog:
            message, descriptors = follower.backlog[0]
            if not self._try_send(follower, message, descriptors):
                return
            follower.backlog.popleft()
            _close_all(descriptors)
        if follower.channel.fileno() >= 0 and not self._epoll.closed:
            self._epoll.modify(follower.channel.fileno(), select.EPOLLIN)

    # This object's thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            ready = self._epoll.poll()
            is_awaited = False
            with self._changed:
                if self._is_closed:
                    return
                by_descriptor = {follower.channel.fileno(): follower for follower in self._followers.values()}
                for descriptor, events in ready:
                    follower = by_descriptor.get(descriptor)
                    if follower is None:
                        continue
                    if events & select.EPOLLOUT:
                        self._flush(follower)
                    if events & ~select.EPOLLOUT:
                        is_awaited |= self._receive(follower)
            if is_awaited:
                self.on_awaited()

    def _receive(self, follower: _Follower) -> bool:
        """Read what a rank has sent. Return whether it waits for a batch."""
        is_awaited = False
        try:
            while (received := follower.channel.receive(wait=False)) is not None:
                frame = unpack_frame(received.data)
                if frame.kind is Kind.TAKEN:
                    self._note_taken(follower, Taken.unpack(frame))
                else:
                    awaited, is_awaited = Awaited.unpack(frame), True
                    place = Place(awaited.plan, awaited.epoch, awaited.step)
                    ours = self._steps.expect(follower.process, awaited.num_taken, place)
                    if ours is not None:
                        self._end_for_mismatch(follower.process, place, ours)
        except BlockingIOError:
            return is_awaited
        except (OSError, SwiftLoaderError):
            pass
        self._forget(follower)
        return False

    def _note_taken(self, follower: _Follower, taken: Taken) -> None:
        for number in taken.retired:
            if (held := follower.held.get(number)) is not None:
                held.retire()
        for number in (*taken.released, *taken.retired):
            follower.held.pop(number, None)
        if taken.place.plan:
            ours = self._steps.note(follower.process, taken.num_taken, taken.place)
            if ours is not None:
                self._end_for_mismatch(follower.process, taken.place, ours)
        self._changed.notify_all()

    def _forget(self, follower: _Follower) -> None:
        """Go on without a rank that is gone."""
        self._followers.pop(follower.process, None)
        if follower.channel.fileno() >= 0 and not self._epoll.closed:
            self._epoll.unregister(follower.channel.fileno())
        follower.channel.close()
        follower.held.clear()
        while follower.backlog:
            _close_all(follower.backlog.popleft()[1])
        self._steps.forget(follower.process)
        self._changed.notify_all()

    def _note_end_of_segment(self, identity: int, number: int) -> None:
        """Note that a segment is unmapped. Any thread, also in a finaliser."""
        self._numbers.pop(identity, None)
        self._gone.append(number)

    def close(self) -> None:
        """Hand on what is left, and end the thread. Idempotent. Any thread."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._send_all(Ended(End.CLOSED, "").pack())
            deadline_s = time.monotonic() + _FLUSH_LIMIT_S
            for follower in list(self._followers.values()):
                self._flush_until(follower, deadline_s)
            self._changed.notify_all()
        os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_LIMIT_S)
        with self._changed:
            for follower in list(self._followers.values()):
                self._forget(follower)
            self._epoll.close()
            self._pages.close()
            wake, self._wake = self._wake, -1  # first, see `Holder`
            os.close(wake)

    def _flush_until(self, follower: _Follower, deadline_s: float) -> None:
        poll = select.poll()
        if follower.backlog:
            poll.register(follower.channel.fileno(), select.POLLOUT)
        while follower.backlog and poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            before = len(follower.backlog)
            self._flush(follower)
            if len(follower.backlog) == before:
                return

    def __repr__(self) -> str:
        return f"<GroupLeader of {len(self._followers)} other ranks, {self._steps!r}>"


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _do_nothing() -> None:
    pass
