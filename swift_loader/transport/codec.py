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
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.batch.tree import find_unencodable, type_name
from swift_loader.errors import EncodeError, ProtocolError
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.encoder import DEFINITION, PLAIN_KINDS, ROW, CodeNeeded, Encoded, Encoder

_CODE_MARK = b"\0"
"""First byte of a package with code, before its pickle. A pickle starts with another byte."""

_HINT = "Return arrays, tensors, numbers, strings or containers of them, or pass batch_encoder and batch_decoder"


def encode(batch: object, arena: Arena, definitions: Definitions) -> Encoded:
    """Copy the bulk data of a batch into the arena, except what was made in it, and return the rest.

    `batch`: anything that pickle or this codec can serialise. `definitions`: those that the receiver knows. Raises
    `EncodeError` that names the path and the type of a part that can't be sent.
    """
    stream = io.BytesIO()
    encoder = Encoder(stream, arena, definitions)
    needs_code = False
    try:
        try:
            encoder.dump(batch)
            return encoder.encoded(stream)
        except CodeNeeded:
            needs_code = True
            return _encode_package(batch, arena, definitions, has_run_script=True)[0]
    except EncodeError:
        raise
    except Exception as error:
        attempt = try_out if needs_code else partial(_dry_run, definitions=definitions)
        path, culprit, reason = find_unencodable(batch, error, attempt)
        what = f"batch{path} is a {type_name(culprit)}, which can't be sent to the trainer"
        raise EncodeError(f"{what} ({type(reason).__name__}: {reason})", _HINT) from error


class BatchEncoder:
    """Encodes one batch after another, and pickles a flat structure only if it isn't that of the last batch."""

    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions
        self._layout: list[Any] | None = None
        self._structure = b""

    def encode(self, batch: object, arena: Arena) -> Encoded:
        """Return the same as `encode`."""
        layout, rows = _flat_layout(batch, arena)
        if layout is not None and layout == self._layout:
            return Encoded(b"".join([ROW.pack(*row) for row in rows]) + self._structure, len(rows))
        encoded = encode(batch, arena, self._definitions)
        self._layout, self._structure = layout, encoded.meta[len(rows) * ROW.size :]
        return encoded


def _flat_layout(batch: Any, arena: Arena) -> tuple[list[Any] | None, list[tuple[int, int]]]:
    """Return all that the pickle of a flat batch depends on, and where its leaves are in the arena.

    None if that can't be told at a glance: a leaf that the arena didn't make, or that occurs twice; an array with
    strides or with metadata of its dtype; a tensor with a gradient or attributes.
    """
    kind, rows, seen = type(batch), [], set()
    layout: list[Any]
    if kind is dict and all(type(name) is str for name in batch):
        layout, leaves = [kind, *batch], batch.values()
    elif kind is list or kind is tuple:
        layout, leaves = [kind, len(batch)], batch
    else:
        layout, leaves = [], (batch,)
    for leaf in leaves:
        block = arena.find(leaf)
        if block is None or id(leaf) in seen or not len(block.memory):
            return None, []
        if type(leaf) is np.ndarray:
            is_plain = leaf.dtype.kind in PLAIN_KINDS and not leaf.dtype.metadata and leaf.flags.c_contiguous
        else:
            is_plain = not leaf.requires_grad and not leaf.__dict__ and leaf.is_contiguous()
        if not is_plain:
            return None, []
        seen.add(id(leaf))
        layout += (type(leaf), leaf.dtype, leaf.shape, block.arrives_as_tensor)
        rows.append((block.offset, len(block.memory)))
    return layout, rows


def encode_with_code(content: object) -> tuple[Encoded, Arena, list[object]]:
    """Return an object's structure, its bulk data, and the classes and functions that are sent by value.

    For a process that hasn't run the user's script. `content`: anything that pickle can serialise, and code, locks and
    the like that scripts hold. The arena refers to the content's own memory until it is moved. Raises `EncodeError` if
    the code can't be sent, because of a global variable that it uses or an attribute of a class; another error if the
    content can't be sent.
    """
    from swift_loader.transport.code import CodeEncoder

    stream, arena = io.BytesIO(), Arena(np.empty(0, np.uint8), copies_late=True)
    encoder = CodeEncoder(stream, arena, Definitions(), None)
    try:
        encoder.dump(content)
    except CodeNeeded:
        arena = Arena(np.empty(0, np.uint8), copies_late=True)
        encoded, things = _encode_package(content, arena, Definitions(), has_run_script=False)
        return encoded, arena, things
    return encoder.encoded(stream), arena, []


