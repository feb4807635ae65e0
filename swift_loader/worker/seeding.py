"""The global random generators, keyed by batch.

Before a batch is built, `random`, the legacy `numpy.random` and torch's default generator are seeded from (seed, epoch,
rank, step): what a batch holds doesn't depend on which worker builds it, nor on what that worker built before. Only
libraries that are already imported are touched.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from swift_loader.permutation import derive_key

__all__ = ["preserved_generators", "seed_generators"]

_SEEDING = 5
"""Keeps these keys apart from those of the order."""


def seed_generators(seed: int, epoch: int, rank: int, step: int) -> None:
    """Seed the global generators of this process for one batch."""
    key = derive_key(seed, _SEEDING, epoch, rank, step)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the legacy generator is what old transforms use
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(key)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Put the global generators back as they were, for code that runs in the user's own process."""
    torch = sys.modules.get("torch")
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch_state = torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if torch is not None and torch_state is not None:
            torch.set_rng_state(torch_state)
