"""Says what a loader and its machine have, for whoever looks at its measurements."""

from __future__ import annotations

from swift_loader.metrics.machine import available_cores, ranks_here
from swift_loader.metrics.observations import Setup
from swift_loader.options import DeliveryOptions


def setup_of(delivery: DeliveryOptions, *, num_workers: int, batch_size: int, has_device: bool) -> Setup:
    """Return what there is now. `num_workers` 0: batches are built in the loop's thread."""
    in_flight = delivery.in_flight
    return Setup(
        num_workers=num_workers,
        max_in_flight=in_flight.num_batches if num_workers else 1,
        is_in_flight_chosen=in_flight.is_chosen,
        in_order=delivery.in_order,
        batch_size=batch_size,
        worker_type=delivery.worker_type.value,
        num_cores=available_cores(),
        world_size_here=ranks_here(),
        has_device=has_device,
        num_remote=0 if delivery.executor is None else max(0, num_workers - delivery.num_local),
    )
