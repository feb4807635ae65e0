"""What torch does with a DataPipe when an epoch begins: it seeds the pipe's shuffles and gives each rank a shard."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
import torch.utils.data

# Private, but the only ones that know which ranks share a seed.
from torch.utils.data.dataloader import _get_distributed_settings, _share_dist_seed

__all__ = ["draw_pipe_seed", "is_seeded_pipe", "prepare_pipe"]

_PIPES: tuple[Any, ...] = (torch.utils.data.IterDataPipe, torch.utils.data.MapDataPipe)


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


def prepare_pipe(dataset: Any, seed: int | None) -> Any:
    """Seed the shuffles of a pipe and shard it over the ranks. Other datasets stay as they are."""
    if seed is not None:
        dataset = torch.utils.data.graph_settings.apply_random_seed(dataset, torch.Generator().manual_seed(seed))
    if isinstance(dataset, _PIPES):
        world_size, rank = _get_distributed_settings()  # type: ignore[no-untyped-call]
        torch.utils.data.graph_settings.apply_sharding(dataset, world_size, rank)
    return dataset
