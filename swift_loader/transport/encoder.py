"""The pickler of batches: it copies bulk data into an arena and pickles only its shape.

Runs in the worker. `codec` says what becomes of the pickles. The functions that rebuild arrays and tensors are here,
too, beside what they undo.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from swift_loader.batch.tree import search
from swift_loader.transport.arena import Arena, Block, numpy_dtype
from swift_loader.transport.by_value import Definitions, travels_by_value, update_attributes

if TYPE_CHECKING:
    import torch

ROW = struct.Struct("<QQ")
"""One entry of the table of buffers: (offset, nbytes) for bulk data, (number, DEFINITION) for a definition."""

DEFINITION = (1 << 64) - 1

_MAX_NBYTES_IN_BAND = 512
"""Arrays up to this size go into the structure. For 12 bytes that takes 2 us; a separate block takes 12 us."""

_REGION_ALIGNMENT = 16
"""Bytes: views of all dtypes begin in a region as they do in the storage."""

_MAX_SPARSE = 2
"""How much larger than its views what they share may be."""

PLAIN_KINDS = frozenset("biufcSUmM?")
"""Kinds of dtypes that `dtype.str` describes completely."""


@dataclass(slots=True)
class Encoded:
    """A batch without the bulk data, which is in the arena."""

    meta: bytes
    """The table of the buffers, then the pickled structure."""
    num_blocks: int


class CodeNeeded(Exception):
    """A batch holds a class or function that the receiver doesn't know."""


