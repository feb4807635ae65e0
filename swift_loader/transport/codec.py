"""Encodes batches as bytes and decodes them: bulk data as raw aligned buffers, the structure as one small pickle.

Encoding runs in the worker. It copies arrays and tensors into the arena, unless they were made there; the pickle holds
only their shapes. Decoding runs in the trainer. Arrays and tensors come back as writable views of the same memory, with
dtype, shape, strides and values intact. Two references to one array stay one. Classes and functions that can't be
imported are sent by number if the receiver knows them (`Definitions`), else by value (`CodeEncoder`).

Source: PEP 574, pickle protocol 5 with out-of-band buffers.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from swift_loader.batch.tree import find_unencodable, type_name
from swift_loader.errors import EncodeError, ProtocolError
from swift_loader.transport.arena import Arena, Block
from swift_loader.transport.definitions import Definitions, travels_by_value
from swift_loader.transport.rebuild import Finished, update_attributes

if TYPE_CHECKING:
    import torch

__all__ = [
    "CodeNeeded",
    "Encoded",
    "Encoder",
    "NumberOf",
    "decode",
    "decode_bytes",
    "decode_with_code",
    "encode",
    "encode_bytes",
    "encode_with_code",
    "try_out",
]

_ROW = struct.Struct("<QQ")
"""One entry of the table of buffers: (offset, nbytes) for bulk data, (number, _DEFINITION) for a definition."""

_DEFINITION = (1 << 64) - 1

_CODE_MARK = b"\0"
"""First byte of a sequence of pickles that contains code. A single pickle starts with another byte."""

_MAX_NBYTES_IN_BAND = 512
"""Arrays up to this size go into the structure. For 12 bytes that takes 2 us; a separate block takes 12 us."""

_PLAIN_KINDS = frozenset("biufcSUmM?")
"""Kinds of dtypes that `dtype.str` describes completely."""


@dataclass(slots=True)
class Encoded:
    """A batch without the bulk data, which is in the arena."""

    meta: bytes
    """The table of the buffers, then the pickled structure."""
    num_blocks: int


class CodeNeeded(Exception):
    """A batch holds a class or function that the receiver doesn't know."""


NumberOf = Callable[[object], "int | None"]
"""Returns the peer's number of a class or function; None if the peer doesn't know it and needs its code."""


def encode(batch: object, arena: Arena, number_of: NumberOf) -> Encoded:
    """Copy the bulk data of a batch into the arena, and return the rest.

    Args:
        batch: Anything that pickle or this codec can serialise.
        arena: Receives the bulk data, except what was made in it.
        number_of: `Definitions.number_of`; or `Definitions.add`, to collect the definitions that the peer needs.

    Raises:
        EncodeError: A part of the batch can't be sent; the message names its path and its type.
    """
    stream = io.BytesIO()
    encoder = Encoder(stream, arena, number_of)
    try:
        encoder.dump(batch)
    except CodeNeeded:
        return _encode_with_code(batch, arena, number_of, None)
    except Exception as error:
        attempt = partial(_dry_run, number_of=number_of)
        raise EncodeError(_explain(batch, error, attempt)) from error
    return encoder.encoded(stream)


def encode_with_code(content: object, note: Callable[[object], object]) -> tuple[Encoded, Arena]:
    """Return an object's structure and its bulk data, for a process that hasn't run the user's script.

    Args:
        content: Anything that pickle can serialise, and code, locks and the like that scripts hold.
        note: Is called with each class and function that is sent by value.

    Raises:
        EncodeError: The code can't be sent, because of a global variable that it uses or an attribute of a class.
        Exception: The content can't be sent.
    """
    from swift_loader.transport.code import CodeEncoder

    stream, arena = io.BytesIO(), Arena(np.empty(0, np.uint8))
    encoder = CodeEncoder(stream, arena, _number_of_nothing, note, sends_code=False)
    try:
        encoder.dump(content)
    except CodeNeeded:
        arena = Arena(np.empty(0, np.uint8))
        return _encode_with_code(content, arena, _number_of_nothing, note), arena
    return encoder.encoded(stream), arena


def _explain(batch: object, error: Exception, attempt: Callable[[object], None]) -> str:
    path, culprit, reason = find_unencodable(batch, error, attempt)
    return (
        f"batch{path} is a {type_name(culprit)}, which can't be sent to the trainer "
        f"({type(reason).__name__}: {reason}). Return arrays, tensors, numbers, strings or containers of them, or "
        f"pass batch_encoder and batch_decoder"
    )


def _number_of_nothing(thing: object) -> None:
    """Return None for everything: the receiver knows no definitions."""


