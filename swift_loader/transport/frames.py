"""The format of every message: a head with a checksum, then a body.

Pure: bytes in, bytes out. The body is used only after the magic, length and checksum have been checked.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

from swift_loader.errors import ProtocolError

_HEAD = struct.Struct("<4sBxxxIII")
_MAGIC = b"SwL1"

_CHECKED = struct.Struct("<BI")
"""Kind and generation. The checksum is that of these bytes and the body, one after the other: as the start value of the
body's checksum, the generation would cancel out the same change of the body's first bytes."""


class Kind(IntEnum):
    """The kind of a message. The comments name sender, receiver and meaning."""

    PAYLOAD = 1  # trainer -> template: build the dataset described by the attached file
    BUILT = 2  # template -> trainer: the dataset is built
    FORK = 3  # trainer -> template: start a worker on the attached channel
    FORKED = 4  # template -> trainer: the worker has this pid; its pidfd is attached
    EXITED = 5  # template -> trainer: that worker has exited, with this code
    BLANK = 6  # trainer -> root: import these modules, and fork a template on the attached channel
    REFUSED = 7  # root -> trainer: no template can be forked, for this reason
    WARMED = 8  # root -> trainer: the modules are imported
    READY = 10  # worker -> trainer: it accepts tasks; its counters are attached
    TASK = 12  # trainer -> worker: build this batch
    SEGMENT = 13  # worker -> trainer: batches may be in the attached memory
    BATCH = 14  # worker -> trainer: the batch is in that slot
    FAILURE = 15  # worker or template -> trainer: the user's code raised
    SKIPPED = 16  # worker -> trainer: the task belonged to an abandoned epoch
    PLAN = 17  # trainer -> worker: the tasks that follow belong to another plan
    SAMPLE_FAILED = 18  # worker -> trainer: this sample failed; the next batch is without it
    SEGMENT_GONE = 21  # worker -> trainer: no more batches will be in that memory
    STREAM_ENDED = 22  # worker -> trainer: its shard of the stream had no batch left for the task
    STATE = 23  # worker -> trainer: the state of its dataset after the next batch
    IDENTITY = 24  # trainer -> worker: which of the n workers it is
    HUNG = 25  # trainer -> worker: a worker hung at this sample; it fails in this epoch


_KINDS = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """A message that passed its checks."""

    kind: Kind
    generation: int
    """Increases each time the loop jumps to another place; tells leftovers of an abandoned epoch from expected data."""
    body: memoryview


class Received(NamedTuple):
    """A message as it came. `data` is valid until the next `receive` on the same channel."""

    data: memoryview
    descriptors: list[int]
    """Owned by the caller of `receive`. Empty where the system can't send descriptors."""


def pack_frame(kind: Kind, body: bytes = b"", generation: int = 0) -> bytes:
    """Return the bytes of a message."""
    return _HEAD.pack(_MAGIC, kind, generation, len(body), _checksum(kind, generation, body)) + body


def _checksum(kind: int, generation: int, body: bytes | memoryview) -> int:
    return crc32(body, crc32(_CHECKED.pack(kind, generation)))


def unpack_frame(data: memoryview) -> Frame:
    """Return the message in `data`. Its body is a view of `data`.

    Raises `ProtocolError` if the magic, kind, length or checksum is wrong.
    """
    if len(data) < _HEAD.size:
        raise ProtocolError(f"a message of {len(data)} bytes is shorter than its head of {_HEAD.size}")
    magic, kind, generation, length, checksum = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC:
        raise ProtocolError(f"a message begins with {magic!r} instead of {_MAGIC!r}")
    if length != len(body) or checksum != _checksum(kind, generation, body):
        raise ProtocolError(f"a message of kind {kind} with a body of {len(body)} bytes has a wrong length or checksum")
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(f"a message has the unknown kind {kind}")
    return Frame(known, generation, body)
