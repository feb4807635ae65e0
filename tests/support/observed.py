"""Observations that a loader could have given, made by a small model of one: each time is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from swift_loader.metrics.observations import BATCH, Observations, Setup, SlowSample

SETUP = Setup(
    num_workers=2,
    max_in_flight=10,
    is_in_flight_chosen=True,
    in_order=True,
    batch_size=32,
    worker_type="process",
    num_cores=4.0,
    world_size_here=1,
    has_device=False,
)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a batch costs, in milliseconds."""

    fetch_ms: float | Sequence[float] = 10.0
    """One number, or one of each batch, from the first again after the last."""
    collate_ms: float = 0.0
    encode_ms: float = 0.0
    cpu_share: float = 0.0
    """Of the worker's time at a batch."""
    delay_share: float = 0.0
    transport_ms: float = 0.1
    decode_ms: float = 0.05
    step_ms: float = 1.0
    trainer_cpu_ms: float = 0.0
    """Per batch."""

    def fetch_of(self, batch: int) -> float:
        if isinstance(self.fetch_ms, (int, float)):
            return float(self.fetch_ms)
        return float(self.fetch_ms[batch % len(self.fetch_ms)])


USUAL = Costs(fetch_ms=[6.0, 8.0, 12.0, 8.0, 20.0], collate_ms=1.0, encode_ms=0.2, step_ms=3.0)


def observe(
    costs: Costs = USUAL,
    setup: Setup = SETUP,
    num_batches: int = 300,
    *,
    steps_per_epoch: int = 1_000_000,
    start_ns: int = 5_000_000_000,
    slowest: tuple[SlowSample, ...] = (),
) -> Observations:
    """Return what a loader with these costs gives, if no one waits for a core."""
    batches = np.zeros(num_batches, BATCH)
    free = [0.0] * max(1, setup.num_workers)
    delivered: list[float] = []
    now = 0.0
    for number in range(num_batches):
        room = (
            now
            if not setup.num_workers
            else delivered[number - setup.max_in_flight]
            if number >= setup.max_in_flight
            else 0.0
        )
        worker = int(np.argmin(free))
        began = max(free[worker], room) if setup.num_workers else now
        fetch, others = costs.fetch_of(number), costs.collate_ms + costs.encode_ms
        built = began + fetch + others
        free[worker] = built
        received = built + costs.transport_ms
        asked = now
        now = max(asked, received + costs.decode_ms)
        delivered.append(now)
        cpu = (fetch + others) * costs.cpu_share
        times = {"sent": room, "began": began, "received": received, "asked": asked, "delivered": now}
        lasted = {"fetch": fetch, "collate": costs.collate_ms, "encode": costs.encode_ms, "decode": costs.decode_ms}
        row = batches[number]
        for name, time in times.items():
            row[f"{name}_ns"] = start_ns + round(time * 1e6)
        for name, length in {**lasted, "cpu": cpu, "run_delay": (fetch + others) * costs.delay_share}.items():
            row[f"{name}_ns"] = round(length * 1e6)
        row["worker_id"], row["num_samples"] = worker, setup.batch_size
        row["epoch"], row["step"] = divmod(number, steps_per_epoch)
        now += costs.step_ms
    waited = batches["delivered_ns"] - batches["asked_ns"]
    return Observations(
        setup=setup,
        batches=batches,
        slowest=slowest,
        num_delivered=num_batches,
        num_samples=num_batches * setup.batch_size,
        elapsed_s=now / 1e3,
        waited_s=float(waited.sum()) / 1e9,
        trainer_cpu_s=costs.trainer_cpu_ms * num_batches / 1e3,
        num_restarts=0,
    )


def with_workers(number: int) -> Setup:
    """Return the usual setup with so many workers, and the limit in flight that is chosen for them."""
    return replace(SETUP, num_workers=number, max_in_flight=max(10, 3 * number))
