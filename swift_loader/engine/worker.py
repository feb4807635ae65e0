"""The trainer's handle on one worker: its channel, its process and its shared memory.

One thread at a time processes its messages. The thread that holds the engine's dispatch lock sends its tasks.
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

from swift_loader.engine.lease import LeaseBook, Loan
from swift_loader.engine.ledger import Assignment
from swift_loader.engine.template import WorkerProcess
from swift_loader.errors import ProtocolError
from swift_loader.inference_mode import is_inference_mode, ordinary_tensors
from swift_loader.plan import PlanSettings
from swift_loader.transport.board import NUM_BEGUN, NUM_LEFT_OUT, Board
from swift_loader.transport.channel import Channel
from swift_loader.transport.codec import decode, decode_bytes
from swift_loader.transport.definitions import Definitions
from swift_loader.transport.descriptors import why_there_are_none
from swift_loader.transport.frames import Frame
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
"""A batch up to this size is copied out at once if its slot is far too large for it. The copy takes a few µs."""

MIN_WASTE = 16
"""A slot is far too large if it is this many times as large as the batch."""

_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.EBADF})
"""Errors of a send to a worker that has ended, or whose channel was closed here."""


class BatchReader:
    """Decodes the contents of a slot into a batch."""

    def __init__(self, definitions: Definitions, batch_decoder: Callable[[bytes], Any] | None) -> None:
        self._definitions = definitions
        self._batch_decoder = batch_decoder

    def read(self, batch: Batch, memory: NDArray[np.uint8]) -> Any:
        """Return the batch. Its arrays are views of `memory`, unless the user's `batch_decoder` made it."""
        meta = memoryview(batch.meta)
        if batch.meta_nbytes and not meta:
            meta = memory[batch.meta_offset : batch.meta_offset + batch.meta_nbytes].data
            if len(meta) != batch.meta_nbytes:
                raise ProtocolError(
                    f"a structure of {batch.meta_nbytes} bytes lies outside a slot of {len(memory)} bytes"
                )
        if self._batch_decoder is not None:
            return self._batch_decoder(decode_bytes(meta, memory))
        return decode(meta, batch.num_blocks, memory, self._definitions)


