"""The connection of a rank that shares batches to the rank that loads them.

receive ◄── WELCOME, SEGMENT, PUSH, DROPPED, ENDED          the thread that leads; batches go to the stash
note_taken ──TAKEN, with free slots──►                      the loop's thread
tell_awaited ──AWAITED──►
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from swift_loader.errors import (
    DatasetMismatch,
    ProtocolError,
    RankDied,
    RankMismatch,
    RankStalled,
    SwiftLoaderError,
)
from swift_loader.executors.group.answers import Content
from swift_loader.executors.group.messages import Awaited, BatchId, Dropped, End, Ended, Push, Taken, Welcome
from swift_loader.executors.group.stash import Stash, Stashed
from swift_loader.executors.process.forks import FORKS
from swift_loader.executors.process.memory import WorkerMemory
from swift_loader.ranks.group import Group
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.channel import Channel
from swift_loader.transport.frames import Frame, Kind, Received, unpack_frame
from swift_loader.transport.messages import Batch, SegmentGone, SegmentMade
from swift_loader.transport.private_pages import PrivatePages
from swift_loader.transport.segments import Segment

__all__ = ["Closing", "LeaderLink"]

_MANY = 1 << 30

_REPORTS = 4
"""So many times while as many batches as may be in flight are taken, the rank that loads hears of them."""

_ERRORS = {End.MISMATCH: RankMismatch, End.STALLED: RankStalled}


@dataclass(frozen=True, slots=True)
class Closing:
    """Why no more batches come."""

    error: SwiftLoaderError
    is_at_once: bool = True
    """False: the loop gets the error in place of the first batch that isn't here."""


