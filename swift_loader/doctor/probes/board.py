"""What a process of the doctor is doing, in memory that the doctor reads when the process hangs or dies.

The memory is a temporary file, which is the process's stdin: `progress | request`. The file works on every system, and
writing to it is a store, without a system call.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from dataclasses import dataclass
from enum import Enum
from typing import IO

from swift_loader.doctor.settings import Settings

__all__ = ["Board", "Phase", "Progress", "Request", "Role"]

_LAYOUT = struct.Struct("<qqq")
"""Phase, dataset index or -1, and a number that changes with each step."""


class Role(str, Enum):
    """What a process is for."""

    EXAMINE = "examine"
    COMPARE = "compare"
    RESUME = "resume"


class Phase(int, Enum):
    """What a process is doing."""

    STARTING = 0
    IMPORTING = 1
    BUILDING = 2
    LOOKING = 3
    FETCHING = 4
    COLLATING = 5
    RUNNING = 6

    @property
    def text(self) -> str:
        """It in words: `it was ...`."""
        return _TEXTS[self]


_TEXTS = {
    Phase.STARTING: "starting",
    Phase.IMPORTING: "importing the module",
    Phase.BUILDING: "building the dataset",
    Phase.LOOKING: "looking at the dataset's attributes",
    Phase.FETCHING: "fetching a sample",
    Phase.COLLATING: "building batches",
    Phase.RUNNING: "running a loader over the dataset",
}


@dataclass(frozen=True, slots=True)
class Request:
    """What a process is asked to do."""

    role: Role
    settings: Settings
    import_path: tuple[str, ...]
    seconds: float
    """How long it may fetch samples for measurements."""
    indices: tuple[int, ...] = ()
    """For COMPARE and RESUME: the samples to build."""
    avoid: frozenset[int] = frozenset()
    """For EXAMINE: samples not to fetch, because they kill or hang the process."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a board says."""

    phase: Phase
    index: int | None
    count: int
    """Differs from an earlier one if there was progress."""


class Board:
    """The progress of one process. Its process writes, the doctor reads."""

    def __init__(self, file: IO[bytes] | int) -> None:
        """Map the file; a number is a descriptor. The file must hold a request."""
        self._memory = mmap.mmap(file if isinstance(file, int) else file.fileno(), 0)
        self._phase, self._count = Phase.STARTING, 0

    @classmethod
    def create(cls, file: IO[bytes], request: Request) -> Board:
        """Write a request to an empty file, and return its board."""
        file.write(bytes(_LAYOUT.size) + pickle.dumps(request))
        file.flush()
        return cls(file)

    def request(self) -> Request:
        """Return the request."""
        request = pickle.loads(self._memory[_LAYOUT.size :])
        assert isinstance(request, Request)
        return request

    def enter(self, phase: Phase, index: int = -1) -> None:
        """Say what this process does next; `index` is the sample that it fetches."""
        self._count += 1
        _LAYOUT.pack_into(self._memory, 0, phase, index, self._count)

    def read(self) -> Progress:
        """Return what the process does."""
        phase, index, count = _LAYOUT.unpack_from(self._memory, 0)
        return Progress(Phase(phase), index if index >= 0 else None, count)

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()


def detach_stdin() -> None:
    """Let stdin be empty from now on. Call it after the board is mapped."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