class WorkerHandle:
    """One worker, seen from the trainer."""

    def __init__(
        self, place: int, serial: int, channel: Channel, process: WorkerProcess, reader: BatchReader, keep: int
    ) -> None:
        self.place = place
        """Which of the n workers it is, from 0. Its replacement has the same place."""
        self.serial = serial
        """Unique among all workers of the pool."""
        self.process = process
        self.channel = channel
        self._reader = reader
        self._max_segments = keep
        """How many segments a worker needs if the user keeps no batch. Free ones beyond this number are retired."""
        self._segments: dict[int, Segment] = {}
        self._leases = LeaseBook()
        self._new_plan: NewPlan | None = None
        """The plan to send before the next task."""
        self._sent_s: deque[float] = deque()
        """The times at which the unanswered tasks were sent."""
        self._answered_s = 0.0
        self._num_answered = 0
        self._length_address = UNKNOWN_ADDRESS
        self._board: Board | None = None
        self.suspected: list[int] | None = None
        """Dataset indices of samples that differ from those of an earlier build, until the worker has said why. It gets
        no task until then. None before it has reported its dataset."""

    @property
    def busy_since_s(self) -> float:
        """When it began its current task, by `time.monotonic`; infinite if it has none."""
        sent_s = self._sent_s
        try:
            return max(sent_s[0], self._answered_s)
        except IndexError:
            return math.inf

    def postpone(self, seconds: float) -> None:
        """Treat its tasks as sent this much later, because the trainer was stopped and perhaps the worker too."""
        self._answered_s += seconds
        for _ in range(len(self._sent_s)):
            self._sent_s.append(self._sent_s.popleft() + seconds)

    def note_answer(self) -> None:
        """Record that it has answered its oldest task."""
        self._answered_s = time.monotonic()
        self._num_answered += 1
        if self._sent_s:
            self._sent_s.popleft()

    @property
    def is_ready(self) -> bool:
        """Whether it takes tasks."""
        return self.suspected == []

    def note_ready(self, frame: Frame, descriptors: list[int]) -> BuildReport:
        """Attach its board, which shows its progress. Return its report on the dataset."""
        ready = Ready.unpack(frame)
        self._length_address = ready.length_address
        self._board = Board.attach(_only(descriptors, "a board"))
        return ready.report

    def ask_to_verify(self, suspected: list[int]) -> None:
        """Ask it why these samples differ from those of another build."""
        self.suspected = suspected
        self._send(Verify().pack())

    @property
    def is_at_work(self) -> bool:
        """Whether it has begun its oldest task. Still valid after its death."""
        return self._board is not None and self._board.words[NUM_BEGUN] > self._num_answered

    def position_in_batch(self) -> int | None:
        """Return the place, in the batch as planned, of the sample that it is fetching; None if it is unknown.

        After the last sample, it is the number of samples. It is read from the worker's memory, if the kernel allows.
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
        """Map a segment that the worker announced, and return it."""
        made = SegmentMade.unpack(frame)
        segment = self._segments[made.slot] = Segment.attach(_only(descriptors, "a segment"), made.nbytes)
        return segment

    def drop_segment(self, frame: Frame) -> None:
        """Unmap a segment that the worker doesn't use any more."""
        slot = SegmentGone.unpack(frame).slot
        if self._segments.pop(slot, None) is None:
            raise ProtocolError(f"a worker retired slot {slot}, which doesn't exist")

    def segment_of(self, batch: Batch) -> Segment | None:
        """Return the memory of a batch. None if the batch is so small that it is in the message."""
        if batch.slot == NO_SLOT:
            return None
        segment = self._segments.get(batch.slot)
        if segment is None:
            raise ProtocolError(f"a worker announced a batch in slot {batch.slot}, which doesn't exist")
        return segment

    def lend(self, batch: Batch) -> tuple[NDArray[np.uint8], Loan | None]:
        """Return the memory of a batch, and the loan of its slot. It lasts as long as a view of the memory exists."""
        segment = self.segment_of(batch)
        if segment is None:
            return np.empty(0, np.uint8), None
        used = min(batch.used_nbytes, segment.nbytes) or segment.nbytes
        if (used <= MAX_COPIED_BYTES and used * MIN_WASTE <= segment.nbytes) or self._leases.is_full:
            copied: NDArray[np.uint8] = segment.array()[:used].copy()
            self._leases.end(batch.slot)
            return copied, None
        memory = self._leases.begin(batch.slot, segment, used)
        return memory, self._leases.loan(batch.slot)

    def decode(self, batch: Batch, memory: NDArray[np.uint8]) -> Any:
        """Decode a batch for the user, as views of the memory from `lend`."""
        if not is_inference_mode():
            return self._reader.read(batch, memory)
        with ordinary_tensors():
            return self._reader.read(batch, memory)

    def discard(self, batch: Batch) -> None:
        """Free the slot of a batch that nobody needs any more."""
        if batch.slot != NO_SLOT:
            self._leases.end(batch.slot)

    def send(self, assignment: Assignment) -> list[Segment]:
        """Send a task with the slots that have become free. Does nothing if the worker is gone: `on_end` handles it.

        Returns:
            The memory of retired slots. Unlocking and unmapping it takes a while, so drop it where nobody waits.
        """
        released, retired, given_up = self._returned_slots()
        if self._new_plan is not None:  # only now: otherwise frequent seeks would fill the pipe of a busy worker
            self._send(self._new_plan.pack())
            self._new_plan = None
        _, generation, sequence, epoch, step = assignment
        self._sent_s.append(time.monotonic())
        self._send(Task(generation, sequence, epoch, step, None, released, retired).pack())
        return given_up

    def _returned_slots(self) -> tuple[list[int], list[int], list[Segment]]:
        """Return the slots that the worker may reuse, those that it must retire, and the memory of the latter."""
        retired = self._leases.take_shared(MAX_SLOTS_PER_TASK)
        given_up = [self._segments.pop(slot) for slot in retired]
        ended = self._leases.take_ended(MAX_SLOTS_PER_TASK - len(retired))
        for slot in self._surplus_of(ended) if len(self._segments) > self._max_segments else ():
            ended.remove(slot)
            retired.append(slot)
            given_up.append(self._segments.pop(slot))
        return ended, retired, given_up

    def _surplus_of(self, ended: list[int]) -> list[int]:
        """Return the slots to retire, of those that have come back.

        Retire the smallest ones, because a large slot fits any batch. Compare with all slots, because few come back
        together, often one. Slots that the loop holds don't count: in their place, the worker needs others.
        """
        taken = self._leases.taken
        num_surplus = len(self._segments) - len(taken) - self._max_segments
        if num_surplus <= 0:
            return []
        sizes = sorted(segment.nbytes for slot, segment in self._segments.copy().items() if slot not in taken)
        smallest = sorted(ended, key=lambda slot: self._segments[slot].nbytes)[:num_surplus]
        return [slot for slot in smallest if self._segments[slot].nbytes <= sizes[num_surplus - 1]]

    def follow(self, generation: int, plan: PlanSettings) -> None:
        """Use another plan for the tasks from this generation on. It is sent with the next task."""
        self._new_plan = NewPlan(generation, plan)

    def _send(self, frame: bytes) -> None:
        try:
            self.channel.send(frame)
        except OSError as error:
            if error.errno not in _GONE:
                raise

    def ask_for_stacks(self, *, by_force: bool = False) -> str:
        """Return the Python stacks of all its threads, or why there are none. See `Witness.ask_for_stacks`."""
        return self.process.witness.ask_for_stacks(self.process.pid, self.process.pidfd, by_force=by_force)

    def close(self) -> list[Segment]:
        """Close all handles. The process must have ended. Batches that the user keeps stay valid. Idempotent.

        Returns:
            The worker's memory, see `send`.
        """
        self.channel.close()
        self.process.close()
        given_up, self._segments = list(self._segments.values()), {}
        self._board = None
        return given_up

    def describe(self, num_workers: int, rank: int) -> str:
        """Return place, rank and pid of the worker, for messages."""
        return f"worker {self.place} of {num_workers} (rank {rank}, pid {self.process.pid})"

    def __repr__(self) -> str:
        return f"<WorkerHandle {self.serial} in place {self.place}, pid {self.process.pid}, {self._leases!r}>"


def _only(descriptors: list[int], what: str) -> int:
    """Return the one descriptor that came with a message.

    Raises:
        NoDescriptorsLeft: None came, because the kernel drops descriptors if the receiver has no room for them.
        ProtocolError: More than one came.
    """
    if not descriptors:
        raise why_there_are_none()
    if len(descriptors) != 1:
        raise ProtocolError(f"{what} was announced with {len(descriptors)} descriptors")
    return descriptors[0]
