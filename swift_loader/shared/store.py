"""A file of samples that any number of processes fill and read at once: in memory, or on a disk.

    header │ cursor │ index: 8 bytes a sample │ entries, one after another: head, bulk data, structure

A sample's word in the index is 0, or says where its entry is and how long. It is written last, in one piece, so an
entry is there whole or not at all. The cursor says where the next entry goes. Nothing is ever moved, replaced or
freed: what is kept stays, and over the limit nothing more is kept. For passes that use each sample once, no other
choice gives more hits (uniform caching, Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB
2021).

Whoever makes a sample claims it first, with a lock of the kernel on one byte far behind the file's end. The lock
belongs to the opened file, and ends with the process: after a death, the sample is free again, and the space that was
allocated for it stays unused. Another lock guards the cursor, for the few microseconds of an allocation.

The cursor's page also says where the entries of a cache in memory must end, which other caches may change, and which
program was told last that the cache is full.

On a disk, all is read and written with pread(2) and pwrite(2). They fail if there is no space, or the file has become
shorter; a mapping would raise SIGBUS.

Each time that an entry on a disk is read, it is compared with its checksum. If it is damaged, it counts as missing: the
sample is made again. Assumes Linux, and a file system with locks of byte ranges.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import CacheCorrupt, CacheMismatch, SharedMemoryFull, nbytes_text, warn
from swift_loader.shared.memory import SharedMemory
from swift_loader.transport.channel import avoid_std_streams, explaining_limits
from swift_loader.transport.failpoints import failpoint
from swift_loader.transport.segments import write_pieces

Facts = dict[str, Any]
"""What a file says about the dataset whose samples it has: plain JSON types."""

_MAGIC = b"swiftldr"
_FORMAT = 1
"""Raise it when the layout changes, or how `transport.codec` rebuilds arrays and tensors."""

_COMPARED_FACTS = ("class", "length", "version")
_SALT = "salt"
"""A fact of a file whose header was changed: the checksum of the first one, which the entries go by."""

_HEADER = struct.Struct("<8sIIQI")
"""Magic, checksum of the rest, format, number of samples, length of the facts, which follow."""
_CHECKED_AT = len(_MAGIC) + 4
_MAX_HEADER_BYTES = 4096
"""One page, so that a kill leaves all or nothing of it."""

_CURSOR = struct.Struct("<QQ")
"""Where the next entry goes, and the same with all bits flipped."""
_CURSOR_AT = _MAX_HEADER_BYTES
_END_AT = _CURSOR_AT + _CURSOR.size
_TOLD_AT = _END_AT + 8
"""The program that was told last."""
_INDEX_AT = _CURSOR_AT + 4096
_WORD = struct.Struct("<Q")
_FLIPPED = (1 << 64) - 1

_UNIT = 64
"""Bytes: entries begin at multiples of it, and have a multiple of it."""
_LENGTH_BITS = 26
"""Of a word: so many units are an entry's length, the others its place. That allows 4 GiB and 16 TiB."""
_MAX_ENTRY_BYTES = _UNIT * ((1 << _LENGTH_BITS) - 1)
MAX_FILE_BYTES = _UNIT * ((1 << 64 - _LENGTH_BITS) - 1)

_HEAD = struct.Struct("<QQQQ")
"""Of an entry: the sample's index, the lengths of bulk data and structure, the number of blocks. Then a checksum."""

_SUMMED_WORDS = 512
"""A checksum is the CRC of the sums of so many words: a page's, which is what disks lose or mix up."""

_LOCKS_AT = 1 << 62
"""The lock of the cursor, then those of the samples."""

_FLOCK = struct.Struct("@hhqqi4x")
"""`struct flock` of Linux, 64-bit."""

_BUSY = frozenset({errno.EAGAIN, errno.EACCES})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})

_PATIENCE_S = 10.0
"""How long to wait for another process that makes a sample. It may be stopped, hang, or have left a fork behind."""
_LOOK_MS = (1, 2, 4, 8, 16)
"""When to look whether it is done. The kernel has no wait for such a lock that ends after a time."""


class Packed(NamedTuple):
    """A sample as bytes; see `transport.codec`."""

    data: NDArray[np.uint8]
    structure: memoryview
    num_blocks: int


