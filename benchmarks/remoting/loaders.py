"""The loaders under test, and their timing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
from common.turns import endless
from numpy.typing import NDArray

from remoting.cases import BATCH_SIZE, Blocks, Case
from remoting.cluster import HERE, THERE, TwoNodes
from remoting.tables import Turn
from swift_loader import RayExecutor, SwiftLoader

_NUM_DISCARDED = 12
"""Batches at the start of a turn that don't count: more than a loader has ready after a pause."""


class Workers:
    """A loader with its workers. It is idle between its turns."""

    def __init__(self, case: Case, place: str | None, num_workers: int, cluster: TwoNodes) -> None:
        before = {process.pid for process in psutil.Process().children(recursive=True)}
        self._loader = _make(case, place, num_workers)
        self._batches = endless(self._loader)
        for _ in range(_NUM_DISCARDED * num_workers):
            next(self._batches)
        now = psutil.Process().children(recursive=True)
        self._processes = [process for process in now if process.pid not in before]
        self._others = (psutil.Process(), cluster.raylet(HERE), cluster.raylet(THERE))

    def measure(self, seconds: float) -> Turn:
        """Take batches for so long, and do nothing with them."""
        for _ in range(_NUM_DISCARDED):
            next(self._batches)
        count = 0
        before = self._read()
        start_s = now_s = time.perf_counter()
        while now_s - start_s < seconds:
            next(self._batches)
            count += 1
            now_s = time.perf_counter()
        after = self._read()
        used_ms = ((after - before) * 1e3 / count).tolist()
        return Turn(count / (now_s - start_s), *self._spans_ms(count), *used_ms)

    def _read(self) -> NDArray[np.float64]:
        """Return the CPU times of the workers, the trainer, its raylet and the other raylet."""
        trainer, here, there = self._others
        return np.array([_cpu_s(group) for group in (self._processes, [trainer], [here], [there])])

    def _spans_ms(self, count: int) -> tuple[float, float, float]:
        """Return the medians of the last `count` batches: building, on the way, decoding."""
        observations = self._loader.report().observations
        assert observations is not None, "the loader measures nothing"
        last = observations.batches[-count:]
        build_ns = last["fetch_ns"] + last["collate_ns"] + last["encode_ns"]
        way_ns = last["received_ns"] - last["began_ns"] - build_ns
        build, way, view = (float(np.median(span)) / 1e6 for span in (build_ns, way_ns, last["decode_ns"]))
        return build, way, view

    def close(self) -> None:
        """Stop the workers."""
        self._batches.close()
        self._loader.close()


def _make(case: Case, place: str | None, num_workers: int) -> SwiftLoader:
    workers: dict[str, Any] = (
        {"worker_per_consumer": num_workers}
        if place is None
        else {"executor": RayExecutor(num_workers=num_workers, resources={place: 1})}
    )
    return SwiftLoader(Blocks, case.dataset_kwargs, batch_size=BATCH_SIZE, shuffle=True, seed=1, **workers)


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU time of processes, over all their threads. Those that have ended count 0."""
    total_s = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system
    return total_s