class Encoder(pickle.Pickler):
    """The C pickler, with special handling of arrays, tensors and definitions that can't be imported."""

    def __init__(self, stream: io.BytesIO, arena: Arena, definitions: Definitions) -> None:
        # The callback isn't a method of this object: that cycle would keep each batch until the garbage collector runs.
        self._buffers = _Buffers(arena)
        super().__init__(stream, protocol=5, buffer_callback=self._buffers.note)
        self._arena = arena
        self._definitions = definitions
        self._parts: Sequence[object] = ()
        """What is being written, part by part."""
        self._shared: dict[int, list[_Region]] | None = None
        """By the address of a storage: what is shared of it. None: nobody has looked."""
        self._whole: dict[int, Block] = {}
        """By the address of a storage: where all of it is, because a tensor was."""
        self.rows = self._buffers.rows

    def dump(self, obj: Any, parts: Sequence[object] = ()) -> None:
        """Write an object. `parts`: what of it may hold tensors that share memory; by default, all of it."""
        self._parts, self._shared, self._whole = parts or [obj], None, {}
        super().dump(obj)

    def encoded(self, stream: io.BytesIO) -> Encoded:
        """Return the table of buffers, followed by what was written to the stream."""
        table = b"".join([ROW.pack(*row) for row in self.rows])
        return Encoded(table + stream.getbuffer(), len(self.rows))

    def reducer_override(self, obj: Any) -> Any:  # noqa: D102 - pickle's
        kind = type(obj)
        if kind is np.ndarray:
            return NotImplemented if obj.dtype.hasobject else self._reduce_array(obj)
        if kind is type or kind is FunctionType or isinstance(obj, type):
            return self._reduce_definition(obj) if travels_by_value(obj) else NotImplemented
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            return self._reduce_tensor(obj, torch) if kind is torch.Tensor else self._reduce_subclass(obj, torch)
        return NotImplemented

    def _reduce_array(self, array: NDArray[Any]) -> Any:
        block = self._arena.find(array)
        if block is not None and block.arrives_as_tensor:
            return _rebuild_dense, (self._mark_block(block), array.dtype.str, array.shape)
        if block is None and array.nbytes <= _MAX_NBYTES_IN_BAND and (array.ndim <= 1 or array.flags.c_contiguous):
            return np.ndarray, (array.shape, array.dtype, bytearray(array.tobytes()))
        order: Literal["C", "F"] = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        if block is None:
            block = self._arena.place_array(array, order)
        dtype = array.dtype
        named = dtype.str if dtype.kind in PLAIN_KINDS and not dtype.metadata and not dtype.subdtype else dtype
        return _rebuild_array, (self._mark_block(block), named, array.shape, order)

    def _reduce_tensor(self, tensor: torch.Tensor, torch: ModuleType) -> Any:
        if not can_reduce_tensor(tensor):
            return NotImplemented
        rebuild, fields = self._take_apart(tensor, torch)
        if tensor.__dict__:
            return rebuild, fields, tensor.__dict__, None, None, update_attributes
        return rebuild, fields

    def _reduce_subclass(self, tensor: torch.Tensor, torch: ModuleType) -> Any:
        """Reduce a tensor of a subclass as torch does, but without what a view doesn't show of its storage."""
        kind, base = type(tensor), torch.Tensor
        is_own = kind.__reduce_ex__ is not base.__reduce_ex__ or kind.__torch_dispatch__ is not base.__torch_dispatch__
        if is_own or tensor.requires_grad or tensor.layout is not torch.strided or not can_reduce_tensor(tensor):
            return NotImplemented
        rebuild, fields = self._take_apart(tensor.as_subclass(base), torch)
        return torch._tensor._rebuild_from_type_v2, (rebuild, kind, fields, torch._utils._get_obj_state(tensor))  # noqa: SLF001 - as `Tensor.__reduce_ex__`

    def _take_apart(self, tensor: torch.Tensor, torch: ModuleType) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if tensor.layout is torch.sparse_coo:
            # torch's own rebuild function puts each sparse tensor into a list, for torch.load, and so leaks its memory.
            # The public indices() raises for tensors that aren't coalesced.
            parts: tuple[Any, ...] = (tensor._indices(), tensor._values(), tensor.is_coalesced())  # noqa: SLF001
            return _rebuild_sparse_coo, (*parts, tuple(tensor.shape), tensor.requires_grad)
        if tensor.layout is not torch.strided:
            by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
            parts = (tensor.crow_indices(), tensor.col_indices()) if by_rows else _columns_of(tensor)
            layout = str(tensor.layout)[len("torch.") :]
            return _rebuild_sparse, (*parts, tensor.values(), tuple(tensor.shape), layout, tensor.requires_grad)
        block = self._arena.find(tensor)
        stride = tensor.stride()
        if block is not None and not tensor.requires_grad and tensor.is_contiguous() and len(block.memory):
            numpys = numpy_dtype(str(tensor.dtype)[len("torch.") :], tensor.ndim)
            if numpys is not None:
                return _rebuild_dense, (self._mark_block(block), numpys.str, tuple(tensor.shape))
        row = None if block is not None else self._row_in_shared(tensor, torch)
        if row is not None:
            fields = str(tensor.dtype)[len("torch.") :], tuple(tensor.shape), stride, tensor.requires_grad
            return _rebuild_tensor, (self._buffers.mark(row, pickle.PickleBuffer(bytearray(1))), *fields)
        if block is None:
            dense, stride = _dense(tensor.detach().resolve_conj().resolve_neg())
            block = self._arena.place(dense.view(torch.uint8).numpy())
            storage = tensor.untyped_storage()
            if dense.data_ptr() == storage.data_ptr() and dense.nbytes == storage.nbytes():
                self._whole[storage.data_ptr()] = block
        fields = str(tensor.dtype)[len("torch.") :], tuple(tensor.shape), stride, tensor.requires_grad
        return _rebuild_tensor, (self._mark_block(block), *fields)

    def _row_in_shared(self, tensor: torch.Tensor, torch: ModuleType) -> tuple[int, int] | None:
        """Return where a view lies in what several views share. None: it shares nothing."""
        storage = tensor.untyped_storage()
        if not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            return None
        address = storage.data_ptr()
        whole = self._arena.find_at(address) or self._whole.get(address)
        begin, end = _span(tensor)
        if whole is not None:
            return (whole.offset + begin, end - begin) if end <= len(whole.memory) else None
        if self._shared is None:
            if storage.nbytes() == tensor.nbytes:  # other views of it may follow, and look
                return None
            self._shared = _shared_regions(self._parts, torch)
        for region in self._shared.get(address, ()):
            if region.begin <= begin and end <= region.end:
                if region.block is None:
                    content = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
                    region.block = self._arena.place(content[region.begin : region.end].numpy())
                return region.block.offset + begin - region.begin, end - begin
        return None

    def _reduce_definition(self, thing: type | FunctionType) -> Any:
        number = self._definitions.number_of(thing)
        if number is None:
            return self._reduce_code(thing)
        return _identity, (self._buffers.mark((number, DEFINITION), pickle.PickleBuffer(bytearray(1))),)

    def _reduce_code(self, thing: type | FunctionType) -> Any:  # noqa: ARG002
        """Reduce a definition that the receiver doesn't know. Overridden by the encoder that can send code."""
        raise CodeNeeded

    def _mark_block(self, block: Block) -> pickle.PickleBuffer:
        return self._buffers.mark((block.offset, len(block.memory)), pickle.PickleBuffer(bytearray(1)))