class _Here:
    """What one process has of the file: a descriptor with locks of its own."""

    def __init__(self, descriptor: int) -> None:
        self.pid = os.getpid()
        self.descriptor = descriptor
        self.guard = threading.RLock()
        """Locks of the kernel don't keep apart threads of one process. This one does, at the cursor."""
        self.claimed: dict[int, int] = {}
        """Which thread makes a sample, by index."""
        self.is_full = False
        """Whether a sample of this process didn't fit."""
        self.patience_s = _PATIENCE_S
        """How long to wait for another process that makes a sample; 0 after this was in vain once."""

    def __del__(self, pid: Callable[[], int] = os.getpid, close: Callable[[int], None] = os.close) -> None:
        if self.pid == pid():  # at exit, the module's names may be gone
            close(self.descriptor)


class Store:
    """The entries of one dataset. Any thread of any process; a fork and a pickle of it have the same file."""

    def __init__(self, num_samples: int, memory: SharedMemory | None, path: str = "", limit: int = 0) -> None:
        """Use a file that exists: memory that `in_memory` begins, or one with a path, of at most `limit` bytes."""
        self.num_samples = num_samples
        self.path = path
        self.memory: Any = memory
        """`SharedMemory`. None: it is a file."""
        self.is_read_only = False
        """Whether this process may not write to the file. It has all samples then."""
        self._limit = limit
        self._salt = 0
        """Entries of a file with another one count as damaged."""
        self._program = os.urandom(_WORD.size)
        """Tells the processes that have this object from other programs."""
        self._here: dict[int, _Here] = {}
        """By process."""
        self._identity: tuple[int, int] | None = None
        """Of the file with this path: device and inode."""
        self._open_index()

    @classmethod
    def in_memory(cls, num_samples: int, nbytes: int, facts: Facts) -> Store:
        """Return an empty store in new memory. Raises `SharedMemoryFull`."""
        begin = data_offset(num_samples)
        first = _pack_header(num_samples, facts).ljust(_CURSOR_AT, b"\0") + _pack_cursor(begin)
        try:
            memory = SharedMemory([np.frombuffer(first + _WORD.pack(begin + nbytes), np.uint8)], begin + nbytes)
        except SharedMemoryFull as error:
            raise SharedMemoryFull(
                error.errno,
                f"there is no memory for a cache of {num_samples:,} samples with budget={nbytes_text(nbytes)}, and "
                f"{nbytes_text(begin)} for its index ({os.strerror(error.errno or 0)}). What is free, the cgroup, "
                f"RLIMIT_AS and RLIMIT_FSIZE limit it. Give a smaller budget=, or a file, where=",
            ) from error
        return cls(num_samples, memory)

    @classmethod
    def at(cls, memory: SharedMemory, name: str = "", facts: Facts | None = None) -> Store:
        """Return the store that is in this memory. Raises `CacheMismatch` if its facts are others than these."""
        num_samples, found = _unpack_header(memory.bytes[:_MAX_HEADER_BYTES].tobytes(), name)
        if facts is not None:
            _check_facts(name, {**found, "length": num_samples}, facts)
        return cls(num_samples, memory)

    @classmethod
    def in_file(cls, path: str, nbytes: int, facts: Facts) -> Store:
        """Return the store in a file, which is made if there is none, or if it is empty.

        A file without a version agrees with any. One that has all samples may be read-only. Raises `CacheMismatch` if
        it isn't a cache, or that of another dataset, `CacheCorrupt` if it is damaged.
        """
        num_samples = facts["length"]
        begin = data_offset(num_samples)
        store = cls(num_samples, None, path, begin + nbytes)
        try:
            is_new = os.O_CREAT * (not os.path.exists(path))  # noqa: PTH110 - else Linux may refuse a foreign file
            os.close(os.open(path, os.O_RDWR | is_new | os.O_CLOEXEC, 0o666))
        except OSError as error:
            if error.errno not in _NOT_WRITABLE or not os.access(path, os.R_OK):
                raise
            store.is_read_only = True
        descriptor = store._here_now().descriptor
        with nullcontext() if store.is_read_only else _locked(descriptor):
            nbytes_there = os.fstat(descriptor).st_size
            if nbytes_there == 0 and not store.is_read_only:
                os.pwrite(descriptor, _pack_header(num_samples, facts), 0)
            header = os.pread(descriptor, _MAX_HEADER_BYTES, 0)
            found, found_facts = _unpack_header(header, f"the cache {path!r}")
            found_facts = {"version": facts.get("version"), **found_facts, "length": found}
            _check_facts(f"the cache {path!r}", found_facts, facts)
            store._salt = found_facts.get(_SALT, _header_checksum(header))
            if nbytes_there < begin and not store.is_read_only:  # new, or its maker was killed here
                os.pwrite(descriptor, _pack_cursor(begin), _CURSOR_AT)
                os.ftruncate(descriptor, begin)
        if store.is_read_only and (num_kept := len(store.kept())) < num_samples:
            raise PermissionError(
                errno.EACCES,
                f"the cache may only be read, and has {num_kept:,} of {num_samples:,} samples; make it writable, or "
                f"complete it as a user who may write to it",
                path,
            )
        return store

    def keep_version(self, facts: Facts) -> None:
        """Write the version of these facts into the file, if it has none."""
        descriptor = self._here_now().descriptor
        if self.is_read_only or "version" not in facts:
            return
        with _locked(descriptor):
            _, found = _unpack_header(os.pread(descriptor, _MAX_HEADER_BYTES, 0), f"the cache {self.path!r}")
            if "version" not in found:
                changed = {**found, "version": facts["version"], _SALT: self._salt}
                os.pwrite(descriptor, _pack_header(self.num_samples, changed), 0)

    # What each process has of it

    def _open_index(self) -> None:
        self._index: Any = None
        """Of memory. Of a file, each word is read with a system call."""
        if self.memory is not None:
            self._index = self.memory.bytes[_INDEX_AT : data_offset(self.num_samples)].data.cast("Q")

    def _here_now(self) -> _Here:
        here = self._here.get(os.getpid())
        if here is None:  # of threads that come at once, all get that of the first
            here = self._here.setdefault(os.getpid(), _Here(self._open()))
        return here

    def rest(self) -> None:
        """Close the descriptor until it is used again, so that this process can be forked with nothing open."""
        self._here.clear()

    def _open(self) -> int:
        if self.memory is not None:
            return int(self.memory.open())
        with explaining_limits():
            mode = os.O_RDONLY if self.is_read_only else os.O_RDWR
            descriptor = avoid_std_streams(os.open(self.path, mode | os.O_CLOEXEC))
        status = os.fstat(descriptor)
        self._identity = self._identity or (status.st_dev, status.st_ino)
        if self._identity != (status.st_dev, status.st_ino):
            os.close(descriptor)
            raise CacheMismatch(f"the cache {self.path!r} was replaced by another file; start the program again")
        return descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_here", "_index")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _here={})
        self._open_index()

    # Reading

    def nbytes(self) -> int:
        """Return how many bytes of entries it has."""
        here = self._here_now()
        with here.guard, nullcontext() if self.is_read_only else _locked(here.descriptor):
            return self._cursor(here) - data_offset(self.num_samples)

    @property
    def end(self) -> int:
        """Where the entries must end."""
        if self.memory is None:
            return self._limit
        return int(_WORD.unpack_from(self.memory.bytes, _END_AT)[0])

    def cut(self, nbytes: int) -> int:
        """Let the entries in memory take at most so many bytes more. Return how many more they may take."""
        here = self._here_now()
        with here.guard, _locked(here.descriptor):
            cursor = self._cursor(here)
            end = min(cursor + nbytes, self.end)
            os.pwrite(here.descriptor, _WORD.pack(end), _END_AT)
            return end - cursor

    @property
    def is_full(self) -> bool:
        """Whether a sample of this process didn't fit, so it tries no other one."""
        return self.is_read_only or self._here_now().is_full

    def kept(self, begin: int = 0, end: int | None = None) -> NDArray[np.intp]:
        """Return which of the samples from `begin` to `end` it has."""
        end = self.num_samples if end is None else end
        words = os.pread(self._here_now().descriptor, 8 * (end - begin), _INDEX_AT + 8 * begin)
        return begin + np.flatnonzero(np.frombuffer(words[: len(words) // 8 * 8], np.uint64))

    def read(self, index: int, *, as_view: bool = False) -> Packed | None:
        """Return a copy of a sample's bytes; None if it isn't there or its entry is damaged.

        `as_view`: from memory, not a copy. Nobody may write to it. It is valid as long as this object.
        """
        word = self._word(index)
        if not word:
            return None
        offset, nbytes = (word >> _LENGTH_BITS) * _UNIT, (word & ((1 << _LENGTH_BITS) - 1)) * _UNIT
        if nbytes < _UNIT:
            return None
        entry = self._copy(offset, nbytes, as_view=as_view)
        if entry is None:
            return None
        found, num_data, num_structure, num_blocks = _HEAD.unpack_from(entry.data)
        if found != index or _UNIT + num_data + num_structure > nbytes:
            return None
        if self.memory is None and _WORD.unpack_from(entry.data, _HEAD.size) != (_checksum(entry, self._salt),):
            return None
        end = _UNIT + num_data
        return Packed(entry[_UNIT:end], entry.data[end : end + num_structure], num_blocks)

    def _word(self, index: int) -> int:
        if self._index is not None:
            return int(self._index[index])
        word = os.pread(self._here_now().descriptor, _WORD.size, _INDEX_AT + _WORD.size * index)
        return int(_WORD.unpack(word)[0]) if len(word) == _WORD.size else 0

    def _copy(self, offset: int, nbytes: int, *, as_view: bool) -> NDArray[np.uint8] | None:
        if self.memory is not None:  # takes half as long as a system call
            view: NDArray[np.uint8] = self.memory.bytes[offset : offset + nbytes]
            return view if as_view else view.copy()
        descriptor, entry, done = self._here_now().descriptor, np.empty(nbytes, np.uint8), 0
        while done < nbytes:
            count = os.preadv(descriptor, [entry[done:].data], offset + done)
            if not count:
                return None
            done += count
        return entry

    # Writing

    @contextmanager
    def claim(self, index: int) -> Iterator[bool]:
        """Make others wait for this sample. Yield whether it is claimed: others may take too long for it."""
        here, position, looks = self._here_now(), _LOCKS_AT + 1 + index, 0
        began_s = time.monotonic()
        try:
            while not (is_ours := _claim(here, index, position)) and time.monotonic() - began_s < here.patience_s:
                select.poll().poll(_LOOK_MS[min(looks, len(_LOOK_MS) - 1)])
                looks += 1
            if not is_ours:
                here.patience_s = 0.0
            yield is_ours
        finally:
            if here.claimed.get(index) == threading.get_ident():
                with suppress(OSError):
                    _unlock(here.descriptor, position)
                del here.claimed[index]

    def write(self, index: int, packed: Packed) -> None:
        """Add the sample that this thread has claimed, if there is space. Raises `OSError` if writing fails."""
        data, structure, num_blocks = packed
        length = _UNIT + len(data) + len(structure)
        padded = -(-length // _UNIT) * _UNIT
        head = _HEAD.pack(index, len(data), len(structure), num_blocks).ljust(_UNIT, b"\0")
        entry: list[Any] = [head, data, structure, bytes(padded - length)]
        if self.memory is None:
            whole = np.concatenate([np.frombuffer(piece, np.uint8) for piece in entry])
            _WORD.pack_into(whole.data, _HEAD.size, _checksum(whole, self._salt))
            entry = [whole]
        failpoint("cache.claimed")
        here = self._here_now()
        try:
            offset = self._allocate(here, padded)
            if offset is None:
                return
            failpoint("cache.allocated")
            write_pieces(here.descriptor, iter(entry), offset)
            failpoint("cache.written")
            word = (offset // _UNIT) << _LENGTH_BITS | padded // _UNIT
            os.pwrite(here.descriptor, _WORD.pack(word), _INDEX_AT + _WORD.size * index)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            self._fill_up(here, os.strerror(error.errno))
            return
        failpoint("cache.published")

    def _allocate(self, here: _Here, nbytes: int) -> int | None:
        """Return the offset of so many bytes that are nobody else's; None if there is no space for them."""
        if nbytes > _MAX_ENTRY_BYTES:
            return None
        with here.guard, _locked(here.descriptor):
            offset, end = self._cursor(here), min(self.end, MAX_FILE_BYTES)
            if offset + nbytes <= end:
                os.pwrite(here.descriptor, _pack_cursor(offset + nbytes), _CURSOR_AT)
                return offset
        self._fill_up(here, f"its budget is {nbytes_text(end - data_offset(self.num_samples))}")
        return None

    def _fill_up(self, here: _Here, why: str) -> None:
        """Keep nothing more in this process. Warn, if no process of this program has."""
        here.is_full = True
        with here.guard, _locked(here.descriptor):
            is_told = os.pread(here.descriptor, _WORD.size, _TOLD_AT) == self._program
            with suppress(OSError):  # RLIMIT_FSIZE
                os.pwrite(here.descriptor, self._program, _TOLD_AT)
        if not is_told:
            warn(
                f"the cache {repr(self.path) if self.path else 'in memory'} is full ({why}): it has "
                f"{len(self.kept()):,} of {self.num_samples:,} samples, and the others are made on each access. Give a "
                f"larger budget=, or where= on a larger disk. In memory, the budgets of all caches of a program are at "
                f"most three quarters of what is free"
            )

    def _cursor(self, here: _Here) -> int:
        data = os.pread(here.descriptor, _CURSOR.size, _CURSOR_AT)
        end, flipped = _CURSOR.unpack(data) if len(data) == _CURSOR.size else (0, 0)
        if end ^ flipped != _FLIPPED:
            raise CacheCorrupt(f"the cache {self.path!r} is damaged: nothing tells where its entries end; delete it")
        return int(end)


# The parts of the file ------------------------------------------------------------------------------------------------


def data_offset(num_samples: int) -> int:
    """Return where the entries begin."""
    return -(-(_INDEX_AT + 8 * num_samples) // mmap.PAGESIZE) * mmap.PAGESIZE


def spread(count: int, number: int, draw: random.Random) -> list[int]:
    """Return `number` of the numbers below `count`, or all: one of each part, in order."""
    number = min(number, count)
    return [draw.randrange(count * part // number, count * (part + 1) // number) for part in range(number)]


def _pack_header(num_samples: int, facts: Facts) -> bytes:
    shown = {name: fact for name, fact in facts.items() if name != "length"}
    described = json.dumps(shown, ensure_ascii=False, sort_keys=True).encode()
    body = struct.pack("<IQI", _FORMAT, num_samples, len(described)) + described
    header = _MAGIC + struct.pack("<I", crc32(body)) + body
    assert len(header) <= _MAX_HEADER_BYTES, "the facts are short"
    return header


def _header_checksum(header: bytes) -> int:
    return crc32(header[: _HEADER.size + _HEADER.unpack_from(header)[-1]])


def _unpack_header(header: bytes, name: str) -> tuple[int, Facts]:
    remedy = "delete it, or name another file in where="
    if header[: len(_MAGIC)] != _MAGIC:
        raise CacheMismatch(f"{name} is not a cache of samples; {remedy}")
    try:
        _, checksum, version, num_samples, length = _HEADER.unpack_from(header)
        if crc32(header[_CHECKED_AT : _HEADER.size + length]) != checksum:
            raise CacheCorrupt(f"{name} is damaged: its header has another checksum; {remedy}")
        if version != _FORMAT:
            raise CacheMismatch(f"{name} was written by another version of swift_loader; {remedy}")
        return num_samples, json.loads(header[_HEADER.size : _HEADER.size + length])
    except struct.error:
        raise CacheCorrupt(f"{name} is damaged: it has no whole header; {remedy}") from None


def _check_facts(name: str, found: Facts, wanted: Facts) -> None:
    for fact in _COMPARED_FACTS:
        there, here = found.get(fact), wanted.get(fact)
        if there != here:
            raise CacheMismatch(
                f"{name} is that of another dataset: its {fact} is {there!r}, not {here!r}. Delete it, or name another "
                f"file in where="
            )


def _pack_cursor(end: int) -> bytes:
    return _CURSOR.pack(end, end ^ _FLIPPED)


def _checksum(entry: NDArray[np.uint8], salt: int) -> int:
    """Return the checksum of an entry without its own field. 262 kB take 6 us, and with zlib's CRC alone 60 us."""
    words = entry[_UNIT:].view(np.uint64)
    sums = np.add.reduceat(words, np.arange(0, len(words), _SUMMED_WORDS))
    return crc32(sums.data, crc32(entry[: _HEAD.size].data, salt))


# Locks of byte ranges that belong to an opened file ("open file description locks", fcntl(2)) -------------------------


def _claim(here: _Here, index: int, position: int) -> bool:
    thread = threading.get_ident()
    if here.claimed.setdefault(index, thread) != thread:
        return False
    if _lock(here.descriptor, position):  # if a signal handler raises here, the end of `Store.claim` gives it up
        return True
    del here.claimed[index]
    return False


def _lock(descriptor: int, position: int, *, wait: bool = False) -> bool:
    import fcntl  # not on Windows

    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    try:
        fcntl.fcntl(descriptor, command, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, position, 1, 0))
    except OSError as error:
        if not wait and error.errno in _BUSY:
            return False
        text = f"a cache needs a file system with locks of byte ranges ({error.strerror}); put it on a local disk"
        raise OSError(error.errno, text) from error
    return True


def _unlock(descriptor: int, position: int) -> None:
    import fcntl

    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, position, 1, 0))


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Hold the lock of the cursor."""
    try:
        _lock(descriptor, _LOCKS_AT, wait=True)
        yield
    finally:
        with suppress(OSError):  # of a file system without locks, `_lock` has told
            _unlock(descriptor, _LOCKS_AT)
