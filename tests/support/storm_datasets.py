"""Datasets whose constructors do what real ones do: keep files open, change the directory, leave threads behind.

Each kind differs only in where the bytes of a sample come from; the sample itself is the same for all: its id, and an
array that follows from these bytes. Imports NumPy only: importing it is part of every worker's start.
"""

from __future__ import annotations

import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

CONTENT = "content.bin"
"""In the folder of a case, in its `inner`, and in another one, each time with other bytes."""

FOLDER_OF_NAMES = "names"
"""A dataset of a growing folder has a sample for each file in there."""

SALT = "STORM_SALT"
"""A variable of the environment."""

RECORD_NBYTES = 16

KEYS = 8
"""Where a dataset is only compared with itself, sample i has the bytes of i % KEYS."""

_PAUSE_S = 0.0002
"""Between a seek and the read after it: another worker that shares the offset comes in here."""

_PERIOD = 4093
"""After so many bytes an array repeats itself; a prime, so that bytes from another page are others."""

Read = Callable[[int], bytes]
"""Returns the bytes of the sample with an index."""


class Stormy:
    """Sample i is `{"id": i, "data": (n,) uint8}`. `sizes`: "equal", "ragged" or "wild", a few of which are large.

    Each takes `slow_s`, so that workers are killed at work.
    """

    def __init__(self, kind: str, folder: str, num_samples: int, sizes: str, slow_s: float) -> None:
        self.sizes, self.num_samples, self.slow_s = sizes, num_samples, slow_s
        if kind == "grows":
            self.num_samples = len(list((Path(folder) / FOLDER_OF_NAMES).iterdir()))
        self.read = READS[kind](Path(folder), num_samples)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"{index} of {self.num_samples}")
        time.sleep(self.slow_s)
        nbytes = {"equal": 64, "ragged": 1 + index * 37 % 300, "wild": 2_000_000 if index % 13 == 5 else 40}[self.sizes]
        mixed = np.arange(min(nbytes, _PERIOD), dtype=np.uint32) * np.uint32(2654435761)
        mixed ^= np.uint32(zlib.crc32(self.read(index)))
        return {"id": index, "data": np.resize((mixed >> np.uint32(13)).astype(np.uint8), nbytes)}


class StormyInBulk(Stormy):
    """The same, with `__getitems__`."""

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


def as_list(samples: list[Any]) -> list[Any]:
    """Return the samples as they are: they differ in size."""
    return samples


# Where the bytes come from --------------------------------------------------------------------------------------------


class FromMemory:
    """Records that are in memory, again and again."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.num_records = len(content) // RECORD_NBYTES

    def __call__(self, index: int) -> bytes:
        begin = index % self.num_records * RECORD_NBYTES
        return self.content[begin : begin + RECORD_NBYTES]


def _records(seeds: Iterable[bytes]) -> FromMemory:
    return FromMemory(b"".join(zlib.crc32(seed).to_bytes(RECORD_NBYTES, "big") for seed in seeds))


@cache
def _opened(path: Path) -> FileIO:
    return path.open("rb", buffering=0)


def _from_file(open_file: Callable[[], FileIO]) -> Read:
    """Read records from an open file by seeking, as an HDF5 dataset does."""

    def read(index: int) -> bytes:
        file = open_file()
        file.seek(index * RECORD_NBYTES)
        time.sleep(_PAUSE_S)
        return file.read(RECORD_NBYTES)

    return read


def _kept_open(path: Path) -> Read:
    file = path.open("rb", buffering=0)
    return _from_file(lambda: file)


def _opened_late(path: Path) -> Read:
    files: list[FileIO] = []

    def open_file() -> FileIO:
        if not files:
            files.append(path.open("rb", buffering=0))
        return files[0]

    return _from_file(open_file)


def _opened_once(path: Path) -> Read:
    _opened(path)
    return _from_file(lambda: _opened(path))


def _opened_by_import() -> Read:
    from tests.support.storm_module import CONTENT_FILE

    return _from_file(lambda: CONTENT_FILE)


def _draw(index: int) -> bytes:
    return repr((index, random.random(), np.random.rand(2).tolist())).encode()


# What constructors do -------------------------------------------------------------------------------------------------


def _changing_directory(folder: Path, num: int) -> Read:
    os.chdir("inner")
    return _kept_open(Path(CONTENT))


def _leaving_a_thread(folder: Path, num: int) -> Read:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return FromMemory((folder / CONTENT).read_bytes())


def _hashes(folder: Path, num: int) -> Read:
    names = [f"class {number}" for number in range(KEYS)]
    labels = {name: label for label, name in enumerate(set(names))}
    return _records(b"%d" % labels[name] for name in names)


READS: Mapping[str, Callable[[Path, int], Read]] = {
    "arrays": lambda folder, num: FromMemory((folder / CONTENT).read_bytes()),
    "kept open": lambda folder, num: _kept_open(folder / CONTENT),
    "relative": lambda folder, num: FromMemory(Path(CONTENT).read_bytes()),
    "relative, opened late": lambda folder, num: _opened_late(Path(CONTENT)),
    "changes directory": _changing_directory,
    "environment": lambda folder, num: _records(os.environ[SALT].encode() + b"%d" % index for index in range(num)),
    "hashes": _hashes,
    "unkeyed": lambda folder, num: FromMemory(np.random.default_rng().bytes(KEYS * RECORD_NBYTES)),
    "cached open": lambda folder, num: _opened_once(folder / CONTENT),
    "open by import": lambda folder, num: _opened_by_import(),
    "thread": _leaving_a_thread,
    "opened late": lambda folder, num: _opened_late(folder / CONTENT),
    "draws in constructor": lambda folder, num: _records(
        b"%r %r" % (random.random(), np.random.rand()) for _ in range(num)
    ),
    "augments": lambda folder, num: _draw,
    "grows": lambda folder, num: FromMemory((folder / CONTENT).read_bytes()),
}
"""What the constructor of each kind of dataset does, given the folder and the number, and how it reads then."""
