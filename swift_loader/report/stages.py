"""Where the time of batches went, and a loader's figures for dashboards. Pure.

    sent ─► began ─fetch─► ─collate─► ─encode─► built ─► received ─decode─► ready ─► its turn ─► delivered

Reports, pictures and dashboards take the times of a stage from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from swift_loader.metrics.observations import Observations, build_ns, steps_ns

Durations = NDArray[np.int64]
"""`(n,)`, in nanoseconds, one of each batch."""

WORKER, TRAINER, NOBODY = "worker", "trainer", "nobody"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a batch's life."""

    name: str
    p50_s: float
    p99_s: float
    share: float
    """Of the time from the beginning of the batch to its delivery, over all batches; from 0 to 1."""
    who: str
    """Who is at the batch: `"worker"`, `"trainer"`, or `"nobody"`, because the batch waits."""


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
        parts = _parts(kept)
        total_ns = sum(int(durations.sum()) for _, _, durations in parts)
        idle, busy_ns = _idle_ns(kept.batches), int(build_ns(kept.batches).sum())
        return cls(
            parts=tuple(_part(name, who, durations, total_ns) for name, who, durations in parts),
            idle=_part("idle worker", NOBODY, idle, int(idle.sum()) + busy_ns),
            workers=_workers(kept.batches),
            cpu=_cpu_use(kept.batches),
        )


def steady(observations: Observations) -> Observations:
    """Return the observations without the batches of the start, which waited for workers to start."""
    batches = observations.batches
    if observations.num_delivered > len(batches):
        return observations
    num_first = min(observations.setup.num_workers + 1, len(batches) // 2)
    return replace(observations, batches=batches[num_first:])


def stage_ns(batches: NDArray[np.void], stage: str) -> Durations:
    """Return how long each batch took in a stage, or how long the loop waited for it (`"wait"`)."""
    if stage == "wait":
        durations = batches["delivered_ns"] - batches["asked_ns"]
    elif stage == "transport":
        is_measured = (batches["began_ns"] > 0) & (batches["received_ns"] > 0)
        durations = np.where(is_measured, batches["received_ns"] - batches["began_ns"] - build_ns(batches), 0)
    else:
        durations = batches[f"{stage}_ns"]
    positive: Durations = np.maximum(durations, 0)
    return positive


def _parts(observations: Observations) -> list[tuple[str, str, Durations]]:
    """Return each part of a batch's life, who is at the batch, and how long it took."""
    batches = observations.batches
    asked, received, delivered = (batches[f"{name}_ns"] for name in ("asked", "received", "delivered"))
    copy = stage_ns(batches, "copy")
    ready = np.where(received > 0, np.minimum(received + batches["decode_ns"], delivered), delivered)
    turn = np.maximum.accumulate(ready) if observations.setup.in_order else ready  # all batches before it are ready
    return [
        *((stage, WORKER, stage_ns(batches, stage)) for stage in ("fetch", "collate", "encode")),
        ("transport", NOBODY, stage_ns(batches, "transport")),
        ("decode", TRAINER, stage_ns(batches, "decode")),
        ("delivery order", NOBODY, turn - ready),
        ("wait for the loop", NOBODY, np.maximum(0, asked - turn)),
        ("copy to device", TRAINER, copy),
        ("handing over", TRAINER, np.maximum(0, delivered - np.maximum(asked, turn) - copy)),
    ]


def _idle_ns(batches: NDArray[np.void]) -> Durations:
    """Return how long workers were idle before each batch but their first ones."""
    ordered = batches[np.lexsort((batches["began_ns"], batches["worker_id"]))]
    between = ordered["began_ns"][1:] - (ordered["began_ns"] + build_ns(ordered))[:-1]
    idle: Durations = np.maximum(0, between[np.diff(ordered["worker_id"]) == 0])
    return idle


def _part(name: str, who: str, durations: Durations, total_ns: int) -> Part:
    if not durations.size:
        return Part(name, 0.0, 0.0, 0.0, who)
    p50, p99 = (float(value) / 1e9 for value in np.quantile(durations, [0.5, 0.99]))
    return Part(name, p50, p99, int(durations.sum()) / total_ns if total_ns > 0 else 0.0, who)


def _workers(batches: NDArray[np.void]) -> tuple[WorkerUse, ...]:
    if not batches.size:
        return ()
    began, service, numbers = batches["began_ns"], build_ns(batches), batches["worker_id"]
    span = max(int((began + service).max() - began.min()), 1)
    return tuple(
        WorkerUse(number, int((numbers == number).sum()), int(service[numbers == number].sum()) / span)
        for number in np.unique(numbers).tolist()
    )


def _cpu_use(batches: NDArray[np.void]) -> CpuUse | None:
    service, cpu, delay = build_ns(batches), batches["cpu_ns"], batches["run_delay_ns"]
    total = float(service.sum())
    if total <= 0 or not cpu.any():
        return None
    is_known = delay >= 0
    cpu_known = float(cpu[is_known].sum())
    share = float(delay[is_known].sum()) / cpu_known if cpu_known > 0 else 0.0
    running = np.minimum(cpu, service)
    delay = np.minimum(np.where(is_known, delay, share * cpu), service - running)  # as elsewhere, where not measured
    shares = float(running.sum()) / total, float(delay.sum()) / total
    return CpuUse(*shares, max(0.0, 1 - sum(shares)))


WINDOW = 512
"""Batches that make up the recent past of dashboards."""

_FIGURES = ("batches_per_s", "samples_per_s", "wait_share", "ready_mean", "num_workers")
_STAGES = ("fetch", "collate", "encode", "transport", "decode", "wait")
_SHARES = (0.5, 0.99)
_QUANTILES = tuple(f"{stage}_ms_{name}" for stage in _STAGES for name in ("p50", "p99"))
_TOTALS = ("batches_total", "samples_total", "waited_s_total", "elapsed_s_total", "restarts_total")

NAMES = (*_FIGURES, *_QUANTILES, *_TOTALS)
"""All keys of `flat_metrics`, without the prefix."""


def flat_metrics(observations: Observations | None, prefix: str = "swift_loader/") -> dict[str, float]:
    """Return figures of the last 512 batches, and counts since the loader started. Takes about 0.1 ms.

    The keys are always the same. Without any batch, the figures are 0; None is a loader that hasn't started.
    """
    if observations is None:
        return dict.fromkeys((prefix + name for name in NAMES), 0.0)
    batches = observations.batches[-WINDOW:]
    waited_ns = int(stage_ns(batches, "wait").sum())
    run_s = (waited_ns + int(steps_ns(batches).sum())) / 1e9 or float("inf")
    figures = (
        len(batches) / run_s,
        int(batches["num_samples"].sum()) / run_s,
        waited_ns / 1e9 / run_s,
        int(batches["num_ready"].sum()) / max(1, len(batches)),
        observations.setup.num_workers,
        *_quantiles_ms(batches),
        observations.num_delivered,
        observations.num_samples,
        observations.waited_s,
        observations.elapsed_s,
        observations.num_restarts,
    )
    return {prefix + name: float(figure) for name, figure in zip(NAMES, figures, strict=True)}


def _quantiles_ms(batches: NDArray[np.void]) -> list[float]:
    """Return quantiles of each stage. Each is a time that a batch had, not one between two."""
    if not len(batches):
        return [0.0] * len(_QUANTILES)
    times = np.stack([stage_ns(batches, stage) for stage in _STAGES])
    times.sort(axis=1)
    places = [int(share * (len(batches) - 1) + 0.5) for share in _SHARES]
    quantiles: list[float] = (times[:, places] / 1e6).ravel().tolist()
    return quantiles
