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
from contextlib import suppress
from dataclasses import dataclass
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

_PERIOD = 4093
"""After so many bytes an array repeats itself; a prime, so that bytes from another page are others."""

_LARGE_NBYTES = 2_000_000

_MULTIPLIER = np.uint32(2654435761)


class PlantedError(ValueError):
    """A sample that fails, as the case wants it."""


class Sizes:
    """How long the arrays of samples are."""

    EQUAL = "equal"
    RAGGED = "ragged"
    WILD = "wild"
    """Tiny ones, and now and then one that is thousands of times as large."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the samples of a dataset have in common, whatever their bytes come from."""

    num_samples: int
    folder: str
    """Of the case."""
    sizes: str = Sizes.EQUAL
    fails: tuple[int, ...] = ()
    """Samples that raise `PlantedError`."""
    pause_s: float = 0.0
    """Between a seek and the read after it: others that share the offset come in here."""
    slow_s: float = 0.0
    """What each sample takes."""
    is_noisy: bool = False
    """Whether the constructor and some samples write to descriptors 1 and 2, as libraries do."""


Read = Callable[[int], bytes]
"""Returns the bytes of the sample with an index."""


class Stormy:
    """Sample i is `{"id": i, "data": (n,) uint8}`."""

    def __init__(self, layout: Layout, kind: str) -> None:
        self.layout, self.num_samples = layout, layout.num_samples
        if layout.is_noisy:
            _make_noise()
        if kind.startswith("grows"):
            self.num_samples = len(list((Path(layout.folder) / FOLDER_OF_NAMES).iterdir()))
        self.read = READS[kind](layout)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"{index} of {self.num_samples}")
        if index in self.layout.fails:
            raise PlantedError(f"sample {index} fails")
        if self.layout.is_noisy and index % 10 == 0:
            _make_noise()
        if self.layout.slow_s:
            time.sleep(self.layout.slow_s)
        return {"id": index, "data": _expand(self.read(index), _size(self.layout.sizes, index))}


class StormyInBulk(Stormy):
    """The same, with `__getitems__`."""

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


def as_list(samples: list[Any]) -> list[Any]:
    """Return the samples as they are: they differ in size."""
    return samples


def _size(sizes: str, index: int) -> int:
    if sizes == Sizes.RAGGED:
        return 1 + index * 37 % 300
    if sizes == Sizes.WILD:
        return _LARGE_NBYTES if index % 13 == 5 else 40
    return 64


def _expand(raw: bytes, nbytes: int) -> Any:
    mixed = (np.arange(min(nbytes, _PERIOD), dtype=np.uint32) * _MULTIPLIER) ^ np.uint32(zlib.crc32(raw))
    return np.resize((mixed >> np.uint32(13)).astype(np.uint8), nbytes)


def _make_noise() -> None:
    for descriptor in (1, 2):
        with suppress(OSError):  # it is closed
            os.write(descriptor, b"noise\n" * 100)


# Where the bytes come from --------------------------------------------------------------------------------------------


class FromMemory:
    """Records that are in memory, again and again."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.num_records = len(content) // RECORD_NBYTES

    def __call__(self, index: int) -> bytes:
        begin = index % self.num_records * RECORD_NBYTES
        return self.content[begin : begin + RECORD_NBYTES]


class FromFile:
    """Records that are read from an open file by seeking, as an HDF5 dataset does."""

    def __init__(self, open_file: Callable[[], FileIO], pause_s: float) -> None:
        self.open_file, self.pause_s = open_file, pause_s

    def __call__(self, index: int) -> bytes:
        file = self.open_file()
        file.seek(index * RECORD_NBYTES)
        if self.pause_s:
            time.sleep(self.pause_s)
        return file.read(RECORD_NBYTES)


class KeptOpen:
    """A file that is open from the beginning."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb", buffering=0)

    def __call__(self) -> FileIO:
        return self.file


