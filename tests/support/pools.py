"""Loops over two loaders, one inside the other, and what they saw."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from swift_loader import WorkerPool

__all__ = [
    "NUM_WORKERS",
    "StatefulShares",
    "Told",
    "ToldStream",
    "hang",
    "kill",
    "nested",
    "pids_in",
    "samples_of",
    "worker_pids",
]

NUM_WORKERS = 2


class Told(Dataset[Any]):
    """Numbers from `first` on, with draws and the process. At `at`, something goes wrong: once, if there is a note."""

    def __init__(
        self, length: int, first: int = 0, at: int = -1, fault: Callable[[], object] = int, note: Path | None = None
    ) -> None:
        self.length, self.first, self.at, self.fault, self.note = length, first, at, fault, note

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if index == self.at and (self.note is None or not self.note.exists()):
            if self.note is not None:
                self.note.touch()
            self.fault()
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return self.first + index, random.random(), np.random.rand(), torch.rand(2), os.getpid()


class ToldStream(IterableDataset[Any]):
    """A worker's share of the numbers from `first` on, with what the worker knows and draws."""

    def __init__(self, length: int, first: int = 0, at: int = -1, note: Path | None = None) -> None:
        self.length, self.first, self.at, self.note = length, first, at, note

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for number in range(info.id, self.length, info.num_workers):
            if number == self.at and self.note is not None and not self.note.exists():
                self.note.touch()
                kill()
            drawn = random.random(), np.random.rand(), np.random.randn(), torch.rand(2)
            yield self.first + number, info.id, info.num_workers, info.seed, *drawn, os.getpid()


class StatefulShares(IterableDataset[int]):
    """A worker's share of the numbers. Its iterators have a state."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return _Share(range(info.id, self.length, info.num_workers))


class _Share:
    def __init__(self, numbers: range) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> _Share:
        return self

    def __next__(self) -> int:
        if self.at >= len(self.numbers):
            raise StopIteration
        self.at += 1
        return self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    signal.pause()


def nested(train: Any, valid: Any, *, num_epochs: int = 2, at: tuple[int, ...] = (1, 4)) -> list[Any]:
    """Return the batches of a loop over `train`, with a loop over `valid` at some of its steps."""
    seen = []
    for _ in range(num_epochs):
        for step, batch in enumerate(train):
            seen.append(batch)
            if step in at:
                seen += list(valid)
    return seen


def samples_of(batches: list[Any]) -> list[Any]:
    """Return all that was seen, but the processes."""
    return [[part.tolist() for part in batch[:-1]] for batch in batches]


def pids_in(batches: list[Any]) -> set[int]:
    """Return the processes that have built the batches."""
    return {int(pid) for batch in batches for pid in batch[-1]}


def worker_pids(pool: WorkerPool) -> list[int]:
    """Return the processes of a pool, by worker id."""
    processes = pool._processes
    return [] if processes is None else [place.process.pid for _, place in sorted(processes._places.items())]
