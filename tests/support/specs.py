"""Specs of workers, as a loader makes them."""

from __future__ import annotations

from typing import Any

from swift_loader import SwiftLoader
from swift_loader.sampling.plan import PlanSettings, Uneven
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.worker.spec import WorkerSpec

ORDER = OrderSettings(seed=3, shuffle=False, window=0, run_length=1)


def spec_of(**options: Any) -> WorkerSpec:
    """Return the spec for these options of a loader: batches of four in the dataset's order."""
    given = {"dataset": []} | options if "dataset_class" not in options else options
    workers = SwiftLoader(**given)._options.workers
    return WorkerSpec(workers, PlanSettings(ORDER, 4, 1, 0, Uneven.PAD, drop_last=False))
