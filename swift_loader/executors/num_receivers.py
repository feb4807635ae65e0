"""How many threads receive from the workers while the loop is busy."""

from __future__ import annotations

from swift_loader.options import DeliveryOptions

MAX_RECEIVERS = 16
"""With more threads, they only wait for each other's GIL."""


def num_receivers(options: DeliveryOptions) -> int:
    """Return the number: one per worker, or one for all."""
    return min(options.num_workers, MAX_RECEIVERS) if options.thread_per_worker else 1
