"""Copies to the device: the stream that they run on, what they read and write, and when they are over.

    copying ──► record ──► an event ──query, synchronize──► the copy is over: its host memory may be written again
                              └──hand_over──► the loop's stream waits for the copy, and its memory is the loop's
    mark ──► an event ──synchronize──► the device has done the work that the loop had queued by then

The CPU and MPS have no stream here: copies to them are over when the call returns.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from swift_loader.batch.tree import search
from swift_loader.device.accelerator import device_of, streams_of
from swift_loader.device.pinning import calling, relaxed_capture
from swift_loader.errors import LoaderClosed
from swift_loader.runtime import Answer, LoaderThread, ProcessOwner, is_interrupt
from swift_loader.scheduler.delivery import Delivery
from swift_loader.worker.torch_worker import ordinary_tensors

if TYPE_CHECKING:
    import torch


class Event:
    """A point in a stream's work. This one has passed; torch's events have the same methods."""

    def query(self) -> bool:
        """Return whether the work before it is done."""
        return True

    def synchronize(self) -> None:
        """Block until the work before it is done."""


_PASSED = Event()


class CopyStream:
    """Where copies run. This one is for devices where a move is over when it returns.

    The loop's thread uses it. Another one only moves: `copying`, and what is in it, `record` and `has_passed`.
    """

    def copying(self) -> Any:
        """Return a context in which copies run beside the loop's work."""
        return nullcontext()

    def catch_up(self) -> None:
        """Make later copies wait for the loop's queued work."""

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor on the device, made on the loop's stream. Later copies wait for it."""
        return tensor  # this device's moves wait for their copies

    def record(self) -> Event:
        """Return an event that passes when all copies issued so far are over."""
        return _PASSED

    def has_passed(self, event: Event) -> bool:
        """Return whether an event has passed."""
        return event.query()

    def wait_for(self, event: Event) -> None:
        """Block until an event has passed."""
        event.synchronize()

    def mark(self) -> Event:
        """Return an event that passes when the loop's queued work is done."""
        return _PASSED

    def hand_over(self, parts: Sequence[Any], event: Event) -> None:
        """Make the loop's stream wait for the event, and give it the memory of the copies before it."""


class AcceleratorStream(CopyStream):
    """A side stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._api = streams_of(device.type)
        self._device = device_of(device)
        self._side = self._api.Stream(device=self._device)
        self._loop: Any = self._api.current_stream(self._device)
        """The loop's stream at its last step. The thread that moves has another one."""
        is_cuda = device.type == "cuda"
        # The loop's thread sleeps until a blocking event, so workers can use its core. Others can't do that.
        self._mark_options = {"blocking": True} if is_cuda else {}
        self._guard = relaxed_capture if is_cuda else nullcontext

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Return a context whose current stream is the side stream."""
        with calling(self._device), self._api.stream(self._side):
            yield

    def catch_up(self) -> None:
        """Make the side stream wait for the loop's.

        Called at the start of a pass, because the user's move may read tensors of the loop (a mean, a look-up table).
        Not called for each batch: then a copy would wait for the queued steps instead of running beside them.
        """
        self._side.wait_stream(self._loop_stream())

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor on the device. The loop's stream owns its memory, so keep it until the event."""
        loop = self._loop_stream()
        with self._api.stream(loop):
            copied = tensor.clone()
        self._side.wait_stream(loop)
        return copied

    def record(self) -> Event:
        """Return an event on the side stream."""
        event: Event = self._side.record_event(self._api.Event())
        return event

    def has_passed(self, event: Event) -> bool:
        """Return whether an event has passed."""
        with self._guard():
            return event.query()

    def wait_for(self, event: Event) -> None:
        """Block until an event has passed."""
        with self._guard():
            event.synchronize()

    def mark(self) -> Event:
        """Return an event on the loop's stream."""
        event: Event = self._loop_stream().record_event(self._api.Event(**self._mark_options))
        return event

    def hand_over(self, parts: Sequence[Any], event: Any) -> None:
        """Make the loop's stream wait for the event, and the allocator keep the memory until that stream is done.

        The memory was allocated on the side stream. Without `record_stream`, the next copy could write memory that the
        loop has dropped while queued kernels still read it.
        """
        loop = self._loop
        loop.wait_event(event)
        for part in parts:
            part.record_stream(loop)

    def _loop_stream(self) -> Any:
        current = self._api.current_stream(self._device)
        if current != self._side:
            self._loop = current
        return self._loop


# What a move leaves on the device.


