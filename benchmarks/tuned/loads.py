"""Loads for the benchmark of `worker_per_consumer="auto"`: what a sample and a step cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BATCH_SIZE = 16
_NUM_SAMPLES = 200_000

_SLEEP_GRID = (1, 2, 3, 4, 6, 8, 12, 16)
_CPU_GRID = (1, 2, 3, 4, 6)


@dataclass(frozen=True, slots=True)
class Load:
    """A dataset and a model that sleeps for a fixed time per step."""

    name: str
    samples: dict[str, Any]
    """Arguments of `Samples`."""
    step_ms: float
    grid: tuple[int, ...] = field(default=_SLEEP_GRID)
    """Fixed numbers of workers that are tried."""


LOADS = [
    Load("I/O", {"sleep_ms": 1.0}, 4),
    Load("I/O and CPU", {"sleep_ms": 2.0, "cpu_ms": 0.1}, 8),
    Load("CPU", {"cpu_ms": 0.5}, 2, _CPU_GRID),
    Load("model", {"sleep_ms": 0.25}, 12, (1, 2, 3, 4)),
    Load("transport", {"sleep_ms": 0.8, "shape": (3, 224, 224)}, 8, (1, 2, 3, 4, 6, 8)),
]


@dataclass(frozen=True, slots=True)
class Change:
    """What a sample and a step cost from some time on."""

    sleep_ms: float
    step_ms: float


CHANGES = [Change(1.0, 18.0), Change(1.0, 4.0), Change(3.0, 6.0)]
"""First the model becomes faster, then the samples slower."""


class Samples:
    """Samples that cost what they are told to."""

    def __init__(self, *, sleep_ms: float = 0.0, cpu_ms: float = 0.0, shape: tuple[int, ...] = (16,)) -> None:
        self._sleep_s, self._cpu_s = sleep_ms / 1e3, cpu_ms / 1e3
        self._sample = np.ones(shape, np.float32)

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        end = time.thread_time() + self._cpu_s
        while self._cpu_s and time.thread_time() < end:
            pass
        return self._sample


class ChangingSamples(Samples):
    """Samples that sleep for as long as a file says, in milliseconds."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = Path(path)

    def __getitem__(self, index: int) -> NDArray[Any]:
        time.sleep(float(self._path.read_text()) / 1e3)
        return super().__getitem__(index)
