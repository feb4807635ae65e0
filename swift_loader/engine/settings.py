"""The settings of the engine of worker processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from swift_loader.engine.ledger import Limits

__all__ = ["ProcessSettings", "StartMethod"]


class StartMethod(str, Enum):
    """How worker processes are started."""

    TEMPLATE = "template"
    """All are forked from one fresh interpreter that holds the dataset."""
    SPAWN = "spawn"
    """Each is a fresh interpreter with its own dataset."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The settings of the engine, apart from those that are sent to the workers."""

    num_workers: int
    limits: Limits
    start_method: StartMethod
    validate: bool
    thread_per_worker: bool
    batch_decoder: Callable[[bytes], Any] | None
    max_restarts: int
    """How many workers in a row may be replaced in one place before one of them builds a batch."""
    stall_warning_s: float | None
    """How long a worker may spend on a batch that the loop waits for before there is a warning; None: no warning."""
    timeout_s: float | None
    """How long it may spend before it is killed and replaced, and how long the loop waits for a batch that no worker
    has; None: no limit."""
