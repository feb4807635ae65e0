"""What was measured of a DataLoader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from swift_loader.dataloader.workers import delivery_of
from swift_loader.executors.setup import setup_of
from swift_loader.metrics.metrics import Metrics
from swift_loader.metrics.observations import Observations, Setup

__all__ = ["observations_of"]


def observations_of(loader: DataLoader[Any], metrics: Metrics) -> Observations:
    """Return what `metrics` has measured of the loader, in all its epochs. Any thread."""
    return metrics.observations(_setup_of(loader))


def _setup_of(loader: DataLoader[Any]) -> Setup:
    """Return what the loader and its machine have now."""
    batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
    return setup_of(delivery_of(loader), num_workers=loader.num_workers, batch_size=batch_size, has_device=False)
