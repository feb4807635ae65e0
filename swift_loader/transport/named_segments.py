"""Shared memory with names, for systems that can't send a descriptor to another process.

The worker creates a segment and announces it. The trainer attaches it and removes its name at once. From then on the
memory lives as long as its mappings. The names of a worker are numbered. So the trainer also finds the one that the
worker created but couldn't announce, because it was killed.

On Windows this is `multiprocessing.shared_memory`; there a name lasts as long as its mappings. Elsewhere it is made of
the same functions. The class itself would start a resource tracker there, which is a further process for the trainer
and for each worker, and which removes names that are still in use (always before Python 3.13).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from swift_loader.errors import SharedMemoryFull
from swift_loader.transport.segments import Segment, reserving_failed

if sys.platform == "win32":
    from multiprocessing.shared_memory import SharedMemory
else:
    import _posixshmem  # type: ignore[import-not-found] # typeshed has no stub

_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0) if sys.platform != "win32" else 0

_CHUNK = bytes(1 << 16)

_LIMIT = "the size of /dev/shm, or the memory that the process may use"


class SegmentNames:
    """The names of one worker's segments. macOS allows 31 characters."""

    def __init__(self, prefix: str = "") -> None:
        """Use this prefix; by default a new one that nobody else has. It has the number of this process."""
        self.prefix = prefix or f"swl_{os.getpid()}_{secrets.token_hex(4)}"

    def of(self, slot: int | None) -> str:
        """Return the name of a slot's segment; of the page of counters, if it is None."""
        return f"{self.prefix}_{'c' if slot is None else slot}"

    def unlink_from(self, slot: int) -> None:
        """Remove the names of this slot, of all later ones and of the counters, as far as they exist."""
        unlink(self.of(None))
        while unlink(self.of(slot)):
            slot += 1


def create(name: str, nbytes: int) -> Segment:
    """Return a new segment.

    Raises:
        SharedMemoryFull: There is not enough memory, or there are no file descriptors left.
    """
    if sys.platform == "win32":
        memory = SharedMemory(name, create=True, size=nbytes)
        return map_buffer(memory, nbytes)
    try:
        descriptor = _posixshmem.shm_open(f"/{name}", os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    except OSError as error:
        raise reserving_failed(error, nbytes, "the number of file descriptors, or access to /dev/shm") from None
    try:
        _reserve(descriptor, nbytes)
        return Segment.map(descriptor, nbytes, _FLAGS)
    except BaseException:
        unlink(name)
        raise
    finally:
        os.close(descriptor)


def attach(name: str, nbytes: int) -> Segment:
    """Return a mapping of another process's segment, and remove its name.

    Raises:
        FileNotFoundError: There is no such segment, because the process that created it has ended.
        SharedMemoryFull: The mapping failed, or the segment is smaller than `nbytes`.
    """
    if sys.platform == "win32":
        return map_buffer(SharedMemory(name), nbytes)
    descriptor = _posixshmem.shm_open(f"/{name}", os.O_RDWR, mode=0o600)
    try:
        unlink(name)
        size = os.fstat(descriptor).st_size
        if nbytes > size:
            raise SharedMemoryFull(errno.EFAULT, f"a segment of {size} bytes was announced with {nbytes}")
        return Segment.map(descriptor, nbytes, _FLAGS)
    finally:
        os.close(descriptor)


def unlink(name: str) -> bool:
    """Remove a name. Return whether there was such a name. On Windows, do nothing."""
    if sys.platform != "win32":
        with suppress(FileNotFoundError):
            _posixshmem.shm_unlink(f"/{name}")
            return True
    return False


class _Buffer(Protocol):
    """What this module uses of `SharedMemory`."""

    @property
    def buf(self) -> memoryview: ...

    @property
    def close(self) -> Callable[[], None]: ...


def map_buffer(memory: _Buffer, nbytes: int) -> Segment:
    """Return the segment of a `SharedMemory`, which is closed with it."""
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory.buf))
    return Segment(address, nbytes, memory.close)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Set a segment's size and reserve its pages, where the system lets one write to the descriptor.

    Else a process that writes to the mapping would end by SIGBUS when memory runs out. macOS has no such limit, and
    refuses the write.
    """
    try:
        os.ftruncate(descriptor, nbytes)
        left = nbytes
        while left > 0:
            left -= os.write(descriptor, _CHUNK[:left])
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
            raise reserving_failed(error, nbytes, _LIMIT) from None
        if os.fstat(descriptor).st_size < nbytes:
            raise
