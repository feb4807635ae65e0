"""The trainer's handle on one worker: its channel, its process, and the memory it announced.

Messages are taken in by one thread at a time; tasks are sent by whichever thread has the engine's dispatch lock.
"""

from __future__ import annotations

import errno
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.engine.lease import LeaseBook
from swift_loader.engine.ledger import Assignment
from swift_loader.engine.template import WorkerProcess
from swift_loader.errors import ProtocolError
from swift_loader.plan import PlanSettings
from swift_loader.transport.board import NUM_BEGUN, NUM_LEFT_OUT, Board
from swift_loader.transport.channel import Channel
from swift_loader.transport.codec import decode, decode_bytes
from swift_loader.transport.definitions import Definitions
from swift_loader.transport.descriptors import why_there_are_none
from swift_loader.transport.frames import Frame, Kind
from swift_loader.transport.messages import (
    MAX_SLOTS_PER_TASK,
    NO_SLOT,
    UNKNOWN_ADDRESS,
    Batch,
    NewPlan,
    Ready,
    SegmentGone,
    SegmentMade,
    Task,
    Verify,
)
from swift_loader.transport.reports import BuildReport
from swift_loader.transport.segments import Segment

__all__ = ["BatchReader", "WorkerHandle"]

MAX_COPIED_BYTES = 1 << 16
"""A batch that is no larger is copied out at once if it lies in a slot that is far too large for it: a few µs."""

MIN_WASTE = 16
"""How many times as large as the batch such a slot is."""

_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.EBADF})
"""The worker has ended, or its channel was closed here."""


class BatchReader:
    """Turns what lies in a slot into a batch."""

    def __init__(self, definitions: Definitions, batch_decoder: Callable[[bytes], Any] | None) -> None:
        self._definitions = definitions
        self._batch_decoder = batch_decoder

    def read(self, batch: Batch, memory: NDArray[np.uint8]) -> Any:
        """Return the batch; its arrays are views of `memory`, unless the user's own decoder made it."""
        meta = memoryview(batch.meta)
        if batch.meta_nbytes and not meta:
            meta = memory[batch.meta_offset : batch.meta_offset + batch.meta_nbytes].data
            if len(meta) != batch.meta_nbytes:
                raise ProtocolError(f"a structure of {batch.meta_nbytes} bytes lies outside a slot of {len(memory)}")
        if self._batch_decoder is not None:
            return self._batch_decoder(decode_bytes(meta, memory))
        return decode(meta, batch.num_blocks, memory, self._definitions)


