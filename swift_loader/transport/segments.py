"""Shared memory without a name, and what a worker shows of its progress in a page of it.

A segment is a `memfd`: it has no name to leak or guess, the size of /dev/shm doesn't limit it, and the kernel frees it
with the last process that maps it. Its pages are reserved when it is created, so writing to it can't raise SIGBUS.

It is mapped through libc, because `mmap.mmap` keeps a duplicate of the descriptor until it is closed (always before
Python 3.13, by default since then). The number of descriptors must not grow with the batches that the user keeps.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import NoDescriptorsLeft, SharedMemoryFull
from swift_loader.transport.channel import new_memfd
from swift_loader.transport.slots import RecycledSlots

if sys.platform != "win32":  # there, torch maps the memory
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

SHARED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0) if sys.platform != "win32" else 0
"""How a segment is mapped. macOS doesn't fill the page table ahead."""

_LIMIT = "the memory that the process may use (free memory, cgroup, RLIMIT_FSIZE), not /dev/shm"

_MAX_PIECES = 1000
"""pwritev(2) takes 1,024."""

_MAP_FAILED = ctypes.c_void_p(-1).value


def capacity_for(nbytes: int) -> int:
    """Return the size of a segment for a batch of `nbytes`: up to 1/8 more, so that similar batches can reuse it."""
    unit = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // unit) * unit


class Segment:
    """A mapping of shared memory in this process. It is unmapped when its last reference is gone."""

    __slots__ = ("__weakref__", "_unmap", "address", "before_unmapping", "memory", "nbytes")

    def __init__(self, address: int, nbytes: int, unmap: Callable[[], object]) -> None:
        """Own a mapping. `unmap` ends it; it may run on any thread, and while the interpreter exits."""
        self._unmap = unmap
        self.before_unmapping: Callable[[], bool] | None = None
        """A callback for when the last reference is gone; None: no callback. It runs on any thread, and must not raise.

        If it returns False, the memory stays mapped until the process ends.
        """
        self.nbytes = nbytes
        self.address = address
        """Start address in this process: a multiple of the page size, as are the lengths from `capacity_for`."""
        self.memory = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        """The bytes, as a buffer that doesn't keep the segment alive: its user must hold the segment, too."""

    @classmethod
    def map(cls, descriptor: int, nbytes: int, flags: int) -> Segment:
        """Return a mapping of a file's first bytes. The descriptor stays open.

        Raises `SharedMemoryFull` if the mapping failed.
        """
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        if address in (None, _MAP_FAILED):
            code = ctypes.get_errno()
            raise SharedMemoryFull(code, f"mapping {nbytes} bytes of shared memory failed: {os.strerror(code)}")
        return cls(address, nbytes, partial(_libc.munmap, address, nbytes))

    @classmethod
    def private(cls, nbytes: int) -> Segment:
        """Return memory of this process, of which a fork gets a copy. Raises `SharedMemoryFull` if there is none."""
        if sys.platform == "win32":  # there are no forks
            buffer = mmap.mmap(-1, nbytes)
            return cls(ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer)), nbytes, partial(len, buffer))
        return cls.map(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    @classmethod
    def create(cls, nbytes: int) -> tuple[Segment, int]:
        """Return a new segment and its descriptor, which the caller passes on and closes.

        Raises `SharedMemoryFull` if there is not enough memory, or there are no file descriptors left.
        """
        descriptor = _new_memfd(nbytes)
        try:
            try:
                os.posix_fallocate(descriptor, 0, nbytes)  # reserves the pages
            except OSError as error:
                raise reserving_failed(error, nbytes, _LIMIT) from None
            _seal(descriptor)
            return cls.map(descriptor, nbytes, SHARED), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, descriptor: int, nbytes: int, *, private: bool = False) -> Segment:
        """Return a mapping of another process's segment, and close its descriptor, also if it raises.

        `private`: keep writes in this process (copy on write). Raises `SharedMemoryFull` if the mapping failed, or the
        segment is smaller than `nbytes`.
        """
        try:
            size = os.fstat(descriptor).st_size
            if nbytes > size:
                raise SharedMemoryFull(errno.EFAULT, f"a segment of {size} bytes was announced with {nbytes}")
            flags = mmap.MAP_PRIVATE if private else SHARED
            return cls.map(descriptor, nbytes, flags)
        finally:
            os.close(descriptor)

    @classmethod
    def map_file(cls, descriptor: int, nbytes: int, *, writes_through: bool) -> Segment:
        """Return a mapping of a file's first bytes that lasts until the process ends, and close the descriptor."""
        try:
            segment = cls.map(descriptor, nbytes, mmap.MAP_SHARED if writes_through else mmap.MAP_PRIVATE)
        finally:
            os.close(descriptor)
        segment.before_unmapping = lambda: False
        return segment

    def array(self) -> NDArray[np.uint8]:
        """Return `(nbytes,) uint8` over the whole segment. It is valid while the segment exists."""
        return np.frombuffer(self.memory, np.uint8)

    def __del__(self) -> None:  # uses no global: at exit, the module's names may be gone
        if self.before_unmapping is None or self.before_unmapping():
            self._unmap()


