"""Shared memory without a name.

A segment is a `memfd`: no name to leak or to guess, not limited by the size of /dev/shm, freed by the kernel with the
last process that maps it. Its pages are reserved when it is made, so that writing to it can't raise SIGBUS.

It is mapped through libc, because `mmap.mmap` keeps a copy of the descriptor for as long as it lives (until Python
3.13, and by default there, too), and descriptors must not grow with the batches the user keeps.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import NoDescriptorsLeft, SharedMemoryFull
from swift_loader.transport.descriptors import new_memfd

__all__ = ["Segment", "capacity_for"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_MAP_FAILED = ctypes.c_void_p(-1).value


def capacity_for(nbytes: int) -> int:
    """Return the size of a segment for a batch of `nbytes`: up to 1/8 more, so that batches of like size share it."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


class Segment:
    """A mapping of shared memory in this process; unmapped when the last reference to it goes."""

    __slots__ = ("__weakref__", "_address", "_before_unmapping", "_memory", "nbytes")

    def __init__(self, descriptor: int, nbytes: int, flags: int) -> None:
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        if address in (None, _MAP_FAILED):
            code = ctypes.get_errno()
            raise SharedMemoryFull(code, f"mapping {nbytes} bytes of shared memory failed: {os.strerror(code)}")
        self._before_unmapping: Callable[[], bool] | None = None
        self.nbytes = nbytes
        self._address: int = address
        self._memory = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")

    @classmethod
    def create(cls, nbytes: int) -> tuple[Segment, int]:
        """Return a new segment and its descriptor, which the caller passes on and closes.

        Raises:
            SharedMemoryFull: The memory can't be had.
        """
        try:
            descriptor = new_memfd("swift_loader")
        except NoDescriptorsLeft as error:
            raise SharedMemoryFull(
                error.errno, f"{nbytes} bytes of shared memory can't be had: {error.strerror}"
            ) from None
        try:
            reserve(descriptor, nbytes)
            _seal(descriptor)
            return cls(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, descriptor: int, nbytes: int, *, private: bool = False) -> Segment:
        """Return a mapping of a segment made elsewhere, and close its descriptor.

        Args:
            descriptor: Owned by this call.
            nbytes: Its size.
            private: Writes stay in this process (copy on write).
        """
        try:
            size = os.fstat(descriptor).st_size
            if nbytes > size:
                raise SharedMemoryFull(errno.EFAULT, f"a segment of {size} bytes was announced with {nbytes}")
            flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED | mmap.MAP_POPULATE
            return cls(descriptor, nbytes, flags)
        finally:
            os.close(descriptor)

    def restore(self) -> None:
        """Take back what this process has written to a private mapping."""
        _libc.madvise(self._address, self.nbytes, mmap.MADV_DONTNEED)

    @classmethod
    def map_file(cls, descriptor: int, nbytes: int, *, writes_through: bool) -> Segment:
        """Return a mapping of a file's first bytes, which lasts as long as the process; close the descriptor."""
        try:
            segment = cls(descriptor, nbytes, mmap.MAP_SHARED if writes_through else mmap.MAP_PRIVATE)
        finally:
            os.close(descriptor)
        segment.before_unmapping(lambda: False)
        return segment

    @property
    def address(self) -> int:
        """Where it begins in this process; a multiple of the page size, as its length is if `capacity_for` chose it."""
        return self._address

    def before_unmapping(self, step: Callable[[], bool]) -> None:
        """Have something done when the last reference goes, on whichever thread that is; it must not raise.

        If it returns False, the memory stays mapped for as long as the process lives.
        """
        self._before_unmapping = step

    @property
    def memory(self) -> memoryview:
        """The bytes, as a buffer that doesn't keep the segment alive: whoever exports it holds the segment, too."""
        return self._memory

    def array(self) -> NDArray[np.uint8]:
        """Return `(nbytes,) uint8` over the whole segment; valid as long as the segment."""
        return np.frombuffer(self._memory, np.uint8)

    def __del__(self, _munmap: Any = _libc.munmap) -> None:  # bound here: at exit, the module's names may be gone
        address = getattr(self, "_address", None)
        if address is not None:
            if self._before_unmapping is not None and not self._before_unmapping():
                return
            _munmap(address, self.nbytes)

    def __repr__(self) -> str:
        return f"<Segment of {self.nbytes} bytes>"


def _seal(descriptor: int) -> None:
    """Have nothing but mappings change a memfd: not its size, and not its content by write(2) either.

    For the moment in which a process that has its standard streams closed has received it as one of them, and somebody
    else there writes to the stream: that would be written where the file ends, and it can't grow.
    """
    with suppress(OSError):  # not every kernel that looks like Linux has seals
        os.lseek(descriptor, 0, os.SEEK_END)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)


def reserve(descriptor: int, nbytes: int) -> None:
    """Give a memfd its size and its pages.

    Raises:
        SharedMemoryFull: The memory can't be had.
    """
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        code = error.errno or errno.ENOMEM
        raise SharedMemoryFull(
            code,
            f"reserving {nbytes} bytes of shared memory failed: {os.strerror(code)}. The limit is the memory the "
            f"process may use (free memory, cgroup, RLIMIT_FSIZE), not /dev/shm. Lower batch_size or data_queue_size, "
            f"or keep fewer batches",
        ) from None
