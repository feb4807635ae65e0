"""The side of the rank that loads: it hands each batch on to the ranks that share it.

    receiving thread ──publish──► sockets of the other ranks          the slot is kept until all have released it
    this thread ◄── TAKEN, AWAITED ── the other ranks                 drops what they have released
    loop's thread: await_others, note_taken

Guarantees: it never waits for another rank while it publishes. It is at most `max_ahead` batches ahead of the slowest
rank: `await_others` blocks until that one has caught up, or is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from swift_loader.errors import LoaderClosed, RankMismatch, SwiftLoaderError
from swift_loader.executors.group.follower_link import FollowerLink
from swift_loader.executors.group.follower_links import FollowerLinks
from swift_loader.executors.group.messages import Awaited, BatchId, Dropped, End, Ended, Push, Taken, Welcome, key_of
from swift_loader.executors.group.pace import Pace
from swift_loader.executors.group.shared_segments import SharedSegments
from swift_loader.executors.handle import AnyHandle
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.lease import LeasedMemory
from swift_loader.notices import warn
from swift_loader.ranks.group import Group
from swift_loader.sampling.plan import PlanSettings
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.channel import Channel
from swift_loader.transport.frames import Kind
from swift_loader.transport.messages import NO_SLOT, Batch, SegmentGone, SegmentMade
from swift_loader.transport.segments import Segment

__all__ = ["GroupLeader"]

_FLUSH_LIMIT_S = 1.0
"""How long `close` tries to hand on what doesn't fit into the sockets."""

_JOIN_LIMIT_S = 1.0