class PrivateSlots(RecycledSlots[Segment]):
    """Slots in this process's own memory."""

    def make(self, slot: int, nbytes: int) -> Segment:  # noqa: ARG002
        """Return memory for similar batches, too. Raises `SharedMemoryFull` if there is none."""
        return Segment.private(capacity_for(nbytes))


class SegmentPool:
    """Segments of workers that have ended, which the loader's next workers use again: making one takes far longer.

    Those are forks of this process, so they have the same mappings. Any thread, also in a finaliser.
    """

    def __init__(self) -> None:
        self._free: list[Segment] = []
        self._process = os.getpid()

    def add(self, segments: Iterable[Segment]) -> None:
        """Keep segments that nobody uses, for the next workers. Not page-locked ones: no fork may inherit these."""
        if self._process == os.getpid():
            self._free.extend(segment for segment in segments if segment.before_unmapping is None)

    def deal(self, num_workers: int) -> dict[int, list[Segment]]:
        """Return the parts of the next workers, by id, which then are theirs. In a fork of the program: none."""
        if self._process != os.getpid():  # the segments are the parent's, whose workers write to them
            self._free, self._process = [], os.getpid()
        free, self._free = self._free, []
        return {worker_id: free[worker_id::num_workers] for worker_id in range(num_workers)}


def new_file(pieces: Iterable[NDArray[np.uint8]], nbytes: int) -> int:
    """Return the descriptor of a new anonymous file. Writing takes half as long as mapping the file to fill it.

    `pieces`: its content, front to back. `nbytes`: its size; the rest is zeros. Raises `SharedMemoryFull` if there is
    not enough memory, or there are no file descriptors left.
    """
    descriptor = _new_memfd(nbytes)
    try:
        try:
            write_pieces(descriptor, iter(pieces))
            os.ftruncate(descriptor, nbytes)
        except OSError as error:
            raise reserving_failed(error, nbytes, _LIMIT) from None
        _seal(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_pieces(descriptor: int, pieces: Iterator[Any], position: int = 0) -> None:
    """Write buffers one after another, from this position of a file on. Raises `OSError` if there is no space."""
    while views := [memoryview(piece) for piece in islice(pieces, _MAX_PIECES)]:
        while views:
            written = os.pwritev(descriptor, views, position)  # maybe not all: 2 GiB at most
            position += written
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]


def _new_memfd(nbytes: int) -> int:
    try:
        return new_memfd("swift_loader")
    except NoDescriptorsLeft as error:
        raise SharedMemoryFull(
            error.errno, f"creating {nbytes} bytes of shared memory failed: {error.strerror}"
        ) from None


def _seal(descriptor: int) -> None:
    """Seal a memfd, so that only mappings can change its content: its size is fixed, and write(2) fails.

    A process whose standard streams are closed may receive the memfd as one of them. If other code prints at that
    moment, the write goes to the end of the file, and fails because the file can't grow.
    """
    import fcntl  # not on Windows

    with suppress(OSError):  # some systems that emulate Linux have no seals
        os.lseek(descriptor, 0, os.SEEK_END)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)