def _encode_with_code(
    content: object, arena: Arena, number_of: NumberOf, note: Callable[[object], object] | None
) -> Encoded:
    from swift_loader.transport.code import CodeEncoder

    stream = io.BytesIO(_CODE_MARK)
    stream.seek(len(_CODE_MARK))
    encoder = CodeEncoder(stream, arena, number_of, note)
    try:
        encoder.write(content)
    except EncodeError:
        raise
    except Exception as error:
        if note is not None:
            raise
        raise EncodeError(_explain(content, error, try_out)) from error
    return encoder.encoded(stream)


def try_out(part: object) -> None:
    """Raise if an object can't be sent, not even together with its code."""
    from swift_loader.transport.trial import Trial

    Trial().dump(part)


def decode(meta: memoryview, num_blocks: int, memory: NDArray[np.uint8], definitions: Definitions) -> Any:
    """Return the batch whose bulk data is in `memory`.

    Args:
        meta: The value of `Encoded.meta`.
        num_blocks: The value of `Encoded.num_blocks`.
        memory: `(n,) uint8`, writable. The larger arrays of the batch are views of it and keep it alive.
        definitions: The encoder's, in the same order.

    Raises:
        ProtocolError: A buffer lies outside the memory.
        Exception: A class of the batch raised this while it was rebuilt.
    """
    rows, structure = _take_table(meta, num_blocks)
    buffers = _buffers(rows, memory, definitions)
    if structure[:1] == _CODE_MARK:
        return _load_with_code(structure, buffers).content
    return pickle.loads(structure, buffers=buffers)


def decode_with_code(meta: memoryview, num_blocks: int, memory: NDArray[np.uint8]) -> tuple[Any, list[object]]:
    """Return the object that `encode_with_code` encoded, and the classes and functions sent with it, in order."""
    rows, structure = _take_table(meta, num_blocks)
    buffers = _buffers(rows, memory, Definitions())
    if structure[:1] == _CODE_MARK:
        finished = _load_with_code(structure, buffers)
        return finished.content, finished.things
    return pickle.loads(structure, buffers=buffers), []


def _take_table(meta: memoryview, num_blocks: int) -> tuple[Iterator[tuple[int, int]], memoryview]:
    table_nbytes = num_blocks * _ROW.size
    if table_nbytes > len(meta):
        raise ProtocolError(f"a batch of {num_blocks} buffers has a structure of only {len(meta)} bytes")
    # Not iter_unpack: if its iterator is in a cycle with the traceback of a failed decode, CPython 3.11's garbage
    # collector crashes. It clears an exported memoryview before the export is released.
    numbers = struct.unpack_from(f"<{2 * num_blocks}Q", meta)
    return zip(numbers[::2], numbers[1::2], strict=True), meta[table_nbytes:]


def _load_with_code(structure: memoryview, buffers: Iterator[Any]) -> Finished:
    unpickler = pickle.Unpickler(io.BytesIO(structure[len(_CODE_MARK) :]), buffers=buffers)
    loaded = None
    while not isinstance(loaded, Finished):
        loaded = unpickler.load()
    return loaded


