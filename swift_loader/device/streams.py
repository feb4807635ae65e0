"""The stream that copies run on, beside the loop's own work: the seam between the prefetch and a device.

    copying ──► record ──► an event ──query, synchronize──► the copy is over: its host memory may be written again
                              └──hand_over──► the loop's stream waits for the copy, and its memory is the loop's

CUDA and XPU have streams; to other devices (CPU, MPS) batches are moved by copies that wait, and there is nothing to
keep in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from swift_loader.device.tensors import tensors_in

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
    """Where copies run. Used by one thread at a time."""

    def copying(self, batch: Any) -> Any:
        """Return a context in which the copies of this batch that are issued run beside the loop's work."""
        ...

    def catch_up(self) -> None:
        """Have the copies from now on come after what the loop's current stream has been told so far."""
        ...

    def record(self) -> Event:
        """Return the event that passes when all copies issued so far are over."""
        ...

    def hand_over(self, batch: Any, event: Event) -> None:
        """Let the loop's current stream use what was copied before the event, and give it the memory."""
        ...


class NoStream:
    """Of devices where a move is over when it returns."""

    @contextmanager
    def copying(self, batch: Any) -> Iterator[None]:  # noqa: ARG002
        """Return a context that changes nothing."""
        yield

    def catch_up(self) -> None:
        """Do nothing."""

    def record(self) -> Event:
        """Return an event that has passed."""
        return _PASSED

    def hand_over(self, batch: Any, event: Event) -> None:
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

    @contextmanager
    def copying(self, batch: Any) -> Iterator[None]:
        """Return a context whose current stream is the side stream.

        A batch of another loader may have parts that are on the device already, and that the current stream is still
        making: the side stream waits for those.
        """
        if any(_is_on(part, self._device.type) for part in tensors_in(batch)):
            self.catch_up()
        with self._api.stream(self._side):
            yield

    def catch_up(self) -> None:
        """Have the side stream wait for the current one.

        At the beginning of a pass, for what the user's move may read (a mean, a look-up table). Not at each batch: then
        a copy would wait for the steps that are queued before it, instead of running beside them.
        """
        self._side.wait_stream(self._api.current_stream(self._device))

    def record(self) -> Event:
        """Return an event on the side stream."""
        event: Event = self._side.record_event(self._api.Event())
        return event

    def hand_over(self, batch: Any, event: Any) -> None:
        """Have the current stream wait for the event, and the allocator keep the memory until that stream is done."""
        current = self._api.current_stream(self._device)
        current.wait_event(event)
        record_stream(batch, current, self._device.type)

    def __repr__(self) -> str:
        return f"<AcceleratorStream on {self._device}>"


def copy_stream(device: torch.device) -> CopyStream:
    """Return what copies to a device run on."""
    return AcceleratorStream(device) if device.type in STREAMING else NoStream()


def record_stream(batch: Any, stream: Any, device_type: str) -> None:
    """Tell the allocator that a stream uses a batch's memory, which was allocated on another stream.

    Without it, the memory of a tensor that the loop drops could be written by the next copy while kernels that the loop
    has queued still read it.
    """
    for part in tensors_in(batch):
        if _is_on(part, device_type):
            part.record_stream(stream)


def _is_on(part: Any, device_type: str) -> bool:
    """Return whether something that can be recorded is on a kind of device; of what is no tensor, it may be."""
    import torch

    return not isinstance(part, torch.Tensor) or part.device.type == device_type
