"""A dataset whose samples can be checked one by one, and whole runs against a loader without workers.

Imports NumPy only: importing it is part of every worker's start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from swift_loader import SwiftLoader

NARROW_BYTES = 8192
"""For the send buffer, which the kernel doubles: a message of `NARROW_TEXT` fills more than half of it."""

NARROW_TEXT = 12_000


class Checked:
    """Sample i has its id, what it drew, an array that follows from both, and the array's checksum."""

    def __init__(
        self,
        num_samples: int = 200,
        *,
        nbytes: int = 2000,
        big_at: int = -1,
        big_nbytes: int = 0,
        fails_every: int = 0,
        narrow: bool = False,
    ) -> None:
        """Begin.

        `nbytes`: of a sample's array. `big_at`: a sample that has `big_nbytes` instead. `fails_every`: of so many
        samples one raises; 0 is never. `narrow`: batches are large messages through a narrow pipe, which blocks whoever
        sends two at once.
        """
        self.num_samples, self.nbytes = num_samples, nbytes
        self.big_at, self.big_nbytes = big_at, big_nbytes
        self.fails_every, self.narrow = fails_every, narrow
        self.narrowed_in = 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.fails_every and index % self.fails_every == self.fails_every - 1:
            raise ValueError("a bad sample")
        if self.narrow and self.narrowed_in != os.getpid():
            self.narrowed_in = os.getpid()
            _narrow_all_pipes()
        drawn = np.array([random.random(), *np.random.rand(2)])
        data = _content(index, drawn, self.big_nbytes if index == self.big_at else self.nbytes)
        sample = {"id": index, "drawn": drawn, "data": data, "sum": zlib.crc32(data.tobytes())}
        return sample | {"text": "x" * NARROW_TEXT if index % 4 == 0 else ""} if self.narrow else sample


def _narrow_all_pipes() -> None:
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_socket():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as pipe:
                pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NARROW_BYTES)


def _content(index: int, drawn: NDArray[np.float64], nbytes: int) -> NDArray[np.uint8]:
    key = np.uint32(zlib.crc32(drawn.tobytes(), index))
    mixed = (np.arange(nbytes, dtype=np.uint32) * np.uint32(2654435761)) ^ key
    content: NDArray[np.uint8] = (mixed >> np.uint32(13)).astype(np.uint8)
    return content


def collate_flat(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Put arrays of different lengths behind one another."""
    return {
        "id": np.array([sample["id"] for sample in samples]),
        "drawn": np.stack([sample["drawn"] for sample in samples]),
        "data": np.concatenate([sample["data"] for sample in samples]),
        "length": np.array([len(sample["data"]) for sample in samples]),
        "sum": np.array([sample["sum"] for sample in samples]),
    }


# In the trainer -------------------------------------------------------------------------------------------------------


def check_batch(batch: dict[str, Any]) -> None:
    """Fail if a sample isn't what follows from its id and its draws."""
    ids, drawn, sums = np.asarray(batch["id"]), np.asarray(batch["drawn"]), np.asarray(batch["sum"])
    data = np.asarray(batch["data"])
    if data.ndim == 1:
        rows: Sequence[NDArray[np.uint8]] = np.split(data, np.cumsum(np.asarray(batch["length"]))[:-1])
    else:
        rows = list(data)
    for index, draws, checksum, row in zip(ids, drawn, sums, rows, strict=True):
        assert np.array_equal(row, _content(int(index), draws, len(row))), f"sample {index} has other content"
        assert zlib.crc32(row.tobytes()) == checksum, f"sample {index} has another checksum"


def digest(batch: dict[str, Any]) -> bytes:
    """Return what two batches have in common only if all their bytes are equal."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, part in sorted(batch.items()):
        content = repr(part).encode() if isinstance(part, list) else np.ascontiguousarray(part).tobytes()
        hashed.update(f"{name} {len(content)} ".encode() + content)
    return hashed.digest()


class Reference:
    """What a loader without workers gives, epoch by epoch."""

    def __init__(self, make: Callable[[], SwiftLoader]) -> None:
        self._make = make
        self._epochs: dict[int, list[bytes]] = {}

    def epoch(self, number: int) -> list[bytes]:
        """Return the digests of an epoch's batches, in order."""
        if number not in self._epochs:
            with self._make() as loader:
                loader.set_epoch(number)
                self._epochs[number] = list(map(digest, loader))
        return self._epochs[number]

    def compare(self, got: list[bytes], epoch: int, *, in_order: bool, is_whole: bool = True) -> None:
        """Fail if batches aren't those of an epoch: in their order, or each of them once."""
        expected = self.epoch(epoch)
        where = f"epoch {epoch}"
        if is_whole:
            assert len(got) == len(expected), f"{where}: {len(got)} batches instead of {len(expected)}"
        if in_order:
            differing = [number for number, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b]
            assert not differing, f"{where}: the batches {differing[:5]} are others"
            assert len(got) <= len(expected), f"{where}: {len(got)} batches, which is too many"
        else:
            surplus = Counter(got) - Counter(expected)
            assert not surplus, f"{where}: {surplus.total()} batches are others, or come twice"


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for a while."""
    old = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old
