"""What one batch's way to the device leaves to be done: filled in by the move, in the walk that it makes anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swift_loader.device.tensors import tensors_in

if TYPE_CHECKING:
    import torch

    from swift_loader.device.streams import CopyStream

__all__ = ["Transfer"]


class Transfer:
    """One batch on its way. Belongs to the thread that moves it."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self.parts: list[Any] = []
        """What the loop gets on the device: tensors, and objects that have a `record_stream` of their own."""
        self.sources: list[Any] = []
        """What is to be kept until the copies are over, besides the batch on the host."""

    def note(self, moved: Any, device_type: str) -> None:
        """Take note of all that is on this kind of device in a moved batch, or a part of one."""
        self.parts += (part for part in tensors_in(moved) if _is_on(part, device_type))

    def note_tensor(self, moved: torch.Tensor) -> None:
        """Take note of a strided tensor on the device."""
        self.parts.append(moved)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor that is on the device already, made on the loop's stream, before the other copies.

        It may be memory of a source that writes its batches into the same memory again and again, and the loop's stream
        may still be making it.
        """
        owned = self._stream.own(tensor)
        self.sources.append(owned)
        return owned

    def wait_for(self, batch: Any, device_type: str) -> bool:
        """Have the copies wait for the loop's stream if something in a batch is on this kind of device already.

        Returns:
            Whether something is.
        """
        is_there = any(_is_on(part, device_type) for part in tensors_in(batch))
        if is_there:
            self._stream.catch_up()
        return is_there

    def __repr__(self) -> str:
        return f"<Transfer of {len(self.parts)} parts>"


def _is_on(part: Any, device_type: str) -> bool:
    """Return whether something that can be recorded is on a kind of device; of what is no tensor, it may be."""
    import torch

    return not isinstance(part, torch.Tensor) or part.device.type == device_type
