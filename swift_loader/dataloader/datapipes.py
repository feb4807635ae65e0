"""What torch does with a DataPipe when an epoch begins: it seeds the pipe's shuffles and gives each rank, and each
worker, a shard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed
import torch.utils.data
from torch.utils.data import DataLoader

# Private, but the only ones that know which ranks share a seed, and which workers of all ranks share the data.
from torch.utils.data.dataloader import _get_distributed_settings, _sharding_worker_init_fn, _share_dist_seed

_PIPES: tuple[Any, ...] = (torch.utils.data.IterDataPipe, torch.utils.data.MapDataPipe)


def is_pipe(dataset: Any) -> bool:
    """Return whether a dataset is a DataPipe, of which each worker gets a shard."""
    return isinstance(dataset, _PIPES)


def is_seeded_pipe(dataset: Any) -> bool:
    """Return whether a seed is drawn for this dataset when an epoch begins."""
    return isinstance(dataset, torch.utils.data.IterDataPipe)


def draw_pipe_seed(dataset: Any, generator: torch.Generator | None) -> int | None:
    """Draw the seed of a pipe's shuffles, the same on all ranks. None, and nothing is drawn, for other datasets."""
    if not is_seeded_pipe(dataset):
        return None
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    group = torch.distributed.new_group(backend="gloo") if is_distributed else None
    return int(_share_dist_seed(generator, group))  # type: ignore[no-untyped-call]


def seed_pipe(dataset: Any, seed: int | None) -> None:
    """Seed the shuffles of a pipe, in place. None: leave the dataset as it is."""
    if seed is not None:
        torch.utils.data.graph_settings.apply_random_seed(dataset, torch.Generator().manual_seed(seed))


def shard_pipe(dataset: Any) -> None:
    """Give this rank its shard of a pipe, in place. Other datasets stay as they are."""
    if is_pipe(dataset):
        world_size, rank = _get_distributed_settings()  # type: ignore[no-untyped-call]
        torch.utils.data.graph_settings.apply_sharding(dataset, world_size, rank)


def init_of_workers(loader: DataLoader[Any]) -> Callable[[int], None] | None:
    """Return the loader's `worker_init_fn`. For a pipe, it gives the worker its shard first."""
    if not is_pipe(loader.dataset):
        return loader.worker_init_fn
    world_size, rank = _get_distributed_settings()  # type: ignore[no-untyped-call]
    return partial(_sharding_worker_init_fn, loader.worker_init_fn, world_size, rank)