class Transfer:
    """One batch's move. Belongs to the thread that moves it, and after `wait` to the loop's."""

    batch: Any = None
    """On the device. Complete once the event has passed."""
    event: Event
    error: BaseException | None = None
    """What the move raised. All of them are there once the copies are issued."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self.parts: list[Any] = []
        """What the loop gets on the device: tensors, and objects with their own `record_stream`."""
        self.sources: list[Any] = []
        """Tensors to keep until the copies are over."""
        self.is_issued: Answer[None] | None = None
        """Given once another thread has moved the batch. None: this thread does."""

    def wait(self) -> None:
        """Block until all copies are issued, or the move has raised."""
        if self.is_issued is not None:
            self.is_issued.wait()

    def note(self, moved: Any, device_type: str) -> None:
        """Record all tensors on the device in a moved batch."""
        self.parts += _tensors_on(moved, device_type)

    def note_tensor(self, moved: torch.Tensor, device_type: str) -> None:
        """Record a moved tensor."""
        self.parts += _dense_parts(moved) if moved.device.type == device_type else ()

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor that is on the device already. Made on the loop's stream, before the other copies.

        The tensor's source may write all its batches into the same memory, and the loop's stream may still write it.
        """
        owned = self._stream.own(tensor)
        self.sources.append(owned)
        return owned

    def wait_for(self, batch: Any, device_type: str) -> bool:
        """Make the copies wait for the loop's stream if a part of the batch is on this kind of device already.

        Returns:
            Whether a part is there.
        """
        is_there = any(True for _ in _tensors_on(batch, device_type))
        if is_there:
            self._stream.catch_up()
        return is_there

    def hand_over(self) -> None:
        """Give the moved batch to the loop: its later work waits for the copy."""
        self._stream.hand_over(self.parts, self.event)


def _tensors_on(batch: Any, device_type: str) -> Iterator[Any]:
    """Yield all strided tensors of a batch on a kind of device, and objects that have a `record_stream` of their own.

    Searches containers, Mappings and the attributes of all objects, at any depth. For a sparse tensor, yields the
    tensors that it consists of.
    """
    import torch

    def is_wanted(part: Any) -> bool:
        return isinstance(part, torch.Tensor) or callable(getattr(part, "record_stream", None))

    for part in search(batch, is_wanted):
        if isinstance(part, torch.Tensor):
            yield from (dense for dense in _dense_parts(part) if dense.device.type == device_type)
        else:
            yield part


def _dense_parts(tensor: Any) -> Iterator[Any]:
    import torch

    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())  # noqa: SLF001 - torch's names; the public ones need a coalesced one
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:  # a nested tensor of the jagged layout, which has its own record_stream
        yield tensor


# The running copies and the host memory they read. They bound the loop's lead over the device.

_JOIN_LIMIT_S = 0.4
"""How long `close` waits for the thread that moves, which may hang in an object's own `.to()`. With what ending the
workers may take, a loader closes in 5 s."""

MIN_STEPS_QUEUED = 2
"""The device may always have two steps left: one runs, one waits. So it doesn't idle while the loop queues the next."""


class HostSource(Protocol):
    """Gives batches on the host, and moves them."""

    def is_ready(self) -> bool:
        """Return whether to take a batch ahead of the loop now."""
        ...

    def take(self) -> Delivery:
        """Return the next batch on the host, or the error or the end in its place. May block.

        What it raises comes out of `PrefetchQueue.take`, whose next call takes again.
        """
        ...

    def move(self, delivery: Delivery, transfer: Transfer, /) -> Any:
        """Return a batch on the device. What it raises is the error in place of the batch."""
        ...

    def key_of(self, delivery: Delivery, /) -> int:
        """Return what `batch_key` returns while this batch is moved."""
        ...