class WorkerHandle:
    """One worker, seen from the trainer."""

    def __init__(
        self, place: int, serial: int, channel: Channel, process: WorkerProcess, reader: BatchReader, keep: int
    ) -> None:
        self.place = place
        """Which of the n workers it is; one that follows it has the same."""
        self.serial = serial
        """Which of all the processes of the pool it is."""
        self.process = process
        self.channel = channel
        self._reader = reader
        self._max_segments = keep
        """Segments that a worker needs at most when the user keeps nothing; more of them are given back."""
        self._segments: dict[int, Segment] = {}
        self._leases = LeaseBook()
        self._new_plan: NewPlan | None = None
        """What the worker has to be told before its next task."""
        self._sent_s: deque[float] = deque()
        """When the tasks were sent that aren't answered yet."""
        self._answered_s = 0.0
        self._num_answered = 0
        self._length_address = UNKNOWN_ADDRESS
        self._board: Board | None = None
        self.suspected: list[int] | None = None
        """Dataset indices of samples that differ from those of an earlier build, until the worker has said why; None
        before it is ready. It gets no task meanwhile."""

    @property
    def busy_since_s(self) -> float:
        """When it got to the task that it is at, by `time.monotonic`; infinite if it has none."""
        sent_s = self._sent_s
        try:
            return max(sent_s[0], self._answered_s)
        except IndexError:
            return math.inf

    def postpone(self, seconds: float) -> None:
        """Count its tasks as sent so much later: the trainer was stopped, and perhaps the worker, too."""
        self._answered_s += seconds
        for _ in range(len(self._sent_s)):
            self._sent_s.append(self._sent_s.popleft() + seconds)

    def note_answer(self) -> None:
        """Take note that it is through with its oldest task."""
        self._answered_s = time.monotonic()
        self._num_answered += 1
        if self._sent_s:
            self._sent_s.popleft()

    @property
    def is_ready(self) -> bool:
        """Whether it takes tasks."""
        return self.suspected == []

    def note_ready(self, frame: Frame, descriptors: list[int]) -> BuildReport:
        """Take note of where it shows how far it is; return what it says of its dataset."""
        ready = Ready.unpack(frame)
        self._length_address = ready.length_address
        self._board = Board.attach(_only(descriptors, "a board"))
        return ready.report

    def ask_to_verify(self, suspected: list[int]) -> None:
        """Have it find out why these samples may differ from those of another build."""
        self.suspected = suspected
        self._send(Verify().pack())

    @property
    def is_at_work(self) -> bool:
        """Whether it has begun its oldest task; true also after its death."""
        return self._board is not None and self._board.words[NUM_BEGUN] > self._num_answered

    def position_in_batch(self) -> int | None:
        """Return the place, in the batch as planned, of the sample that it fetches; None if that can't be found out.

        After the last sample, it is the number of samples. Read from the worker's memory, where the kernel allows it.
        """
        num_left_out = -1 if self._board is None else self._board.words[NUM_LEFT_OUT]
        if num_left_out < 0 or self._length_address == UNKNOWN_ADDRESS:
            return None
        try:
            with open(f"/proc/{self.process.pid}/mem", "rb", buffering=0) as memory:
                length = int.from_bytes(os.pread(memory.fileno(), 8, self._length_address), sys.byteorder)
        except OSError:
            return None
        return length + num_left_out

    def add_segment(self, frame: Frame, descriptors: list[int]) -> Segment:
        """Map memory that the worker announced, and return it."""
        made = SegmentMade.unpack(frame)
        segment = self._segments[made.slot] = Segment.attach(_only(descriptors, "a segment"), made.nbytes)
        return segment

    def drop_segment(self, frame: Frame) -> None:
        """Unmap memory that the worker doesn't use any more."""
        slot = SegmentGone.unpack(frame).slot
        if self._segments.pop(slot, None) is None:
            raise ProtocolError(f"slot {slot} was given up, which is unknown")

    def lend(self, batch: Batch) -> NDArray[np.uint8]:
        """Return the memory of a batch; its slot is in use for as long as there are views of it."""
        if batch.slot == NO_SLOT:
            return np.empty(0, np.uint8)
        segment = self._segments.get(batch.slot)
        if segment is None:
            raise ProtocolError(f"a batch was announced in slot {batch.slot}, which is unknown")
        used = min(batch.used_nbytes, segment.nbytes) or segment.nbytes
        if (used <= MAX_COPIED_BYTES and used * MIN_WASTE <= segment.nbytes) or self._leases.is_full:
            copied: NDArray[np.uint8] = segment.array()[:used].copy()
            self._leases.end(batch.slot)
            return copied
        return self._leases.begin(batch.slot, segment, used)

    def decode(self, batch: Batch, memory: NDArray[np.uint8]) -> Any:
        """Return a batch as the user gets it: views of the memory that was lent to it."""
        return self._reader.read(batch, memory)

    def discard(self, batch: Batch) -> None:
        """Give back the slot of a batch that nobody wants."""
        if batch.slot != NO_SLOT:
            self._leases.end(batch.slot)

    def send(self, assignment: Assignment, kind: Kind = Kind.TASK) -> None:
        """Send a task, and with it the slots that have become free; a worker that is gone is noticed elsewhere."""
        released, retired = self._returned_slots()
        if self._new_plan is not None:  # not before: else seeking often would fill the pipe of a worker that is busy
            self._send(self._new_plan.pack())
            self._new_plan = None
        _, generation, sequence, epoch, step = assignment
        self._sent_s.append(time.monotonic())
        self._send(Task(generation, sequence, epoch, step, released, retired).pack(kind))

    def _returned_slots(self) -> tuple[list[int], list[int]]:
        """Return the slots that the worker gets back, and those that it is to give up as they are given up here."""
        retired = self._leases.take_shared(MAX_SLOTS_PER_TASK)
        for slot in retired:
            del self._segments[slot]
        ended = self._leases.take_ended(MAX_SLOTS_PER_TASK - len(retired))
        num_surplus = len(self._segments) - self._max_segments
        if num_surplus > 0:
            # The smallest ones: the worker can use a large one for any batch.
            for slot in sorted(ended, key=lambda slot: self._segments[slot].nbytes)[:num_surplus]:
                ended.remove(slot)
                retired.append(slot)
                del self._segments[slot]
        return ended, retired

    def follow(self, generation: int, plan: PlanSettings) -> None:
        """Have the tasks from this generation on follow another plan."""
        self._new_plan = NewPlan(generation, plan)

    def _send(self, frame: bytes) -> None:
        try:
            self.channel.send(frame)
        except OSError as error:
            if error.errno not in _GONE:
                raise

    def ask_for_stacks(self, *, by_force: bool = False) -> str:
        """Return the Python stacks of all its threads, or why there are none; see `Witness.ask_for_stacks`."""
        return self.process.witness.ask_for_stacks(self.process.pid, self.process.pidfd, by_force=by_force)

    def close(self) -> None:
        """Give everything back; the process must have ended. Batches the user still has stay valid. Idempotent."""
        self.channel.close()
        self.process.close()
        self._segments.clear()
        self._board = None

    def describe(self, num_workers: int, rank: int) -> str:
        """Return who this is, for an error."""
        return f"worker {self.place} of {num_workers} (rank {rank}, pid {self.process.pid})"

    def __repr__(self) -> str:
        return f"<WorkerHandle {self.serial} in place {self.place}, pid {self.process.pid}, {self._leases!r}>"


def _only(descriptors: list[int], what: str) -> int:
    """Return the descriptor that came with a message.

    Raises:
        NoDescriptorsLeft: None came: the kernel drops those that the receiver has no room for.
    """
    if not descriptors:
        raise why_there_are_none()
    if len(descriptors) != 1:
        raise ProtocolError(f"{what} was announced with {len(descriptors)} descriptors")
    return descriptors[0]
