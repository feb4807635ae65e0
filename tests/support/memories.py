"""Memory of each kind that a batch may be made in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from swift_loader.batch.collate import BatchMemory, default_collate
from swift_loader.transport.arena import Arena


def arena() -> Arena:
    return Arena(np.empty(1 << 16, np.uint8))


MEMORIES: list[Callable[[], BatchMemory]] = [BatchMemory, arena, lambda: Arena(np.empty(0, np.uint8))]


def collated(samples: list[Any]) -> list[Any]:
    return [default_collate(samples, make()) for make in MEMORIES]
