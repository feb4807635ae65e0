"""Loaders of samples that sleep, and the ideal, all timed over the same batches."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common.datasets import SleepingSamples
from transport.systems import LoaderHandle

from swift_loader import SwiftLoader, default_collate

BATCH_SIZE = 32
SAMPLE_S = 0.002
SLOW_SHARE = {"even": 0.0, "heavy-tailed": 0.05}

_MAX_AHEAD = 5
"""Batches per worker before and after those that count: more than any of the loaders holds ready."""

_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Course:
    """An epoch: batches that don't count, those that do, and some more, so that no worker is idle meanwhile."""

    samples: str
    num_workers: int
    seconds: float
    """How long the batches that count take, about, if all workers are busy."""

    @property
    def num_ahead(self) -> int:
        """Batches before those that count, and after them."""
        return _MAX_AHEAD * self.num_workers

    @property
    def num_counted(self) -> int:
        """Batches that count."""
        slow_share = SLOW_SHARE[self.samples]
        batch_s = BATCH_SIZE * SAMPLE_S * (1 + slow_share * (SleepingSamples.SLOW_FACTOR - 1))
        return self.num_workers * max(2, round(self.seconds / batch_s))

    @property
    def dataset_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the dataset."""
        length = BATCH_SIZE * (2 * self.num_ahead + self.num_counted)
        return {"length": length, "seconds": SAMPLE_S, "slow_share": SLOW_SHARE[self.samples]}


class Sleeping:
    """A loader that goes through a course, again and again; its workers stay."""

    def __init__(self, make: Callable[[Course], LoaderHandle], course: Course) -> None:
        self._course = course
        self._handle = make(course)
        self.measure()  # starts the workers

    def measure(self) -> float:
        """Return batches per second over the batches that count."""
        course, start, end = self._course, 0.0, 0.0
        last = course.num_ahead + course.num_counted
        for number, _ in enumerate(self._handle.loader, start=1):
            if number == course.num_ahead:
                start = time.perf_counter()
            elif number == last:
                end = time.perf_counter()
        return course.num_counted / (end - start)

    def close(self) -> int:
        """End the workers; return how many batches' memory the trainer had mapped."""
        before = num_mapped()
        self._handle.close()
        gc.collect()
        return before - num_mapped()


class IdealSleeping:
    """Processes that build the same batches, and send nothing."""

    def __init__(self, course: Course) -> None:
        context = multiprocessing.get_context("fork")
        self._course = course
        dataset = SleepingSamples(**course.dataset_kwargs)
        self._connections: list[Connection] = []
        self._processes = []
        for worker in range(course.num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, dataset, course, worker), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def measure(self) -> float:
        """Return the rate of processes that share the batches perfectly."""
        for connection in self._connections:
            connection.send("go")
        total_s = sum(connection.recv() for connection in self._connections)
        return self._course.num_counted * self._course.num_workers / total_s

    def close(self) -> int:
        """End the processes."""
        for connection in self._connections:
            connection.send("stop")
            connection.close()
        for process in self._processes:
            process.join(_STOP_TIMEOUT_S)
        return 0


def _serve(connection: Connection, dataset: SleepingSamples, course: Course, worker: int) -> None:
    """Build this worker's share of the batches that count, and answer how long that took, each time."""
    steps = range(course.num_ahead + worker, course.num_ahead + course.num_counted, course.num_workers)
    while connection.recv() == "go":
        start = time.perf_counter()
        for step in steps:
            default_collate([dataset[index] for index in range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)])
        connection.send(time.perf_counter() - start)
    os._exit(0)


def make_swift(course: Course, *, in_order: bool) -> LoaderHandle:
    loader = SwiftLoader(
        SleepingSamples,
        course.dataset_kwargs,
        batch_size=BATCH_SIZE,
        worker_per_consumer=course.num_workers,
        shuffle=False,
        in_order=in_order,
    )
    return LoaderHandle(loader, loader.close)


def make_torch(course: Course) -> LoaderHandle:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        SleepingSamples(**course.dataset_kwargs),
        BATCH_SIZE,
        num_workers=course.num_workers,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    return LoaderHandle(loader, lambda: None)


def num_mapped() -> int:
    """Return how many pieces of swift_loader's shared memory this process has mapped that hold a batch."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in maps if "/memfd:swift_loader" in line]
    return sum(end - start >= BATCH_SIZE * SleepingSamples.NBYTES for start, end in ranges)


SYSTEMS: dict[str, Callable[[Course], Any]] = {
    "ideal": IdealSleeping,
    "torch": partial(Sleeping, make_torch),
    "in order": partial(Sleeping, partial(make_swift, in_order=True)),
    "completion": partial(Sleeping, partial(make_swift, in_order=False)),
}
"""In the order of their start: those that fork this process first, while it has no other threads."""