class LeaderLink:
    """The rank that loads, as one that shares its batches sees it.

    It shares the lock of the `GroupFollower`. With a lock of its own, a signal handler that closes the loader could
    wait for the follower's lock on the thread that holds this one, and its holder for this one.
    """

    def __init__(
        self,
        group: Group,
        channel: Channel,
        lock: threading.RLock,
        max_in_flight: int,
    ) -> None:
        """Begin before the first message.

        Args:
            group: The ranks.
            channel: To the one that loads. This object owns it.
            lock: Guards the stash, and what is sent. The methods take it.
            max_in_flight: How many batches this rank's scheduler asks for ahead of its loop.
        """
        self.welcome: Welcome | None = None
        """What is known of the dataset; None until it is built."""
        self.end: Closing | None = None
        """Why no more batches come; None while they do."""
        self._group = group
        self._channel = channel
        self._lock = lock
        self._stash = Stash()
        self._memory = WorkerMemory(_MANY)
        """Of the workers of the rank that loads, by segment number."""
        try:
            self._pages = PrivatePages()
        except BaseException:
            channel.close()
            raise
        self._unsent: deque[bytes] = deque()
        """What didn't fit into the socket."""
        self._num_taken = 0
        self._report_every = max(1, max_in_flight // _REPORTS)
        FORKS.keep_from_children(channel)

    def descriptors(self) -> list[int]:
        """Return the descriptors that it owns; -1 once closed. Needs no lock."""
        return [self._channel.fileno(), self._pages.fileno()]

    def fileno(self) -> int:
        """Return the descriptor to watch for `receive`; -1 once closed. Needs no lock."""
        return self._channel.fileno()

    @property
    def name(self) -> str:
        """Who the rank is, for a message."""
        leader = self._group.leader
        return f"rank {leader.process} (pid {leader.offer.pid}), which loads the batches of rank {self._group.process}"

    def in_order(self, ours: Definitions) -> Definitions:
        """Return what travels by value, in the order of the rank that loads, whose messages name it by number.

        Raises:
            DatasetMismatch: It isn't the same there.
        """
        assert self.welcome is not None, "the dataset isn't built"
        here, there = ours.names(), self.welcome.definitions
        if here == there:
            return ours
        if sorted(here) != sorted(there) or len(set(here)) < len(here):
            raise DatasetMismatch(
                f"{self.name}, sends the dataset with other classes and functions of the script: {', '.join(there)} "
                f"there, {', '.join(here)} here. Run the same script on both, or call start(share_batches=False)"
            )
        return Definitions(ours[here.index(name)] for name in there)

    # The batches that are here ----------------------------------------------------------------------------------------

    def has(self, batch_id: BatchId) -> bool:
        """Return whether `give` would return a batch."""
        with self._lock:
            return self._stash.has(batch_id)

    def give(self, batch_id: BatchId) -> Content | None:
        """Return this batch, or what came instead; None if it isn't here."""
        with self._lock:
            stashed = self._stash.give(batch_id)
        if stashed is None:
            return None
        content: Content = stashed.content
        if stashed.num_given > 1:  # it was decoded, and maybe moved to a device by the user's function
            content.restore()
        return content

    def go_elsewhere(self) -> None:
        """Note that the loop goes elsewhere, and may ask again for what it was given and hasn't taken."""
        with self._lock:
            self._stash.go_elsewhere()

    # Sending; the loop's thread ---------------------------------------------------------------------------------------

    def note_taken(self, batch_id: BatchId) -> None:
        """Note that the loop takes a batch, and give slots back."""
        with self._lock:
            self._num_taken += 1
            self._stash.take(batch_id)
            if self._num_taken % self._report_every:
                return
            released, retired, segments = self._memory.take_returned()
            self._send(Taken(self._num_taken, batch_id, released, retired).pack())
        del segments  # outside the lock

    def tell_awaited(self, batch_id: BatchId) -> None:
        """Tell the rank that loads which batch the loop waits for."""
        with self._lock:
            self._send(Awaited(self._num_taken, *batch_id).pack())

    def _send(self, message: bytes) -> None:
        """Send what there is room for. The rest goes with the next message. The caller holds the lock."""
        self._unsent.append(message)
        while self._unsent:
            try:
                self._channel.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:  # it is gone, which is noted elsewhere
                pass
            self._unsent.popleft()

    # Receiving; the thread that leads ---------------------------------------------------------------------------------

    def receive(self) -> None:
        """Take in all messages that have come. Afterwards `end` tells whether more may come. Doesn't block."""
        try:
            while (received := self._channel.receive(wait=False)) is not None:
                self._note(received)
                if self.end is not None:
                    break
        except BlockingIOError:
            return
        except SwiftLoaderError as error:
            self.end = Closing(error)
        except OSError:
            if self._channel.fileno() < 0:  # another thread closed it
                return
            raise
        if self.end is None:
            self.end = Closing(RankDied(f"{self.name}, has ended"))

    def _note(self, received: Received) -> None:
        descriptors = received.descriptors
        try:
            self._note_frame(unpack_frame(received.data), descriptors)
        finally:
            for descriptor in descriptors:  # those that no message needs
                os.close(descriptor)

    def _note_frame(self, frame: Frame, descriptors: list[int]) -> None:
        """Take in a message. Removes the descriptors that it uses from the list."""
        if frame.kind is Kind.PUSH:
            self._note_push(Push.unpack(frame))
        elif frame.kind is Kind.SEGMENT and len(descriptors) == 1:
            self._note_segment(SegmentMade.unpack(frame), descriptors.pop())
        elif frame.kind is Kind.SEGMENT_GONE:
            with suppress(ProtocolError):  # it was retired here
                self._memory.drop(SegmentGone.unpack(frame).slot)
        elif frame.kind is Kind.DROPPED:
            with self._lock:
                self._stash.drop(Dropped.unpack(frame))
        elif frame.kind is Kind.WELCOME:
            self.welcome = Welcome.unpack(frame)
        elif frame.kind is Kind.ENDED:
            self.end = self._closing_of(Ended.unpack(frame))
        else:
            raise ProtocolError(f"{self.name}, sent an unexpected message: {frame.kind.name}")

    def _note_segment(self, made: SegmentMade, descriptor: int) -> None:
        segment = Segment.attach(descriptor, made.nbytes, private=True)
        segment.renew = self._pages.restore
        self._memory.add(made.slot, segment)

    def _note_push(self, push: Push) -> None:
        frames = [bytes(frame) for frame in push.frames]
        last = unpack_frame(memoryview(frames[-1]))
        content = Content(frames, push.worker_id, push.pid)
        if last.kind is Kind.BATCH:
            batch = Batch.unpack(last)
            content.segment = self._memory.segment_of(batch)
            content.memory, content.lease, content.held = self._memory.share(batch)
        with self._lock:
            self._stash.add(Stashed(push.batch_id, push.generation, content))

    def _closing_of(self, ended: Ended) -> Closing:
        if ended.why in _ERRORS:
            return Closing(_ERRORS[ended.why](ended.text))
        what = f"stopped: {ended.text}" if ended.why is End.FAILED else "has closed its loader"
        return Closing(RankDied(f"{self.name}, {what}"), is_at_once=False)

    # Stopping ---------------------------------------------------------------------------------------------------------

    def close(self) -> list[Segment]:
        """Free all resources. Batches that the user keeps stay valid. Idempotent.

        Returns:
            What the caller drops outside the lock.
        """
        with self._lock:
            self._stash.clear()
            self._channel.close()
            self._pages.close()
        return self._memory.take_segments()

    def __repr__(self) -> str:
        return f"<LeaderLink to rank {self._group.leader.process}, {self._stash!r}>"
