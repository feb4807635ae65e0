"""What every message looks like on the wire: a checked head, then a body.

Pure: bytes in, bytes out. A frame is looked at only after its magic, length and checksum have been found right.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

from swift_loader.errors import ProtocolError

__all__ = ["Frame", "Kind", "pack_frame", "unpack_frame"]

_HEAD = struct.Struct("<4sBxxxIII")
_MAGIC = b"SwL1"

_KIND_FACTOR = 0x9E3779B1
"""Odd, so that kinds differ, and large, so that a kind isn't made up for by a few bits of the generation."""


class Kind(IntEnum):
    """What a message is; the comment names sender and receiver."""

    SETUP = 1  # trainer -> template: build the dataset described by the attached descriptor
    BUILT = 2  # template -> trainer: the dataset stands
    FORK = 3  # trainer -> template: start a worker on the attached channel
    FORKED = 4  # template -> trainer: it has this pid; its pidfd is attached
    EXITED = 5  # template -> trainer: that worker is gone, with this status
    READY = 10  # worker -> trainer: takes tasks; its board is attached
    PROBE = 11  # trainer -> worker: build the first batch, as a trial
    TASK = 12  # trainer -> worker: build this batch
    SEGMENT = 13  # worker -> trainer: batches may lie in the attached memory
    BATCH = 14  # worker -> trainer: the batch is in that slot
    FAILURE = 15  # worker or template -> trainer: the user's code raised
    SKIPPED = 16  # worker -> trainer: the task belonged to an epoch that was left
    PLAN = 17  # trainer -> worker: the tasks that follow belong to another plan
    SAMPLE_FAILED = 18  # worker -> trainer: the batch that comes next does without this sample
    VERIFY = 19  # trainer -> worker or template: why may the samples that were reported differ from those elsewhere?
    VERIFIED = 20  # worker or template -> trainer: that is why
    SEGMENT_GONE = 21  # worker -> trainer: no batch will lie in that memory any more


_KINDS = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """A message that passed its checks."""

    kind: Kind
    generation: int
    """Counts the times the loop was sent elsewhere; tells leftovers of an abandoned epoch from what is awaited."""
    body: memoryview


def pack_frame(kind: Kind, body: bytes = b"", generation: int = 0) -> bytes:
    """Return the bytes of a message."""
    return _HEAD.pack(_MAGIC, kind, generation, len(body), _checksum(kind, generation, body)) + body


def _checksum(kind: int, generation: int, body: bytes | memoryview) -> int:
    return crc32(body, generation ^ kind * _KIND_FACTOR & 0xFFFFFFFF)


def unpack_frame(data: memoryview) -> Frame:
    """Return the message in `data`, whose body is a view of it.

    Raises:
        ProtocolError: magic, kind, length or checksum are not what a sender of this version writes.
    """
    if len(data) < _HEAD.size:
        raise ProtocolError(f"a message of {len(data)} bytes is shorter than its head of {_HEAD.size}")
    magic, kind, generation, length, checksum = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC:
        raise ProtocolError(f"a message begins with {magic!r} instead of {_MAGIC!r}")
    if length != len(body) or checksum != _checksum(kind, generation, body):
        raise ProtocolError(f"a message of kind {kind} with a body of {len(body)} bytes fails its length or checksum")
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(f"a message has the unknown kind {kind}")
    return Frame(known, generation, body)
