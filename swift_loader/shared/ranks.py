"""Memory that all ranks of one machine share, so that it is there once.

    all: where am I? ─► first rank of each machine: make it, tell the address ─► others: open it ─► all: did it work?

The ranks exchange this through the store of torch.distributed, as `ranks.agreement` does. The first rank tells its
process and descriptor, which the others open as `/proc/PID/fd/N`. Where that isn't allowed, it makes a file in
/dev/shm with a random name, which has no name any more once all have opened it.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import SharedMemoryFull, SharedMemoryLost, nbytes_text
from swift_loader.ranks.agreement import default_store, exchange_among_all
from swift_loader.ranks.ranks import torch_distributed
from swift_loader.runtime import ProcessOwner
from swift_loader.shared.memory import Address, SharedMemory
from swift_loader.transport.segments import write_pieces

Pieces = Sequence[NDArray[np.uint8]]
Content = tuple[Pieces, int]
"""The first bytes, and the size."""

_IMPORTER = ProcessOwner()

_SHM = Path("/dev/shm")  # noqa: S108 - not a temporary file of ours: memory that all containers of a pod may have


def share_on_node(make: Callable[[], Content], what: str, key: Callable[[], str]) -> SharedMemory:
    """Return memory with the content that `make` returns. The ranks of torch.distributed on one machine share it.

    If torch.distributed is initialised, all ranks must call this, in the same order. `make` runs on the first rank of
    each machine. `what`: what the user has called. Only ranks for which `key` returns the same text share memory.
    Raises what `make` raised, on the other ranks of the machine as `RuntimeError`; `SharedMemoryLost` if they find no
    way to share memory.
    """
    distributed = torch_distributed()
    if distributed is None or distributed.get_world_size() == 1:
        return SharedMemory(*make())
    exchange, rank = partial(exchange_among_all, what), distributed.get_rank()
    places = [answer["place"] for answer in exchange({"place": f"{_place()} {key()}"})]
    first = places.index(places[rank])
    content: Content | None = None
    for make_memory in (_anonymous, _named):
        memory, told = None, _Told()
        try:
            if rank == first:
                content = content or make()
                memory, told = make_memory(*content)
        except BaseException as error:
            exchange({"error": f"{type(error).__name__}: {error}"})
            raise
        try:
            answer = exchange(told._asdict())[first]
            if "error" in answer:
                raise RuntimeError(f"{what} failed on rank {first}, which is on the same machine: {answer['error']}")
            if memory is None:
                memory = _opened(_Told(**answer))  # type: ignore[arg-type]
            if not any(other["failed"] for other in exchange({"failed": memory is None})) and memory is not None:
                return memory
        finally:
            if rank == first and make_memory is _named:
                Path(told.path).unlink()
    raise SharedMemoryLost(
        f"{what}: the ranks of this machine can open neither each other's memory nor files in {_SHM}"
    )


def share_equal(memory: SharedMemory) -> SharedMemory:
    """Return memory with the same bytes that another rank of this machine has; if there is none, this one.

    No rank waits for another, and each may call this for other memory: the store of torch.distributed tells who has
    which bytes. Where that fails, the rank keeps its own. Nobody may change the memory.
    """
    distributed = torch_distributed()
    if distributed is None or not _IMPORTER.is_here():  # a fork must not use the store's connection
        return memory
    mine, known = json.dumps(memory.address), ""
    with suppress(Exception):
        key = f"swift_loader/{_place()}/{blake2b(memory.bytes.data, digest_size=16).hexdigest()}"
        while (known := default_store(distributed).compare_set(key, known, mine).decode()) != mine:
            with suppress(SharedMemoryLost):  # it is gone, so the next round puts this one in its place
                descriptor = SharedMemory.at(Address(*json.loads(known))).open()
                return SharedMemory.of(descriptor, memory.address.nbytes)
    return memory


class _Told(NamedTuple):
    """Where the other ranks find the memory."""

    path: str = ""
    nbytes: int = 0
    device: int = 0
    inode: int = 0


def _place() -> str:
    """Return what ranks have in common that may share memory: the running kernel, the user, and /dev/shm."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.getuid()} {_SHM.stat().st_dev if _SHM.is_dir() else 0}"


def _anonymous(pieces: Pieces, nbytes: int) -> tuple[SharedMemory, _Told]:
    memory = SharedMemory(pieces, nbytes)
    pid, descriptor, device, inode, _ = memory.address
    return memory, _Told(f"/proc/{pid}/fd/{descriptor}", nbytes, device, inode)


def _named(pieces: Pieces, nbytes: int) -> tuple[SharedMemory, _Told]:
    """Return memory with a name, which the caller removes. Raises `SharedMemoryFull` if there isn't so much space."""
    status = os.statvfs(_SHM)
    free = status.f_bavail * status.f_frsize
    if nbytes > free:
        raise SharedMemoryFull(
            errno.ENOSPC,
            f"{_SHM} has {nbytes_text(free)} free, and {nbytes_text(nbytes)} are needed. Make it larger "
            f"(docker run --shm-size), or give a cache a smaller budget",
        )
    path = _SHM / f"swift_loader_{secrets.token_hex(16)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_pieces(descriptor, iter(pieces))
        os.ftruncate(descriptor, nbytes)
        memory = SharedMemory.of(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        path.unlink()
        raise
    return memory, _Told(str(path), nbytes, memory.address.device, memory.address.inode)


def _opened(told: _Told) -> SharedMemory | None:
    """Return the memory of another rank, with a descriptor of this process; None if it can't be opened."""
    with suppress(OSError):
        descriptor = os.open(told.path, os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) == (told.device, told.inode):
            return SharedMemory.of(descriptor, told.nbytes)
        os.close(descriptor)
    return None
