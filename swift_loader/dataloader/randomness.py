"""Decides how the workers of a DataLoader seed the global random generators."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from swift_loader.checks import check_choice
from swift_loader.worker.seeding import Rng

_SEEDERS = ("lightning", "lightning_fabric", "pytorch_lightning", "timm", "transformers", "accelerate")
"""Packages whose `worker_init_fn` only gives each worker another seed, which keyed samples have anyway."""


def wanted_rng(loader: DataLoader[Any]) -> Rng:
    """Return what the option `rng` says."""
    wanted: Any = getattr(loader, "rng", None)
    return check_choice("rng", "none" if wanted is None else wanted, Rng)


def has_init_of_user(loader: DataLoader[Any]) -> bool:
    """Return whether there is a `worker_init_fn` that may do more than those of frameworks, which only seed."""
    return _is_users(loader.worker_init_fn)


def rng_of(loader: DataLoader[Any]) -> Rng:
    """Return how to seed: as the option `rng` says, unless a stream or the user's `worker_init_fn` forbids it.

    A stream can't be read twice, so its draws can't be keyed by sample. A `worker_init_fn` of the user's may have
    seeded the generators, and his samples expect that.
    """
    rng = wanted_rng(loader)
    if isinstance(loader.dataset, IterableDataset):
        return Rng.NONE
    return Rng.NONE if rng is Rng.SAMPLE and has_init_of_user(loader) else rng


def _is_users(worker_init_fn: Any) -> bool:
    while isinstance(worker_init_fn, functools.partial):
        worker_init_fn = worker_init_fn.func
    if worker_init_fn is None:
        return False
    return str(getattr(worker_init_fn, "__module__", "")).partition(".")[0] not in _SEEDERS
