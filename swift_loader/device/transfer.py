"""What is on the device after a batch was moved: its tensors, and tensors to keep until the copies are over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from swift_loader.batch.tree import search

if TYPE_CHECKING:
    import torch

    from swift_loader.device.streams import CopyStream


class Transfer:
    """One batch's move. Belongs to the thread that moves it."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self.parts: list[Any] = []
        """What the loop gets on the device: tensors, and objects with their own `record_stream`."""
        self.sources: list[Any] = []
        """Tensors to keep until the copies are over."""

    def note(self, moved: Any, device_type: str) -> None:
        """Record all tensors on the device in a moved batch."""
        self.parts += (part for part in tensors_in(moved) if _is_on(part, device_type))

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
        is_there = any(_is_on(part, device_type) for part in tensors_in(batch))
        if is_there:
            self._stream.catch_up()
        return is_there


def _is_on(part: Any, device_type: str) -> bool:
    """Return whether a part may be on this kind of device. Objects other than tensors always may."""
    import torch

    return not isinstance(part, torch.Tensor) or part.device.type == device_type


def tensors_in(batch: Any) -> Iterator[Any]:
    """Yield all strided tensors of a batch, and objects that have a `record_stream` of their own.

    Searches containers, Mappings and the attributes of all objects, at any depth. For a sparse tensor, yields the
    tensors that it consists of.
    """
    import torch

    def is_wanted(part: Any) -> bool:
        return isinstance(part, torch.Tensor) or callable(getattr(part, "record_stream", None))

    for part in search(batch, is_wanted):
        if isinstance(part, torch.Tensor):
            yield from _dense_parts(part)
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
