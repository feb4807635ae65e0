"""Twelve workloads with a poor setting each, for the benchmark of the advice."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader import default_collate

__all__ = ["BATCH_SIZE", "WORKLOADS", "Samples", "Workload"]

BATCH_SIZE = 16
_NUM_SAMPLES = 200_000


class Samples:
    """Samples that cost what they are told to."""

    def __init__(
        self,
        *,
        sleep_ms: float = 0.0,
        cpu_ms: float = 0.0,
        copied_mb: int = 0,
        slow_share: float = 0.0,
        slow_factor: float = 1.0,
        shape: tuple[int, ...] = (16,),
    ) -> None:
        self._sleep_s, self._cpu_s = sleep_ms / 1e3, cpu_ms / 1e3
        self._slow_share, self._slow_factor = slow_share, slow_factor
        self._sample = np.ones(shape, np.float32)
        self._source = np.ones(copied_mb * 2**20, np.uint8)
        self._copy = np.empty_like(self._source)

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        is_slow = index * 2654435761 % 2**32 < self._slow_share * 2**32
        if self._sleep_s:
            time.sleep(self._sleep_s * (self._slow_factor if is_slow else 1))
        if self._cpu_s:
            burn(self._cpu_s)
        if len(self._source):
            np.copyto(self._copy, self._source)
        return self._sample


def burn(seconds: float) -> None:
    """Use so much CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def slow_collate(samples: list[Any], *, cpu_ms: float) -> Any:
    """Collate, and use CPU time."""
    burn(cpu_ms / 1e3)
    return default_collate(samples)


def encode(batch: Any) -> bytes:
    """Encode a batch, for free."""
    return bytes(np.asarray(batch).data)


def slow_decode(data: bytes, *, cpu_ms: float) -> Any:
    """Decode a batch in the trainer, and use CPU time."""
    burn(cpu_ms / 1e3)
    return np.frombuffer(data, np.float32)


@dataclass(frozen=True, slots=True)
class Workload:
    """A dataset, a model and a poor setting."""

    name: str
    samples: dict[str, Any]
    step_ms: float
    """The model sleeps so long for each batch."""
    options: dict[str, Any]
    """Of the loader. The poor ones."""
    bound: str = "data-bound"
    """The right verdict."""
    others: dict[str, Any] = field(default_factory=dict)
    """Options that stay."""


_TAIL = {"sleep_ms": 0.5, "slow_share": 0.02, "slow_factor": 40}

WORKLOADS = [
    Workload("I/O", {"sleep_ms": 1.0}, 4, {"worker_per_consumer": 1}),
    Workload("slow I/O", {"sleep_ms": 5.0}, 6, {"worker_per_consumer": 2}),
    Workload("CPU", {"cpu_ms": 0.5}, 6, {"worker_per_consumer": 1}),
    Workload("CPU, more than the cores have", {"cpu_ms": 1.0}, 2, {"worker_per_consumer": 1}),
    Workload("heavy tail", _TAIL, 6, {"worker_per_consumer": 2}),
    Workload("heavy tail, few in flight", _TAIL, 4, {"worker_per_consumer": 4, "data_queue_size": 4}),
    Workload("memory", {"copied_mb": 16}, 3, {"worker_per_consumer": 1}),
    Workload(
        "collate",
        {"sleep_ms": 0.1},
        5,
        {"worker_per_consumer": 1},
        others={"collate_fn": partial(slow_collate, cpu_ms=6.0)},
    ),
    Workload(
        "transport",
        {"sleep_ms": 0.8},
        1,
        {"worker_per_consumer": 1},
        others={"batch_encoder": encode, "batch_decoder": partial(slow_decode, cpu_ms=5.0)},
    ),
    Workload("slow model", {"cpu_ms": 0.2}, 12, {"worker_per_consumer": 2}, bound="model-bound"),
    Workload("I/O and CPU", {"sleep_ms": 0.7, "cpu_ms": 0.2}, 5, {"worker_per_consumer": 1}),
    Workload("I/O and large batches", {"sleep_ms": 0.7, "shape": (3, 224, 224)}, 6, {"worker_per_consumer": 1}),
]
