"""Loaders whose batches go to a device, and checks of these batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from swift_loader import SwiftLoader
from swift_loader.engine.engine import Engine
from tests.support.datasets import Blocks
from tests.support.helpers import wait_until

NBYTES, NUM_SAMPLES = Blocks.NBYTES, Blocks.NUM_SAMPLES
BATCH_SIZE = 4

Start = Callable[..., SwiftLoader]


def expected(step: int) -> Any:
    return np.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE, dtype=np.uint8)[:, None]


def check(batches: Iterable[Any]) -> None:
    """Look at the batches of a pass, when the device has made them."""
    for step, batch in enumerate(batches):
        assert batch.shape == (BATCH_SIZE, NBYTES)
        assert (batch == expected(step)).all(), f"batch {step} has the bytes of another one"


def engine_of(loader: SwiftLoader) -> Engine:
    assert loader._session is not None
    return loader._session.engine


def wait_for_ready(loader: SwiftLoader, count: int) -> None:
    """Wait until so many batches are ready; receiver threads are to be on duty, as after the first batch."""
    ledger = engine_of(loader)._scheduler.ledger
    wait_until(lambda: len(ledger.ready) >= count, f"{count} batches are ready")