class OpenedLate:
    """A file that is opened when it is first read from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: FileIO | None = None

    def __call__(self) -> FileIO:
        if self.file is None:
            self.file = self.path.open("rb", buffering=0)
        return self.file


@cache
def _opened(path: str) -> FileIO:
    return open(path, "rb", buffering=0)


class OpenedOnce:
    """A file that a function keeps open for all who ask."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        _opened(self.path)

    def __call__(self) -> FileIO:
        return _opened(self.path)


class OpenedByImport:
    """A file that a module keeps open."""

    def __init__(self) -> None:
        from tests.support.storm_module import CONTENT_FILE

        assert CONTENT_FILE.readable()

    def __call__(self) -> FileIO:
        from tests.support.storm_module import CONTENT_FILE

        return CONTENT_FILE


class Drawing:
    """Draws from the global generators for each sample."""

    def __call__(self, index: int) -> bytes:
        return repr((index, random.random(), np.random.rand(2).tolist())).encode()


# What constructors do -------------------------------------------------------------------------------------------------


def _content(layout: Layout) -> Path:
    return Path(layout.folder) / CONTENT


def _from(path: Path) -> FromMemory:
    return FromMemory(path.read_bytes())


def _from_open(layout: Layout, open_file: Callable[[], FileIO]) -> FromFile:
    return FromFile(open_file, layout.pause_s)


def _inside(kind: str) -> Callable[[Layout], Read]:
    """Change the directory first."""

    def build(layout: Layout) -> Read:
        os.chdir("inner")
        return READS[kind](layout)

    return build


def _with_thread(kind: str) -> Callable[[Layout], Read]:
    """Leave a thread behind first."""

    def build(layout: Layout) -> Read:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return READS[kind](layout)

    return build


def _record(seed: bytes) -> bytes:
    return zlib.crc32(seed).to_bytes(RECORD_NBYTES, "big")


def _records(seeds: Iterable[bytes]) -> FromMemory:
    return FromMemory(b"".join(map(_record, seeds)))


def _environment(layout: Layout) -> Read:
    salt = os.environ[SALT].encode()
    return _records(salt + b"%d" % index for index in range(layout.num_samples))


def _hashes(layout: Layout) -> Read:
    names = [f"class {number}" for number in range(KEYS)]
    labels = {name: label for label, name in enumerate(set(names))}
    return _records(b"%d" % labels[name] for name in names)


def _unkeyed(layout: Layout) -> FromMemory:
    return FromMemory(np.random.default_rng().bytes(KEYS * RECORD_NBYTES))


def _unkeyed_kept_open(layout: Layout) -> Read:
    read = _unkeyed(layout)
    read.kept_open = KeptOpen(_content(layout))  # type: ignore[attr-defined]
    return read


READS: Mapping[str, Callable[[Layout], Read]] = {
    "arrays": lambda layout: _from(_content(layout)),
    "kept open": lambda layout: _from_open(layout, KeptOpen(_content(layout))),
    "relative": lambda layout: _from(Path(CONTENT)),
    "relative, kept open": lambda layout: _from_open(layout, KeptOpen(Path(CONTENT))),
    "relative, opened late": lambda layout: _from_open(layout, OpenedLate(Path(CONTENT))),
    "changes directory": _inside("relative"),
    "changes directory, kept open": _inside("relative, kept open"),
    "environment": _environment,
    "hashes": _hashes,
    "hashes and thread": _with_thread("hashes"),
    "unkeyed": _unkeyed,
    "unkeyed, kept open": _unkeyed_kept_open,
    "cached open": lambda layout: _from_open(layout, OpenedOnce(_content(layout))),
    "open by import": lambda layout: _from_open(layout, OpenedByImport()),
    "thread": _with_thread("arrays"),
    "opened late": lambda layout: _from_open(layout, OpenedLate(_content(layout))),
    "draws in constructor": lambda layout: _records(
        b"%r %r" % (random.random(), np.random.rand()) for _ in range(layout.num_samples)
    ),
    "augments": lambda layout: Drawing(),
    "grows": lambda layout: _from(_content(layout)),
    "grows, kept open": lambda layout: _from_open(layout, KeptOpen(_content(layout))),
}
"""What the constructor of each kind of dataset does, and where its bytes come from then."""
