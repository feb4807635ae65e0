"""The CUDA or XPU stream for copies, beside the loop's stream.

    copying ──► record ──► an event ──query, synchronize──► the copy is over: its host memory may be written again
                              └──hand_over──► the loop's stream waits for the copy, and its memory is the loop's
    mark ──► an event ──synchronize──► the device has done the work that the loop had queued by then

Other devices (CPU, MPS) have no stream here: copies to them are over when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

STREAMING = ("cuda", "xpu")
"""Device types whose torch modules have the same Stream, Event, stream() and current_stream()."""


class Event(Protocol):
    """A point in a stream's work, such as torch's events."""

    def query(self) -> bool:
        """Return whether the work before it is done."""
        ...

    def synchronize(self) -> None:
        """Block until the work before it is done."""
        ...


class CopyStream(Protocol):
    """Where copies run. Used by one thread at a time.

    The loop's stream is the current one of the thread that calls, outside of `copying`.
    """

    def copying(self) -> Any:
        """Return a context in which copies run beside the loop's work."""
        ...

    def catch_up(self) -> None:
        """Make later copies wait for the loop's queued work."""
        ...

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor on the device, made on the loop's stream. Later copies wait for it."""
        ...

    def record(self) -> Event:
        """Return an event that passes when all copies issued so far are over."""
        ...

    def mark(self) -> Event:
        """Return an event that passes when the loop's queued work is done."""
        ...

    def hand_over(self, parts: Sequence[Any], event: Event) -> None:
        """Make the loop's stream wait for the event, and give it the memory of the copies before it."""
        ...


class NoStream:
    """For devices where a move is over when it returns."""

    def copying(self) -> Any:
        """Return a context that changes nothing."""
        return nullcontext()

    def catch_up(self) -> None:
        """Do nothing."""

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself: moves to these devices wait for their copies."""
        return tensor

    def record(self) -> Event:
        """Return an event that has passed."""
        return _PASSED

    def mark(self) -> Event:
        """Return an event that has passed."""
        return _PASSED

    def hand_over(self, parts: Sequence[Any], event: Event) -> None:
        """Do nothing."""


class _Passed:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_PASSED = _Passed()


class AcceleratorStream:
    """A side stream of a CUDA or XPU device."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._api = getattr(torch, device.type)
        index = self._api.current_device() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self._side = self._api.Stream(device=self._device)
        self._loop: Any = None
        """The loop's stream while the side stream is the current one. Not used after that."""
        # The loop's thread sleeps until a blocking event, so workers can use its core. XPU events can't do that.
        self._mark_options = {"blocking": True} if device.type == "cuda" else {}

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Return a context whose current stream is the side stream."""
        self._loop = self._api.current_stream(self._device)
        with self._api.stream(self._side):
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

    def mark(self) -> Event:
        """Return an event on the loop's stream."""
        event: Event = self._loop_stream().record_event(self._api.Event(**self._mark_options))
        return event

    def hand_over(self, parts: Sequence[Any], event: Any) -> None:
        """Make the loop's stream wait for the event, and the allocator keep the memory until that stream is done.

        The memory was allocated on the side stream. Without `record_stream`, the next copy could write memory that the
        loop has dropped while queued kernels still read it.
        """
        loop = self._loop_stream()
        loop.wait_event(event)
        for part in parts:
            part.record_stream(loop)

    def _loop_stream(self) -> Any:
        current = self._api.current_stream(self._device)
        return self._loop if current == self._side else current


def copy_stream(device: torch.device) -> CopyStream:
    """Return the stream for copies to a device."""
    return AcceleratorStream(device) if device.type in STREAMING else NoStream()