def reserving_failed(error: OSError, nbytes: int, limit: str) -> SharedMemoryFull:
    """Return the error for shared memory that couldn't be reserved. `limit` says what limits it."""
    code = error.errno or errno.ENOMEM
    return SharedMemoryFull(
        code,
        f"reserving {nbytes} bytes of shared memory failed: {os.strerror(code)}. The limit is {limit}. Lower "
        f"batch_size or data_queue_size (DataLoader: prefetch_factor), or keep fewer batches",
    )


# What a worker shows of its progress. The trainer reads it at any time, and no message is needed.
#
# Two counts are in a page of shared memory, so the trainer can read them after the worker's death, too. Only the worker
# writes to it, with plain stores of aligned words.
#
# The number of fetched samples isn't in the page: counting each sample would take longer than many samples do. The
# worker collects the samples of each batch in the same list. CPython keeps the list's length at a fixed address, and
# the trainer reads it there, in the worker's memory. The layout of a list is private to CPython, so it is checked.

NUM_BEGUN = 0
"""Index of the word that counts the tasks that the worker has started."""

NUM_LEFT_OUT = 1
"""Index of the word that counts the samples left out of the current batch."""

_NUM_WORDS = 2
"""64 bits each."""

_IN_BULK = -1
"""Written in place of the count of left-out samples while `__getitems__` fetches all samples at once."""

UNKNOWN_ADDRESS = 0
"""The address of a word in a worker's memory that the trainer can't read."""


class CounterWriter:
    """The worker's side. The thread that builds batches writes it."""

    def __init__(self) -> None:
        """Count on the heap, for this process alone."""
        self.samples: list[Any] = []
        """The samples of the batch that is being fetched. Always the same list."""
        self.words = memoryview(array("q", [0] * _NUM_WORDS))
        """The counts. `share` replaces them."""
        self._segment: Segment | None = None
        """This reference keeps the page mapped."""

    def share(self) -> int:
        """Count in a new page from now on. Return its descriptor, which the caller passes on and closes.

        Raises `SharedMemoryFull` if there is not enough memory.
        """
        segment, descriptor = Segment.create(mmap.PAGESIZE)
        self.count_in(segment)
        return descriptor

    def count_in(self, segment: Segment) -> None:
        """Count in this page from now on."""
        self._segment, self.words = segment, segment.memory.cast("q")

    def begin(self, *, in_bulk: bool) -> list[Any]:
        """Clear the list and return it, for the samples of the next batch."""
        self.samples.clear()
        self.words[NUM_LEFT_OUT] = _IN_BULK if in_bulk else 0
        return self.samples

    def fetch_one_by_one(self) -> None:
        """Record that the samples are fetched one by one from now on."""
        self.words[NUM_LEFT_OUT] = 0

    @contextmanager
    def unknown(self) -> Iterator[None]:
        """Record that it isn't known which sample is being fetched, in the `with` block."""
        num_left_out, self.words[NUM_LEFT_OUT] = self.words[NUM_LEFT_OUT], _IN_BULK
        try:
            yield
        finally:
            self.words[NUM_LEFT_OUT] = num_left_out

    def leave_out(self) -> None:
        """Record that a sample was left out of the batch."""
        self.words[NUM_LEFT_OUT] += 1

    def position_in_batch(self) -> int | None:
        """Return the position in the batch of the sample that is fetched. For another thread of the same process."""
        num_left_out = self.words[NUM_LEFT_OUT]
        return None if num_left_out < 0 else len(self.samples) + num_left_out

    def length_address(self) -> int:
        """Return the address of the list's length (64 bits); `UNKNOWN_ADDRESS` if it isn't where it is expected."""
        address = id(self.samples) + object.__basicsize__
        length = ctypes.c_ssize_t.from_address(address)
        for _ in range(2):
            if length.value != len(self.samples):
                return UNKNOWN_ADDRESS
            self.samples.append(None)
        self.samples.clear()
        return address


def read_word(pid: int, address: int) -> int | None:
    """Return a 64-bit word of another process's memory; None if the address is unknown, or the kernel doesn't allow."""
    if address == UNKNOWN_ADDRESS:
        return None
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            return int.from_bytes(os.pread(memory.fileno(), 8, address), sys.byteorder)
    except OSError:
        return None