class GroupLeader:
    """Hands the batches of one loader on to other ranks.

    Its one lock guards the links, the pace and the segments as well: their methods are called with it held.
    """

    def __init__(self, group: Group, channels: Mapping[int, Channel], plan: PlanSettings, max_ahead: int) -> None:
        """Start the thread that listens to the other ranks.

        Args:
            group: The ranks.
            channels: To each of them, by rank. This object owns them.
            plan: Of generation 0.
            max_ahead: How many batches the loop may be ahead of the slowest rank.
        """
        self.on_awaited: Callable[[], None] = lambda: None
        """Called when another rank waits for a batch. The thread of this object calls it, without the lock."""
        self._changed = threading.Condition(threading.RLock())  # reentrant: a finaliser may run at any point
        """Guards all that follows."""
        self._pace = Pace(group.process, channels, max_ahead)
        self._keys = {0: key_of(plan)}
        """By generation: the key of its plan."""
        self._generation = 1
        self._failures: dict[int, list[bytes]] = {}
        """Messages about samples that failed in a worker's next batch, by the worker's serial number."""
        self._error: SwiftLoaderError | None = None
        self._is_closed = False
        with ExitStack() as undo:
            self._followers = FollowerLinks(channels)
            undo.callback(self._followers.close)
            self._segments = SharedSegments()
            undo.callback(self._segments.close)
            FORKS.holders.add(self)
            self._thread = threading.Thread(target=self._run, name="swift_loader-group", daemon=True)
            self._thread.start()
            undo.pop_all()

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; -1 once closed."""
        return [self._segments.fileno(), *self._followers.descriptors()]

    # What the workers send; whichever thread receives -----------------------------------------------------------------

    def welcome(self, num_samples: int, definitions: Definitions) -> None:
        """Tell the other ranks that the dataset is built."""
        message = Welcome(num_samples, definitions.names()).pack()
        with self._changed:
            self._send_all(message)

    def map(self, descriptor: int, nbytes: int) -> Segment:
        """Map the memory of a worker, and hand it on. The descriptor is owned by this call."""
        with self._changed:
            number = self._segments.new_number()
            self._send_all(SegmentMade(number, nbytes).pack(), descriptor)
            return self._segments.attach(number, descriptor, nbytes)

    def note_failed_sample(self, worker: AnyHandle, frame: bytes) -> None:
        """Keep a worker's message about a sample until its batch comes."""
        self._failures.setdefault(worker.serial, []).append(frame)

    def publish_batch(
        self, worker: AnyHandle, batch: Batch, segment: Segment | None, held: LeasedMemory | None
    ) -> None:
        """Hand a worker's batch on, see `Publisher`."""
        number = self._segments.number_of(segment)
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
        key = self._keys.get(generation)
        if not worker.tasks or key is None:  # None: the loop has gone elsewhere twice since the message was read
            return
        work = worker.tasks[0].work
        batch_id = BatchId(key, work.epoch, work.step)
        message = Push(batch_id, max(1, generation), worker.worker_id, worker.process.pid, frames).pack()
        with self._changed:
            for gone in self._segments.take_gone():
                self._send_all(SegmentGone(gone).pack())
            for follower in self._followers.values():
                if held is not None:
                    follower.held[number] = held
                self._send(follower, message)

    def _send_all(self, message: bytes, descriptor: int | None = None) -> None:
        for follower in self._followers.values():
            self._send(follower, message, descriptor)

    def _send(self, follower: FollowerLink, message: bytes, descriptor: int | None = None) -> None:
        """Send a message. A rank without it would wait for ever, so if that fails, all get the error."""
        try:
            follower.send(message, descriptor)
        except OSError as error:
            self._fail(error)

    # The loop's thread ------------------------------------------------------------------------------------------------

    def use_plan(self, generation: int, plan: PlanSettings) -> None:
        """Note that the loop goes elsewhere: it won't take what was built before."""
        with self._changed:
            before = self._generation
            self._keys = {0: self._keys[0], before: self._keys.get(before, 0), generation: key_of(plan)}
            self._generation = generation
            if generation > 1:
                last = self._pace.last
                self._send_all(Dropped(generation, *((-1, -1) if last is None else last[1:])).pack())

    def note_taken(self, epoch: int, step: int) -> None:
        """Note that the loop takes a batch."""
        with self._changed:
            self._compare(self._pace.take(BatchId(self._keys[self._generation], epoch, step)))

    @property
    def may_go_on(self) -> bool:
        """Whether `await_others` would return at once."""
        with self._changed:
            return self._error is None and not self._pace.is_ahead

    def await_others(self, stall_warning_s: float | None, timeout_s: float | None) -> None:
        """Wait until the slowest rank has caught up.

        Raises:
            RankMismatch: The ranks take different batches.
            RankStalled: It took longer than `timeout_s`.
            LoaderClosed: Another thread closed the loader.
        """
        if self.may_go_on:
            return
        with self._changed:
            self._wait_for_slowest(stall_warning_s, timeout_s)
            if self._error is not None:
                raise self._error
            if self._is_closed:
                raise LoaderClosed("the loader was closed; make a new one")

    def _wait_for_slowest(self, stall_warning_s: float | None, timeout_s: float | None) -> None:
        """Return when it has caught up, or an error or the end of this object came first. The caller holds the lock."""
        began_s = time.monotonic()
        while self._error is None and not self._is_closed and self._pace.is_ahead:
            waited_s = time.monotonic() - began_s
            if timeout_s is not None and waited_s >= timeout_s:
                self._end(End.STALLED, self._pace.stalled(timeout_s))
                return
            if stall_warning_s is not None and waited_s >= stall_warning_s:
                stall_warning_s = None  # once
                warn(f"{self._pace.waiting()} for {waited_s:.1f} s now")
            limits_s = [limit_s - waited_s for limit_s in (timeout_s, stall_warning_s) if limit_s is not None]
            self._changed.wait(min(limits_s, default=None))

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that no more batches come."""
        with self._changed:
            self._send_all(Ended(End.FAILED, f"{type(error).__name__}: {error}").pack())

    def _compare(self, mismatch: RankMismatch | None) -> None:
        if mismatch is not None:
            self._end(End.MISMATCH, mismatch)

    def _end(self, why: End, error: SwiftLoaderError) -> None:
        """Give all ranks this error, once. The caller holds the lock."""
        if self._error is None:
            self._error = error
            self._send_all(Ended(why, str(error)).pack())
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """Give all ranks an error that says why no batches can be handed on. The caller holds the lock."""
        if self._error is not None:
            return
        if isinstance(error, SwiftLoaderError):
            self._error = error
        else:
            self._error = SwiftLoaderError(f"handing batches on to other ranks failed: {type(error).__name__}: {error}")
            self._error.__cause__ = error
        self.fail(self._error)
        self._changed.notify_all()

    # This object's thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closed:  # this thread may have closed it, in `on_awaited`
                self._listen()
        except Exception as error:  # without this thread, nobody hears the other ranks
            with self._changed:
                if not self._is_closed:
                    self._fail(error)

    def _listen(self) -> None:
        """Block until something comes, and take it in."""
        ready = self._followers.wait()
        with self._changed:
            if self._is_closed:
                return
            is_awaited = [self._receive(follower) for follower in self._followers.serve(ready)]
        if any(is_awaited):
            self.on_awaited()

    def _receive(self, follower: FollowerLink) -> bool:
        """Read what a rank has sent. Return whether it waits for a batch."""
        is_awaited = False
        try:
            while (frame := follower.receive()) is not None:
                if frame.kind is Kind.TAKEN:
                    taken = Taken.unpack(frame)
                    follower.give_back(taken)
                    if taken.batch_id.plan:
                        self._compare(self._pace.note(follower.process, taken.num_taken, taken.batch_id))
                    self._changed.notify_all()
                else:
                    awaited, is_awaited = Awaited.unpack(frame), True
                    batch_id = BatchId(awaited.plan, awaited.epoch, awaited.step)
                    self._compare(self._pace.expect(follower.process, awaited.num_taken, batch_id))
        except BlockingIOError:
            return is_awaited
        except (OSError, SwiftLoaderError):
            pass
        self._forget(follower)
        return False

    def _forget(self, follower: FollowerLink) -> None:
        """Go on without a rank that is gone."""
        self._followers.forget(follower)
        self._pace.forget(follower.process)
        self._changed.notify_all()

    def close(self) -> None:
        """Hand on what is left, and end the thread. Idempotent. Any thread."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._send_all(Ended(End.CLOSED, "").pack())
            self._followers.flush_until(time.monotonic() + _FLUSH_LIMIT_S)
            self._changed.notify_all()
        self._followers.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_LIMIT_S)
        with self._changed:
            self._followers.close()
            self._segments.close()

    def __repr__(self) -> str:
        return f"<GroupLeader of {len(self._followers)} other ranks, {self._pace!r}>"