def _encode_package(
    content: object, arena: Arena, definitions: Definitions, *, has_run_script: bool
) -> tuple[Encoded, list[object]]:
    from swift_loader.transport.code import CodeEncoder, Walk

    stream = io.BytesIO(_CODE_MARK)
    stream.seek(len(_CODE_MARK))
    walk = Walk(content, definitions, has_run_script=has_run_script)
    encoder = CodeEncoder(stream, arena, definitions, walk)
    encoder.dump_package(content, walk)
    return encoder.encoded(stream), walk.things


def try_out(part: object) -> None:
    """Raise if an object can't be sent, not even together with its code."""
    from swift_loader.transport.code import Finder

    Finder().dump(part)


def decode(meta: memoryview, num_blocks: int, memory: NDArray[np.uint8], definitions: Definitions) -> Any:
    """Return the batch whose bulk data is in `memory`.

    `meta` and `num_blocks`: those of `Encoded`. `memory`: `(n,) uint8`, writable. The larger arrays of the batch are
    views of it and keep it alive. `definitions`: the encoder's, in the same order. Raises `ProtocolError` if a buffer
    lies outside the memory, or what a class of the batch raised while it was rebuilt.
    """
    rows, structure = _take_table(meta, num_blocks)
    buffers = _buffers(rows, memory, definitions)
    if structure[:1] == _CODE_MARK:
        return pickle.loads(structure[len(_CODE_MARK) :], buffers=buffers)[-1]
    return pickle.loads(structure, buffers=buffers)


def decode_with_code(meta: memoryview, num_blocks: int, memory: NDArray[np.uint8]) -> tuple[Any, list[object]]:
    """Return the object that `encode_with_code` encoded, and the classes and functions sent with it, in order."""
    rows, structure = _take_table(meta, num_blocks)
    buffers = _buffers(rows, memory, Definitions())
    if structure[:1] == _CODE_MARK:
        _, things, _, _, content = pickle.loads(structure[len(_CODE_MARK) :], buffers=buffers)
        return content, things
    return pickle.loads(structure, buffers=buffers), []


def _take_table(meta: memoryview, num_blocks: int) -> tuple[Iterator[tuple[int, int]], memoryview]:
    table_nbytes = num_blocks * ROW.size
    if table_nbytes > len(meta):
        raise ProtocolError(f"a batch of {num_blocks} buffers has a structure of only {len(meta)} bytes")
    # Not iter_unpack: if its iterator is in a cycle with the traceback of a failed decode, CPython 3.11's garbage
    # collector crashes. It clears an exported memoryview before the export is released.
    numbers = struct.unpack_from(f"<{2 * num_blocks}Q", meta)
    return zip(numbers[::2], numbers[1::2], strict=True), meta[table_nbytes:]


def _buffers(
    rows: Iterator[tuple[int, int]], memory: NDArray[np.uint8], definitions: Definitions
) -> Iterator[NDArray[np.uint8] | object]:
    """Yield what the unpickler pushes at each out-of-band mark. It accepts any object, so definitions work, too."""
    limit = len(memory)
    plain = memory.view(np.ndarray)  # slicing it is far faster than slicing a subclass; `memory` stays its base
    for offset, nbytes in rows:
        if nbytes == DEFINITION:
            yield definitions[offset]
        elif offset + nbytes > limit:
            raise ProtocolError(f"a buffer at [{offset}, {offset + nbytes}) lies outside a slot of {limit} bytes")
        else:
            yield plain[offset : offset + nbytes]


def _dry_run(part: object, definitions: Definitions) -> None:
    with suppress(CodeNeeded):
        Encoder(io.BytesIO(), Arena(np.empty(0, np.uint8)), definitions).dump(part)