def encode_bytes(data: object, arena: Arena) -> Encoded:
    """Copy the output of the user's `batch_encoder` into the arena, and return what `decode_bytes` needs to find it.

    Raises:
        TypeError: `data` isn't bytes, a bytearray or a memoryview.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"batch_encoder returned a {type_name(data)}; it must return bytes")
    block = arena.place(np.frombuffer(data, np.uint8))
    return Encoded(_ROW.pack(block.offset, len(block.memory)), 1)


def decode_bytes(meta: memoryview, memory: NDArray[np.uint8]) -> bytes:
    """Return a copy of the bytes that the user's `batch_encoder` returned for a batch.

    Raises:
        ProtocolError: The bytes lie outside the memory.
    """
    offset, nbytes = _ROW.unpack(meta)
    if offset + nbytes > len(memory):
        raise ProtocolError(f"a batch at [{offset}, {offset + nbytes}) lies outside a slot of {len(memory)} bytes")
    return memory[offset : offset + nbytes].tobytes()


def _buffers(
    rows: Iterator[tuple[int, int]], memory: NDArray[np.uint8], definitions: Definitions
) -> Iterator[NDArray[np.uint8] | object]:
    """Yield what the unpickler pushes at each out-of-band mark. It accepts any object, so definitions work, too."""
    limit = len(memory)
    plain = memory.view(np.ndarray)  # slicing it is far faster than slicing a subclass; `memory` stays its base
    for offset, nbytes in rows:
        if nbytes == _DEFINITION:
            yield definitions[offset]
        elif offset + nbytes > limit:
            raise ProtocolError(f"a buffer at [{offset}, {offset + nbytes}) lies outside a slot of {limit} bytes")
        else:
            yield plain[offset : offset + nbytes]


class Encoder(pickle.Pickler):
    """The C pickler, with special handling of arrays, tensors and definitions that can't be imported."""

    def __init__(self, stream: io.BytesIO, arena: Arena, number_of: NumberOf) -> None:
        # The callback isn't a method of this object: that cycle would keep each batch until the garbage collector runs.
        self._buffers = _Buffers(arena)
        super().__init__(stream, protocol=5, buffer_callback=self._buffers.note)
        self._arena = arena
        self._number_of = number_of
        self.rows = self._buffers.rows

    def encoded(self, stream: io.BytesIO) -> Encoded:
        """Return the table of buffers, followed by what was written to the stream."""
        table = b"".join([_ROW.pack(*row) for row in self.rows])
        return Encoded(table + stream.getbuffer(), len(self.rows))

    def reducer_override(self, obj: Any) -> Any:  # noqa: D102 - pickle's
        kind = type(obj)
        if kind is np.ndarray:
            return NotImplemented if obj.dtype.hasobject else self._reduce_array(obj)
        if kind is type or kind is FunctionType or isinstance(obj, type):
            return self._reduce_definition(obj) if travels_by_value(obj) else NotImplemented
        torch = sys.modules.get("torch")
        if torch is not None and kind is torch.Tensor:
            return self._reduce_tensor(obj, torch)
        return NotImplemented

    def _reduce_array(self, array: NDArray[Any]) -> Any:
        block = self._arena.find(array)
        if block is None and array.nbytes <= _MAX_NBYTES_IN_BAND and (array.ndim <= 1 or array.flags.c_contiguous):
            return np.ndarray, (array.shape, array.dtype, bytearray(array.tobytes()))
        order: Literal["C", "F"] = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        if block is None:
            block = self._arena.allocate(array.nbytes)
            target: NDArray[Any] = np.ndarray(array.shape, array.dtype, buffer=block.memory, order=order)
            target[...] = array
        dtype = array.dtype
        named = dtype.str if dtype.kind in _PLAIN_KINDS and not dtype.metadata and not dtype.subdtype else dtype
        return _rebuild_array, (self._mark_block(block), named, array.shape, order)

    def _reduce_tensor(self, tensor: torch.Tensor, torch: ModuleType) -> Any:
        if not self.can_reduce_tensor(tensor):
            return NotImplemented
        rebuild, fields = self._take_apart(tensor, torch)
        if tensor.__dict__:
            return rebuild, fields, tensor.__dict__, None, None, update_attributes
        return rebuild, fields

    @staticmethod
    def can_reduce_tensor(tensor: torch.Tensor) -> bool:
        """Return whether a tensor's elements can be copied. If not, torch's own `__reduce_ex__` is used.

        Raises:
            TypeError: The tensor can't be sent at all.
        """
        if tensor.requires_grad and not tensor.is_leaf:
            raise TypeError("a tensor that requires grad and isn't a leaf can't be sent; call detach() on it")
        return tensor.device.type == "cpu" and not tensor.is_quantized and not tensor.is_nested

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
        if block is None:
            dense, stride = _dense(tensor.detach().resolve_conj().resolve_neg())
            block = self._arena.place(dense.view(torch.uint8).numpy())
        fields = str(tensor.dtype)[len("torch.") :], tuple(tensor.shape), stride, tensor.requires_grad
        return _rebuild_tensor, (self._mark_block(block), *fields)

    def _reduce_definition(self, thing: type | FunctionType) -> Any:
        number = self._number_of(thing)
        if number is None:
            return self._reduce_code(thing)
        return _identity, (self._buffers.mark((number, _DEFINITION), pickle.PickleBuffer(bytearray(1))),)

    def _reduce_code(self, thing: type | FunctionType) -> Any:  # noqa: ARG002
        """Reduce a definition that the receiver doesn't know. Overridden by the encoder that can send code."""
        raise CodeNeeded

    def _mark_block(self, block: Block) -> pickle.PickleBuffer:
        return self._buffers.mark((block.offset, len(block.memory)), pickle.PickleBuffer(cast(Any, block.memory)))


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


def _dry_run(part: object, number_of: NumberOf) -> None:
    with suppress(CodeNeeded):
        Encoder(io.BytesIO(), Arena(np.empty(0, np.uint8)), number_of).dump(part)


# Pickles refer to these functions by name. Renaming one is safe: both sides of a loader run the same version.


def _identity(thing: object) -> object:
    return thing


def _rebuild_array(buffer: NDArray[np.uint8], dtype: str | np.dtype[Any], shape: tuple[int, ...], order: Any) -> Any:
    return np.ndarray(shape, dtype, buffer, 0, None, order)


def _rebuild_tensor(
    buffer: NDArray[np.uint8], dtype_name: str, shape: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name)
    if not len(buffer):
        return torch.empty_strided(shape, stride, dtype=dtype, requires_grad=requires_grad)
    tensor = torch.frombuffer(buffer, dtype=dtype).as_strided(shape, stride)
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
