"""Memory without a name that any process of this machine can map: the program, its workers, and other ranks.

It is a memfd. The process that makes it keeps its descriptor open, and others open it as `/proc/PID/fd/N`. So nothing
has to be passed on but two numbers, which a pickle has room for, and the store of torch.distributed. The kernel frees
the memory with the last process that maps it, also after SIGKILL. Forks inherit the mapping.

Only processes of the same user and the same /proc can open it. Assumes Linux.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import NoDescriptorsLeft, SharedMemoryFull, SharedMemoryLost
from swift_loader.ranks.agreement import default_store
from swift_loader.ranks.ranks import torch_distributed
from swift_loader.runtime import ProcessOwner
from swift_loader.transport.channel import avoid_std_streams, explaining_limits
from swift_loader.transport.segments import Segment, new_file


class Address(NamedTuple):
    """Where another process of this machine finds the memory."""

    pid: int
    """The process that made it, and still has its descriptor."""
    descriptor: int
    device: int
    inode: int
    """With `device`, it tells whether the descriptor is still this memory's."""
    nbytes: int


class SharedMemory:
    """`nbytes` of memory, mapped in this process. Its pickle is an address: whoever unpickles it maps the same memory.

    The process that made it must live, and keep this object, until others have unpickled it.
    """

    def __init__(self, pieces: Iterable[NDArray[np.uint8]], nbytes: int) -> None:
        """Make new memory, whose first bytes are these pieces. The others are zeros, and take no memory until written.

        Raises `SharedMemoryFull` if there is not enough memory, or there are no descriptors left.
        """
        if sys.platform != "linux":
            raise NotImplementedError("memory that processes share by its address needs Linux")
        self._keep(new_file(pieces, nbytes), nbytes)

    @classmethod
    def of(cls, descriptor: int, nbytes: int) -> SharedMemory:
        """Return the memory that is behind a descriptor, and own that."""
        memory = cls.__new__(cls)
        memory._keep(descriptor, nbytes)  # noqa: SLF001
        return memory

    def _keep(self, descriptor: int, nbytes: int) -> None:
        self._descriptor: int | None = descriptor
        """Of a process that keeps it for others, and of its forks; None elsewhere."""
        status = os.fstat(descriptor)
        self.address = Address(os.getpid(), descriptor, status.st_dev, status.st_ino, nbytes)
        self._map(descriptor)

    def _map(self, descriptor: int) -> None:
        self._segment = Segment.map(descriptor, self.address.nbytes, mmap.MAP_SHARED)
        self.bytes: NDArray[np.uint8] = self._segment.array()
        """`(nbytes,) uint8`. It is valid as long as this object."""

    @classmethod
    def at(cls, address: Address) -> SharedMemory:
        """Map the memory of another process. Raises `SharedMemoryLost` if it can't be opened."""
        memory = cls.__new__(cls)
        memory._descriptor, memory.address = None, address  # noqa: SLF001
        descriptor = memory.open()
        try:
            memory._map(descriptor)  # noqa: SLF001
        except SharedMemoryFull as error:
            raise SharedMemoryLost(str(error)) from error
        finally:
            os.close(descriptor)
        return memory

    def open(self) -> int:
        """Return a new descriptor of the memory: with its own locks, for the caller to close.

        Raises `SharedMemoryLost` if the process that made it has ended, or may not be looked at.
        """
        pid, number, device, inode, _ = self.address
        own = self._descriptor is not None
        path = f"/proc/{'self' if own else pid}/fd/{number}"
        try:
            with explaining_limits():
                descriptor = avoid_std_streams(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except NoDescriptorsLeft:
            raise
        except OSError as error:
            raise SharedMemoryLost(
                f"the shared memory of process {pid} can't be opened: {error.strerror}. That process must be on the "
                f"same machine, run as the same user, and live as long as others begin to use its memory"
            ) from error
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (device, inode):
            os.close(descriptor)
            raise SharedMemoryLost(f"process {pid} no longer has its shared memory: the object was deleted there")
        return descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedMemory.at, (self.address,)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit, the module's names may be gone
        descriptor, self._descriptor = getattr(self, "_descriptor", None), None
        if descriptor is not None:
            close(descriptor)


_IMPORTER = ProcessOwner()


def place_of_ranks() -> tuple[Any, str] | None:
    """Return the store of torch.distributed, and what the names there begin with that only ranks of this machine use.

    None: there is no other rank, or this is a fork, which must not use the store's connection.
    """
    distributed = torch_distributed()
    if distributed is None or distributed.get_world_size() == 1 or not _IMPORTER.is_here():
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return default_store(distributed), f"swift_loader/{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"


def shared_with_ranks(memory: SharedMemory, key: str) -> SharedMemory:
    """Return the memory that another rank of this machine told of under this key; if there is none, this one.

    No rank waits for another: the store of torch.distributed tells who was first. Where it can't, or the other rank may
    not be looked at, this rank keeps its own.
    """
    mine, known = json.dumps(memory.address), ""
    with suppress(Exception):
        if (found := place_of_ranks()) is not None:
            store, place = found
            while (known := store.compare_set(f"{place}/{key}", known, mine).decode()) != mine:
                with suppress(SharedMemoryLost):  # it is gone, so the next round puts this one in its place
                    address = Address(*json.loads(known))
                    return SharedMemory.of(SharedMemory.at(address).open(), address.nbytes)
    return memory


def noted_by_ranks(memory: SharedMemory, key: str) -> list[SharedMemory]:
    """Note this memory for the other ranks of this machine. Return what they have noted, as far as it is still there.

    Without other ranks, that is nothing.
    """
    others: list[SharedMemory] = []
    with suppress(Exception):
        if (found := place_of_ranks()) is not None:
            (store, place), known, wanted = found, "", None
            while known != wanted:
                others.clear()
                for address in json.loads(known or "[]"):
                    with suppress(SharedMemoryLost):
                        others.append(SharedMemory.at(Address(*address)))
                wanted = json.dumps([one.address for one in (*others, memory)])
                known = store.compare_set(f"{place}/{key}", known, wanted).decode()
    return others
