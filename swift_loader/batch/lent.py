"""Memory of a batch that is lent to the user's code, which may keep tensors longer than it may."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike, NDArray

    from swift_loader.batch.collate import BatchMemory

__all__ = ["LentMemory"]


class LentMemory:
    """A `BatchMemory` inside another one. It knows whether tensors are still in use.

    Code that calls torch's `default_collate` expects tensors that last as long as it holds them. A slot is written
    again, or unmapped, once its batch is gone. So ask `is_kept` before the slot is given away.
    """

    def __init__(self, memory: BatchMemory) -> None:
        self._memory = memory
        self._storages: list[weakref.ref[Any]] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike, /) -> NDArray[Any]:
        """Return an uninitialised C-contiguous array. It isn't observed: torch's functions make only tensors."""
        return self._memory.empty(shape, dtype)

    def empty_tensor(self, shape: tuple[int, ...], dtype: torch.dtype, /) -> torch.Tensor:
        """Return an uninitialised contiguous tensor, whose storage is observed."""
        tensor = self._memory.empty_tensor(shape, dtype)
        self._storages.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    @property
    def is_kept(self) -> bool:
        """Whether a tensor, or a view of one, is alive. Ask once the batch and the memory's own references are gone."""
        return any(storage() is not None for storage in self._storages)
