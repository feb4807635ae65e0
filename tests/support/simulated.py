"""Observations without a loader: a simulated run of workers, a queue and a loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.metrics.observations import BATCH, Observations, Setup, SlowSample

_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """What a simulated run has to do. Times in milliseconds; each is drawn around its value."""

    num_batches: int = 200
    num_workers: int = 2
    fetch_ms: float = 8.0
    collate_ms: float = 1.0
    encode_ms: float = 0.2
    transport_ms: float = 0.1
    decode_ms: float = 0.05
    step_ms: float = 3.0
    steps_per_epoch: int = 100
    between_epochs_ms: float = 50.0
    batch_size: int = 32
    max_in_flight: int = 10
    spread: float = 0.3
    """Standard deviation of the logarithm of each time."""
    begin_ns: int = 1_000_000_000


def setup_of(load: Load) -> Setup:
    return Setup(
        num_workers=load.num_workers,
        max_in_flight=load.max_in_flight,
        is_in_flight_chosen=True,
        in_order=True,
        batch_size=load.batch_size,
        worker_type="process",
        num_cores=2.0,
        world_size_here=1,
        has_device=False,
    )


def observed(load: Load | None = None, **changes: Any) -> Observations:
    """Return what would be measured of a load. The same each time. `changes` are fields of `Load`."""
    load = Load(**changes) if load is None else load
    batches = _run(load)[-4096:]
    delivered = len(batches) > 0
    waits = batches["delivered_ns"] - batches["asked_ns"]
    elapsed_ns = int(batches["delivered_ns"][-1] - batches["asked_ns"][0]) if delivered else 0
    return Observations(
        setup=setup_of(load),
        batches=batches,
        slowest=tuple(
            SlowSample(7 * place, 0.05 - 0.002 * place, place % 3) for place in range(20 if delivered else 0)
        ),
        num_delivered=load.num_batches,
        num_samples=load.num_batches * load.batch_size,
        elapsed_s=elapsed_ns / 1e9,
        waited_s=float(waits.sum()) / 1e9,
        trainer_cpu_s=0.1,
        num_restarts=1,
        totals={},
    )


def _run(load: Load) -> NDArray[np.void]:
    """Simulate: a worker takes a batch once it is free and the queue has room; the loop takes them in order."""
    batches = np.zeros(load.num_batches, BATCH)
    _draw_times(batches, load)
    free_ns = [load.begin_ns] * max(1, load.num_workers)
    loop_ns = load.begin_ns
    ready_ns = np.zeros(load.num_batches, np.int64)
    step_ns = _draw(load, load.step_ms, salt=99)
    for place, batch in enumerate(batches):
        worker = int(np.argmin(free_ns))
        room_ns = load.begin_ns if place < load.max_in_flight else batches["delivered_ns"][place - load.max_in_flight]
        batch["epoch"], batch["step"] = divmod(place, load.steps_per_epoch)
        batch["worker_id"] = worker
        batch["sent_ns"] = room_ns
        batch["began_ns"] = max(free_ns[worker], room_ns) + 20_000
        built_ns = batch["began_ns"] + batch["fetch_ns"] + batch["collate_ns"] + batch["encode_ns"]
        free_ns[worker] = int(built_ns)
        batch["received_ns"] += built_ns
        ready_ns[place] = batch["received_ns"] + batch["decode_ns"]
        batch["asked_ns"] = loop_ns
        batch["delivered_ns"] = max(loop_ns, int(ready_ns[place])) + 5_000
        is_last = batch["step"] == load.steps_per_epoch - 1
        loop_ns = int(batch["delivered_ns"] + step_ns[place] + is_last * load.between_epochs_ms * _MS)
    batches["num_ready"] = _num_ready(batches, ready_ns)
    return batches


def _draw_times(batches: NDArray[np.void], load: Load) -> None:
    batches["fetch_ns"] = _draw(load, load.fetch_ms, salt=0)
    batches["collate_ns"] = _draw(load, load.collate_ms, salt=1)
    batches["encode_ns"] = _draw(load, load.encode_ms, salt=2)
    batches["received_ns"] = _draw(load, load.transport_ms, salt=3)
    batches["decode_ns"] = _draw(load, load.decode_ms, salt=4)
    batches["cpu_ns"] = batches["fetch_ns"] // 2
    batches["run_delay_ns"] = -1
    batches["num_samples"] = load.batch_size
    batches["nbytes"] = load.batch_size * 3 * 224 * 224


def _draw(load: Load, mean_ms: float, *, salt: int) -> NDArray[np.int64]:
    spread: NDArray[np.float64] = np.random.default_rng(salt).normal(0, load.spread, load.num_batches)
    return np.asarray(mean_ms * _MS * np.exp(spread), np.int64)


def _num_ready(batches: NDArray[np.void], ready_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Batches that are ready and not delivered when the loop asks for each batch."""
    num_built = np.searchsorted(np.sort(ready_ns), batches["asked_ns"], side="right")
    return np.asarray(np.maximum(0, num_built - np.arange(len(batches))), np.int64)