@dataclass(slots=True)
class _Region:
    """The bytes of a storage that overlapping views span."""

    begin: int
    end: int
    nbytes: int = 0
    """What the views would take one by one."""
    num_views: int = 0
    block: Block | None = None
    """Where they are in the arena, once the first view is there."""


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return which bytes of its storage a tensor lies in."""
    last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return begin, begin + (int(last) + 1) * tensor.itemsize


def _shared_regions(parts: Sequence[object], torch: ModuleType) -> dict[int, list[_Region]]:
    """Return what several views share, by the address of their storage.

    Views that don't overlap share nothing. Those of which most of the region is no part are sent one by one.
    """
    found: list[tuple[int, int, int, int]] = []
    with suppress(Exception):  # the encoder meets what can't be sent, too, and says so
        found.extend(
            (*_span(one), one.untyped_storage().data_ptr(), one.nbytes)
            for one in search(parts, lambda thing: type(thing) is torch.Tensor)
            if one.layout is torch.strided and can_reduce_tensor(one) and one.numel()
        )
    by_storage: dict[int, list[_Region]] = {}
    for begin, end, address, nbytes in sorted(found):
        regions = by_storage.setdefault(address, [])
        if not regions or begin >= regions[-1].end:
            regions.append(_Region(begin // _REGION_ALIGNMENT * _REGION_ALIGNMENT, end))
        last = regions[-1]
        last.end, last.nbytes, last.num_views = max(last.end, end), last.nbytes + nbytes, last.num_views + 1
    return {
        address: [one for one in regions if one.num_views > 1 and one.end - one.begin <= _MAX_SPARSE * one.nbytes]
        for address, regions in by_storage.items()
    }


class _Buffers:
    """The out-of-band buffers of a pickle, in the order of the references."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._marks: dict[int, tuple[pickle.PickleBuffer, tuple[int, int]]] = {}
        self.rows: list[tuple[int, int]] = []

    def mark(self, row: tuple[int, int], mark: pickle.PickleBuffer) -> pickle.PickleBuffer:
        """Return the buffer to pickle in place of a row."""
        self._marks[id(mark)] = (mark, row)
        return mark

    def note(self, mark: pickle.PickleBuffer) -> bool:
        """Take a buffer out of the stream: one of ours, or one from another library's `__reduce_ex__`."""
        known = self._marks.get(id(mark))
        if known is not None:
            self.rows.append(known[1])
        else:
            block = self._arena.place(np.frombuffer(mark.raw(), np.uint8))
            self.rows.append((block.offset, len(block.memory)))
        return False


def can_reduce_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements can be copied. If not, torch's own `__reduce_ex__` is used.

    Raises `TypeError` if the tensor can't be sent at all.
    """
    if tensor.requires_grad and not tensor.is_leaf:
        raise TypeError("a tensor that requires grad and isn't a leaf can't be sent; call detach() on it")
    return tensor.device.type == "cpu" and not tensor.is_quantized and not tensor.is_nested


def _columns_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor.ccol_indices(), tensor.row_indices()


def _dense(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the elements as one `(numel,)` tensor, and the strides that restore the original layout."""
    stride, packed = tensor.stride(), 1
    for extent, step in sorted(zip(tensor.shape, stride, strict=True), key=lambda axis: (axis[1], axis[0])):
        if extent != 1 and step != packed:  # holes or overlaps: expanded, or sliced out of something larger
            tensor = tensor.contiguous()
            return tensor.view(-1), tensor.stride()
        packed *= extent
    return tensor.as_strided((tensor.numel(),), (1,)), stride


# Pickles refer to these functions by name. Renaming one is safe: both sides of a loader run the same version.


def _identity(thing: object) -> object:
    return thing


def _rebuild_array(buffer: NDArray[np.uint8], dtype: str | np.dtype[Any], shape: tuple[int, ...], order: Any) -> Any:
    return np.ndarray(shape, dtype, buffer, 0, None, order)


def _rebuild_dense(buffer: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.ndarray(shape, dtype, buffer))


def _rebuild_tensor(
    buffer: NDArray[np.uint8], dtype_name: str, shape: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name)
    if not len(buffer):
        return torch.empty_strided(shape, stride, dtype=dtype, requires_grad=requires_grad)
    numpys = numpy_dtype(dtype_name, len(shape))
    if numpys is None:
        tensor = torch.frombuffer(buffer, dtype=dtype).as_strided(shape, stride)
    else:
        steps = [step * numpys.itemsize for step in stride]
        tensor = torch.from_numpy(np.ndarray(shape, numpys, buffer, 0, steps))
    return tensor.requires_grad_() if requires_grad else tensor


def _rebuild_sparse_coo(
    indices: torch.Tensor, values: torch.Tensor, coalesced: bool, shape: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    import torch

    options: dict[str, Any] = {"is_coalesced": coalesced, "requires_grad": requires_grad, "check_invariants": False}
    return torch.sparse_coo_tensor(indices, values, shape, **options)


def _rebuild_sparse(
    starts: torch.Tensor,
    places: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    layout: str,
    requires_grad: bool,
) -> torch.Tensor:
    import torch

    options: dict[str, Any] = {"layout": getattr(torch, layout), "check_invariants": False}
    return torch.sparse_compressed_tensor(starts, places, values, shape, requires_grad=requires_grad, **options)
