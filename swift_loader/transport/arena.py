"""The memory that a batch is collated into.

Runs in the worker, on one thread. Blocks are allocated front to back. A block that doesn't fit gets separate memory,
but keeps its offset. So the whole batch can later move to a larger slot without changing offsets.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from swift_loader.batch.collate import SendMemory
from swift_loader.transport.failpoints import failpoint

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Bytes: a cache line. Vector instructions and the GPU's copy engines work best with this alignment."""


MIN_FIRST_BYTES = 1 << 20
"""A smaller block is rather copied than given a slot that the whole batch may not fit into."""


@dataclass(slots=True)
class Block:
    """A piece of the arena."""

    offset: int
    memory: NDArray[np.uint8]
    """`(nbytes,)`; a part of the slot, or separate memory if the slot was full."""
    arrives_as_tensor: bool = False
    """Whether the array in it becomes a tensor."""


_NUMPYS = frozenset(
    ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128")
)
"""The names of the dtypes that torch and NumPy have in common, and give the same meaning."""


_MAX_NDIM = 32
"""NumPy 1 has no more axes."""


@functools.cache
def numpy_dtype(name: str, ndim: int) -> np.dtype[Any] | None:
    """Return the dtype of an array on which a tensor can be made; None if there is none.

    `torch.from_numpy` takes 1 us, `torch.frombuffer` 4. `name`: of torch's dtype, such as "float32". `ndim`: the
    tensor's number of axes.
    """
    return np.dtype(name) if name in _NUMPYS and ndim <= _MAX_NDIM else None


@functools.cache
def _numpys(dtype: torch.dtype, ndim: int) -> np.dtype[Any] | None:
    return numpy_dtype(str(dtype).removeprefix("torch."), ndim)


_GAP = np.zeros(ALIGNMENT, np.uint8)


class Arena(SendMemory):
    """Allocates blocks of `(capacity,) uint8`, and remembers them."""

    def __init__(
        self,
        memory: NDArray[np.uint8],
        *,
        more: Callable[[int], NDArray[np.uint8] | None] | None = None,
        copies_late: bool = False,
    ) -> None:
        """Begin with memory of which nothing is used: `(capacity,) uint8`.

        `more` returns memory of at least so many bytes, or None. It is called for the first block, if `memory` is empty
        and the block is large. `copies_late`: what is placed is copied by `move_to`. Nobody may change it until then.
        """
        self._memory = memory
        self._more = more
        self._copies_late = copies_late
        self._strays: list[Block] = []
        self._handed_out: dict[int, tuple[object, Block]] = {}
        self.used = 0
        """Bytes needed so far; more than the capacity if a block didn't fit."""

    def allocate(self, nbytes: int) -> Block:
        """Return `nbytes` of uninitialised memory."""
        offset = self._advance(nbytes)
        end = offset + nbytes
        if not offset and not len(self._memory) and nbytes >= MIN_FIRST_BYTES and self._more is not None:
            self._memory = memory if (memory := self._more(nbytes)) is not None else self._memory
        if end <= len(self._memory):
            return Block(offset, self._memory[offset:end])
        return self._stray(offset, np.empty(nbytes, np.uint8))

    def _advance(self, nbytes: int) -> int:
        """Return the offset of the next block, of so many bytes."""
        offset = self.used
        if offset:
            failpoint("worker.slot-write")
        self.used = -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT
        return offset

    def _stray(self, offset: int, memory: NDArray[np.uint8]) -> Block:
        stray = Block(offset, memory)
        self._strays.append(stray)
        return stray

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialised array, which `find` knows from now on."""
        dtype = np.dtype(dtype)
        block = self.allocate(math.prod(shape) * dtype.itemsize)
        array: NDArray[Any] = np.ndarray(shape, dtype, buffer=block.memory)
        self._handed_out[id(array)] = (array, block)
        return array

    def empty_for_tensor(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the same for an array that is sent as a tensor. torch has this dtype, and the array isn't empty."""
        array = self.empty(shape, dtype)
        self._handed_out[id(array)][1].arrives_as_tensor = True
        return array

    def empty_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor, which `find` knows from now on."""
        import torch

        count = math.prod(shape)
        block = self.allocate(count * dtype.itemsize)
        numpys = _numpys(dtype, len(shape))
        if not count:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        elif numpys is None:
            tensor = torch.frombuffer(block.memory, dtype=dtype).view(shape)
        else:
            tensor = torch.from_numpy(np.ndarray(shape, numpys, buffer=block.memory))
        self._handed_out[id(tensor)] = (tensor, block)
        return tensor

    def place(self, data: NDArray[np.uint8]) -> Block:
        """Copy `(nbytes,) uint8` into the arena and return its block."""
        if self._copies_late:
            return self._stray(self._advance(len(data)), data)
        block = self.allocate(len(data))
        block.memory[:] = data
        return block

    def place_array(self, array: NDArray[Any], order: Literal["C", "F"]) -> Block:
        """Copy an array into the arena, its elements in C or Fortran order, and return its block."""
        in_order = array.T if order == "F" else array
        if self._copies_late and array.nbytes and in_order.flags.c_contiguous:
            return self.place(in_order.reshape(-1).view(np.uint8))
        block = self.allocate(array.nbytes)
        target: NDArray[Any] = np.ndarray(array.shape, array.dtype, buffer=block.memory, order=order)
        target[...] = array
        return block

    def find(self, thing: object) -> Block | None:
        """Return the block of an array or tensor that this arena made; None for any other."""
        known = self._handed_out.get(id(thing))
        return known[1] if known is not None else None

    def find_at(self, address: int) -> Block | None:
        """Return the block of a tensor that this arena made, by the address of its memory; None if there is none."""
        blocks = (block for _, block in self._handed_out.values() if len(block.memory))
        return next((block for block in blocks if block.memory.ctypes.data == address), None)

    def rewind(self, used: int) -> None:
        """Forget the blocks that were allocated since so many bytes were used."""
        self.used = used
        self._strays = [stray for stray in self._strays if stray.offset < used]
        self._handed_out = {key: known for key, known in self._handed_out.items() if known[1].offset < used}

    @property
    def fits(self) -> bool:
        """Whether all blocks are inside the memory."""
        return not self._strays

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the content front to back, gaps as zeros. The arena must have begun without memory."""
        position = 0
        for stray in self._strays:
            yield _GAP[: stray.offset - position]
            yield stray.memory
            position = stray.offset + len(stray.memory)
        yield _GAP[: self.used - position]

    def move_to(self, memory: NDArray[np.uint8]) -> None:
        """Copy all blocks to a larger memory, at the same offsets."""
        inside = min(self.used, len(self._memory), self._strays[0].offset if self._strays else self.used)
        memory[:inside] = self._memory[:inside]
        for stray in self._strays:
            memory[stray.offset : stray.offset + len(stray.memory)] = stray.memory
        self._strays.clear()
        self._memory = memory