class CopiesInFlight:
    """Keeps each host batch until its copy is over, and bounds how far the loop runs ahead of the device.

    While a reference to a host batch exists, its slot isn't written again and its memory stays mapped. This class holds
    that reference. The loop's thread uses it, and the one that moves. Any thread may close it, at any time.

    A batch that the loop drops keeps its memory on the device until its step has run. A loop that never synchronises
    queues hundreds of steps. So `begin_step` blocks until at most `max_steps` of them are left to run.

    Rejected alternative: allocate on the loop's stream and let the side stream wait for it before each copy. Then each
    copy runs after all queued steps, so it can't overlap them. Host batches would also be kept for as many steps as the
    loop is ahead, without a bound.
    """

    def __init__(self, stream: CopyStream, depth: int = 1) -> None:
        """Create an empty tracker. `depth` is how many batches may be on the device ahead of the loop."""
        self.stream = stream
        self._max_steps = max(MIN_STEPS_QUEUED, depth)
        self._steps: deque[Event] = deque()
        """One at the start of each of the loop's last steps, oldest first."""
        # Reentrant: a finaliser or a signal handler may close the loader in a thread that holds the lock.
        self._lock = threading.RLock()
        """Guards the next two."""
        self._in_flight: deque[tuple[Event, Delivery, Sequence[Any]]] = deque()
        """Oldest first, with the batch on the host, its slot, and sources on the device. Not the loop's tensors, which
        may be dropped earlier."""
        self._is_closed = False
        self._moves: SimpleQueue[Any] = SimpleQueue()
        """For the thread that moves. It ends with a None."""
        self._mover: LoaderThread | None = None
        self._last: Answer[None] | None = None
        """Given once it has moved the last of them."""
        weakref.finalize(self, self._moves.put, None)
        self._process = ProcessOwner()

    def begin_step(self) -> None:
        """Record that the loop asks for its next batch, so it has queued all work on the earlier ones.

        Blocks until at most `max_steps` steps are left on the device.
        """
        self._steps.append(self.stream.mark())
        while len(self._steps) > self._max_steps:
            self.stream.wait_for(self._steps[0])
            self._steps.popleft()  # last: a Ctrl-C before it changes nothing

    def issue(self, source: HostSource, delivery: Delivery, *, in_background: bool = False) -> Transfer:
        """Move a batch. What that raises is the transfer's error, unless it is an interrupt.

        `in_background`: another thread does it, and this returns at once. A loop that waits for each of its steps would
        have to wait for this, too. Not for a function of the user's, which may depend on the loop's thread.
        """
        transfer = Transfer(self.stream)
        with self._lock:
            if in_background and not self._is_closed:
                if self._mover is None or not self._mover.is_alive():
                    mover = LoaderThread(_move_all, "copies", self._moves)
                    mover.start()
                    self._mover = mover  # last: an interrupt may leave a thread that doesn't run
                transfer.is_issued = Answer()
                self._moves.put((self, transfer, source, delivery))
                self._last = transfer.is_issued  # after that: `wait` must end
                return transfer
        self.move(transfer, source, delivery)
        return transfer

    def move(self, transfer: Transfer, source: HostSource, delivery: Delivery) -> None:
        """Issue the copies of a batch. Lets go of the batches on the host whose copies are over by now."""
        # An object that moves itself, or a function of the user's, may drop the batch's parts before they were read.
        find_memory = None if delivery.lease is None else delivery.lease.memory
        memory = None if find_memory is None else find_memory()
        try:
            if self._is_closed:
                raise LoaderClosed("the loader was closed while it moved a batch")
            self.drop_finished()
            with ordinary_tensors(), self.stream.copying():
                transfer.batch = source.move(delivery, transfer)
        except BaseException as error:
            transfer.error = error
            if not isinstance(error, Exception) or is_interrupt(error):
                raise
        finally:
            try:
                self._keep(transfer, delivery, memory)
            finally:
                if transfer.is_issued is not None:
                    transfer.is_issued.give(None)

    def _keep(self, transfer: Transfer, delivery: Delivery, memory: object) -> None:
        """Keep what a move copies from until the copies are over. One that has raised may have issued some before."""
        event = _PASSED
        with self._lock:  # so they are in the order of the events: two threads may move
            try:
                event = self.stream.record()
            except BaseException as error:
                transfer.error = transfer.error or error
                if not isinstance(error, Exception) or is_interrupt(error):  # the copies are under way nevertheless
                    event = self.stream.record()
                    raise
                # else it is of the device, whose later work fails, too
            finally:
                transfer.event = event
                self._in_flight.append((event, delivery, [memory, *transfer.sources]))
                is_closed = self._is_closed
        if is_closed:  # meanwhile, so no later call lets it go
            self.stream.wait_for(event)
            self.drop_finished()

    def drop_finished(self) -> None:
        """Drop the host batches whose copies are over. Doesn't block."""
        dropped = []
        with self._lock:
            while self._in_flight and self.stream.has_passed(self._in_flight[0][0]):
                dropped.append(self._in_flight.popleft())
        for _, delivery, _ in dropped:
            if delivery.lease is not None and delivery.lease.seen_since is not None:  # else the user can't have it
                delivery.keep()
        del dropped  # outside the lock: the user's objects may have finalisers

    def wait(self) -> None:
        """Block until all copies so far are over."""
        if self._last is not None:
            self._last.wait()
        with self._lock:
            last = self._in_flight[-1][0] if self._in_flight else None
        if last is not None:
            self.stream.wait_for(last)
            self.drop_finished()

    def close(self) -> None:
        """Wait until all copies are over, and drop the host batches. Idempotent."""
        if not self._process.is_here():  # a fork of the trainer has no running copies and no device
            return
        with self._lock:
            self._is_closed = True
            self._moves.put(None)
            dropped, self._in_flight = self._in_flight, deque()
            if dropped:
                self.stream.wait_for(dropped[-1][0])  # copies end in the order in which they were issued
        if self._mover is not None:
            self._mover.join(_JOIN_LIMIT_S)

    def __repr__(self) -> str:
        return f"<CopiesInFlight {len(self._in_flight)} under way>"


def _move_all(moves: SimpleQueue[Any]) -> None:
    """Move one batch after the other. It doesn't keep the loader, nor its last batch."""
    for copies, *move in iter(moves.get, None):
        with suppress(BaseException):  # the loop gets it
            copies.move(*move)
        del copies, move
