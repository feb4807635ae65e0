"""The stream that copies run on, beside the loop's own work: the seam between the prefetch and a device.

    copying ──► record ──► an event ──query, synchronize──► the copy is over: its host memory may be written again
                              └──hand_over──► the loop's stream waits for the copy, and its memory is the loop's
    mark ──► an event ──synchronize──► the device has done what the loop had queued by then

CUDA and XPU have streams; to other devices (CPU, MPS) batches are moved by copies that wait, and there is nothing to
keep in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["STREAMING", "AcceleratorStream", "CopyStream", "Event", "NoStream", "copy_stream"]

STREAMING = ("cuda", "xpu")
"""Device types whose modules in torch have Stream, Event, stream() and current_stream() alike."""


class Event(Protocol):
    """A point in a stream's work; torch's events are such."""

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
        """Return a context in which the copies that are issued run beside the loop's work."""
        ...

    def catch_up(self) -> None:
        """Have the copies from now on come after what the loop's stream has been told so far."""
        ...

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, made on the loop's stream, of a tensor on the device; copies from now on come after it."""
        ...

    def record(self) -> Event:
        """Return the event that passes when all copies issued so far are over."""
        ...

    def mark(self) -> Event:
        """Return the event that passes when the loop's stream has done what it was told so far."""
        ...

    def hand_over(self, parts: Sequence[Any], event: Event) -> None:
        """Let the loop's stream use what was copied before the event, and give it the memory."""
        ...


class NoStream:
    """Of devices where a move is over when it returns."""

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Return a context that changes nothing."""
        yield

    def catch_up(self) -> None:
        """Do nothing."""

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor: nothing is moved ahead of its use on these devices without waiting."""
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
        """The loop's stream, while the side stream is the current one; after that, of no use."""
        # The loop's thread sleeps until such an event, and leaves its core to the workers. XPU events can't do that.
        self._mark_options = {"blocking": True} if device.type == "cuda" else {}

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Return a context whose current stream is the side stream."""
        self._loop = self._api.current_stream(self._device)
        with self._api.stream(self._side):
            yield

    def catch_up(self) -> None:
        """Have the side stream wait for the loop's.

        At the beginning of a pass, for what the user's move may read (a mean, a look-up table). Not at each batch: then
        a copy would wait for the steps that are queued before it, instead of running beside them.
        """
        self._side.wait_stream(self._loop_stream())

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor on the device. It belongs to the loop's stream: keep it until the event."""
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
        """Have the loop's stream wait for the event, and the allocator keep the memory until that stream is done.

        The memory was allocated on the side stream. Without `record_stream`, what the loop drops could be written by
        the next copy while kernels that the loop has queued still read it.
        """
        loop = self._loop_stream()
        loop.wait_event(event)
        for part in parts:
            part.record_stream(loop)

    def _loop_stream(self) -> Any:
        current = self._api.current_stream(self._device)
        return self._loop if current == self._side else current

    def __repr__(self) -> str:
        return f"<AcceleratorStream on {self._device}>"


def copy_stream(device: torch.device) -> CopyStream:
    """Return what copies to a device run on."""
    return AcceleratorStream(device) if device.type in STREAMING else NoStream()
