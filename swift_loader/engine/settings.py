"""How the engine of worker processes is to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from swift_loader.engine.ledger import Limits

__all__ = ["ProcessSettings", "StartMethod"]


class StartMethod(str, Enum):
    """Where worker processes come from."""

    TEMPLATE = "template"
    """Forked from one fresh interpreter that holds the dataset."""
    SPAWN = "spawn"
    """Each a fresh interpreter with a dataset of its own."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How the engine is to run, apart from what the workers need to know."""

    num_workers: int
    limits: Limits
    start_method: StartMethod
    validate: bool
    thread_per_worker: bool
    batch_decoder: Callable[[bytes], Any] | None
    max_restarts: int
    """How many workers are replaced, one after another in the same place, until one builds a batch."""
    stall_warning_s: float | None
    """How long a worker may be at a batch that the loop waits for, before the user is told."""
    timeout_s: float | None
    """The same, before it is killed and replaced; also how long the loop waits for a batch that no worker has."""
