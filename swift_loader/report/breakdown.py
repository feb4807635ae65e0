"""Where a batch's time goes, and what the workers do. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swift_loader.metrics.observations import Observations
from swift_loader.report.life import Life, Seconds, steady

__all__ = ["Breakdown", "CpuUse", "Part", "WorkerUse"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a batch's life."""

    name: str
    p50_s: float
    p99_s: float
    share: float
    """Of the time from the beginning of the batch to its delivery, over all batches; from 0 to 1."""


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """What one worker did."""

    worker_id: int
    num_batches: int
    busy_share: float
    """Share of the time in which it was at a batch, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class CpuUse:
    """What workers do while they are at a batch. The shares add up to 1."""

    running: float
    waiting_for_core: float
    """Ready to run, but all cores were taken. 0 where the system doesn't tell."""
    waiting_for_io: float
    """For files, the network, a lock, a sleep."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of the last batches went."""

    parts: tuple[Part, ...]
    """In the order of a batch's life."""
    idle: Part
    """Between two batches of a worker. The share is of the workers' time."""
    workers: tuple[WorkerUse, ...]
    """By their number. Workers that built none of the batches are missing."""
    cpu: CpuUse | None
    """None: not measured."""

    @classmethod
    def of(cls, observations: Observations) -> Breakdown:
        """Return where the time went. Without batches, all is 0."""
        kept = steady(observations)
        life = Life.of(kept)
        lasted = {
            "fetch": life.fetch,
            "collate": life.collate,
            "encode": life.encode,
            "transport": life.transport,
            "decode": life.decode,
            "delivery order": life.order,
            "wait for the loop": life.queued,
            "copy to device": life.copy,
            "handing over": life.pickup,
        }
        total = sum(float(seconds.sum()) for seconds in lasted.values())
        parts = tuple(_part(name, seconds, total) for name, seconds in lasted.items())
        idle = life.idle[np.isfinite(life.idle)]
        busy = float(life.service.sum())
        return cls(
            parts=parts,
            idle=_part("idle worker", idle, float(idle.sum()) + busy),
            workers=_workers(kept.batches["worker_id"], life),
            cpu=_cpu_use(life),
        )


def _part(name: str, seconds: Seconds, total_s: float) -> Part:
    if not seconds.size:
        return Part(name, 0.0, 0.0, 0.0)
    p50, p99 = (float(value) for value in np.quantile(seconds, [0.5, 0.99]))
    return Part(name, p50, p99, float(seconds.sum()) / total_s if total_s > 0 else 0.0)


def _workers(worker_ids: NDArray[np.int32], life: Life) -> tuple[WorkerUse, ...]:
    if not worker_ids.size:
        return ()
    ended = life.began + life.service
    span = max(float(ended.max() - life.began.min()), 1e-12)
    return tuple(
        WorkerUse(number, int((worker_ids == number).sum()), float(life.service[worker_ids == number].sum()) / span)
        for number in np.unique(worker_ids).tolist()
    )


def _cpu_use(life: Life) -> CpuUse | None:
    total = float(life.service.sum())
    if total <= 0 or not life.cpu.any():
        return None
    running = np.minimum(life.cpu, life.service)
    delay = np.minimum(life.known_run_delay, life.service - running)
    shares = float(running.sum()) / total, float(delay.sum()) / total
    return CpuUse(*shares, max(0.0, 1 - sum(shares)))
