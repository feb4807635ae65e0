"""A worker that needs nothing of Linux: a new interpreter that builds the dataset, and serves a pipe.

The user's script is never imported. The trainer sends what the worker needs, classes of `__main__` included, over the
pipe; see `transport.payload`.

    trainer ──PAYLOAD──► worker ──READY──► trainer ──TASK──► worker ──SEGMENT, BATCH──► trainer
            ──request──►        ──stacks──►                            a second pipe, for its reading thread

A thread reads both pipes. So the trainer never waits for a worker that builds a batch, and the thread notices at once
when the trainer has ended. Then the process ends, whatever its main thread does, unless C code holds the GIL.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from contextlib import suppress
from enum import Enum
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import NoReturn

import numpy as np

from swift_loader.errors import SharedMemoryFull
from swift_loader.runtime import LoaderThread
from swift_loader.transport.failpoints import failpoint
from swift_loader.transport.messages import FailureStage, Ready, Received, SegmentMade, unpack
from swift_loader.transport.payload import Payload, PayloadLayout
from swift_loader.transport.portable import PipeChannel, SegmentNames, create, open_inherited, unlink
from swift_loader.transport.segments import UNKNOWN_ADDRESS, CounterWriter, Segment, capacity_for
from swift_loader.worker.build import ProcessUsage
from swift_loader.worker.failure import describe_failure
from swift_loader.worker.loop import AnnouncedSlots, TaskLoop, start_fresh
from swift_loader.worker.process import lead_group, reset_signals, run_and_exit


class Request(Enum):
    """What the trainer may ask of the thread that reads. The answer is text."""

    STACKS = b"stacks"
    NUM_FETCHED = b"fetched"
    """The number of samples fetched for the current batch; empty before the first one."""


PAGE_NBYTES = 4096
"""Of the counters. At most the size of a page on any system."""

_EXIT_LIMIT_S = 1.0
"""How long the main thread may go on once the trainer has ended."""

_OURS = str(Path(__file__).parent)


def main() -> NoReturn:
    """Run a worker in a new interpreter; `sys.argv` is (-c, tasks, requests, names, serial, *import path)."""
    reset_signals()
    faulthandler.enable(all_threads=False)
    if sys.platform != "win32":
        lead_group()
    tasks, requests = (open_inherited(int(number)) for number in sys.argv[1:3])
    channel, serial = PipeChannel(tasks), int(sys.argv[4])
    slots = _NamedSlots(channel, SegmentNames(sys.argv[3]))
    run_and_exit(partial(_be_worker, _Link(channel, PipeChannel(requests), slots), serial))


def _be_worker(link: _Link, serial: int) -> int:
    """Be a worker until the trainer hangs up; return the exit code."""
    try:
        return _receive_payload(link, serial)
    except (BrokenPipeError, ConnectionResetError):
        link.is_abandoned = True  # the trainer is gone; the reading thread may not have noticed it yet
        return 0
    finally:
        link.slots.clean_up(is_abandoned=link.is_abandoned)


def _receive_payload(link: _Link, serial: int) -> int:
    received = link.tasks.receive()
    if received is None:
        return 0
    layout: PayloadLayout = unpack(received.data)
    memory = np.empty(layout.total_nbytes, np.uint8)
    if not link.tasks.receive_long(memory):
        return 0
    link.start()
    service = start_fresh(Payload(layout, memory), serial, link, ProcessUsage)
    if service is None:
        return 0
    builder, report = service
    link.counters = builder.samples.counters
    try:
        link.counters.count_in(create(link.slots.names.of(None), PAGE_NBYTES))
    except SharedMemoryFull as error:
        link.send(describe_failure(error, FailureStage.BUILD, builder.definitions).pack())
        return 0
    link.send(Ready(UNKNOWN_ADDRESS, report).pack())
    TaskLoop(link, builder, link.slots).serve()
    failpoint("worker.stop")
    return 0


class _NamedSlots(AnnouncedSlots):
    """Slots whose segments have names."""

    def __init__(self, channel: PipeChannel, names: SegmentNames) -> None:
        super().__init__(channel)
        self.names = names
        self._num_made = 0

    def make(self, slot: int, nbytes: int) -> Segment:
        """Return a new segment, once the trainer was told of it."""
        segment = create(self.names.of(slot), capacity_for(nbytes))
        self._num_made = slot + 1
        self._channel.send(SegmentMade(slot, segment.nbytes).pack())
        return segment

    def clean_up(self, *, is_abandoned: bool) -> None:
        """Remove the names that are left, if the trainer can't do it because it is gone."""
        if is_abandoned:
            for slot in (None, *range(self._num_made)):
                unlink(self.names.of(slot))


class _Link:
    """The pipes to the trainer, and the thread that reads them."""

    def __init__(self, tasks: PipeChannel, requests: PipeChannel, slots: _NamedSlots) -> None:
        self.tasks = tasks
        self.slots = slots
        self.counters: CounterWriter | None = None
        """Known once there are tasks."""
        self.is_abandoned = False
        """Whether the trainer has hung up."""
        self._requests = requests
        self._received: SimpleQueue[Received | None] = SimpleQueue()

    def start(self) -> None:
        """Start to read. From then on, only the thread does."""
        LoaderThread(self._read, "reader").start()

    def send(self, message: bytes) -> None:
        """Send a message."""
        self.tasks.send(message)

    def receive(self, *, wait: bool = True) -> Received | None:
        """Return the next message; None once the trainer has hung up.

        Raises `BlockingIOError` if `wait` is False and there is no message.
        """
        try:
            return self._received.get(block=wait)
        except Empty:
            raise BlockingIOError from None

    def _read(self) -> None:
        while self._read_next():
            pass
        self.is_abandoned = True
        self._received.put(None)
        # If the main thread is idle or between two batches, it ends the process now.
        threading.Event().wait(_EXIT_LIMIT_S)
        self.slots.clean_up(is_abandoned=True)
        os._exit(1)

    def _read_next(self) -> bool:
        """Read what comes next. Return False once the trainer has hung up."""
        ready = wait([self.tasks.end, self._requests.end])
        if self._requests.end in ready:
            request = self._requests.receive()
            if request is None:
                return False
            answer = _stacks() if bytes(request.data) == Request.STACKS.value else self._num_fetched()
            with suppress(OSError):
                self._requests.send(answer.encode("utf-8", "backslashreplace"))
        if self.tasks.end in ready:
            received = self.tasks.receive()
            if received is None:
                return False
            self._received.put(received)
        return True

    def _num_fetched(self) -> str:
        return "" if self.counters is None else str(len(self.counters.samples))


def _stacks() -> str:
    """Return the Python stacks of all threads but this one, without the loader's own frames."""
    me = threading.get_ident()
    lines = []
    for number, innermost in sys._current_frames().items():  # noqa: SLF001 - documented
        if number == me:
            continue
        lines.append(f"Thread {number:#018x} (most recent call first):")
        frame: FrameType | None = innermost
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(_OURS) and code.co_filename != "<string>":
                lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
            frame = frame.f_back
    return "\n".join(lines)
