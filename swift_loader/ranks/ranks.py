"""Finds the rank of this process and the world size: from `start()`, else torch.distributed, else the launcher.

Reads `sys.modules` to see whether torch.distributed is imported. Never imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Ranks", "expected_ranks", "find_ranks", "torch_distributed"]

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, accelerate launch
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
    # Only srun sets SLURM_STEP_NUM_TASKS. An sbatch script has SLURM_PROCID and SLURM_NTASKS too, but is one process.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank of `world_size` ranks."""

    rank: int
    world_size: int
    source: str
    """Where this comes from, for error messages."""


def find_ranks(rank: int | None, world_size: int | None, environment: Mapping[str, str] = os.environ) -> Ranks:
    """Return the rank of this process and the world size.

    Args:
        rank: The `consumer_index` given to `start()`, or None.
        world_size: The option `nb_consumer`, or None.
        environment: Environment variables, in which launchers set rank and world size.

    Raises:
        ValueError: The rank isn't below the world size, or the launcher's world size isn't `nb_consumer`.
        RuntimeError: There are several ranks, and nothing says which one this is.
    """
    if rank is not None and world_size is not None:
        return _checked(Ranks(rank, world_size, "start()"))
    if world_size == 1:
        return Ranks(0, 1, "nb_consumer")
    found = _of_torch_distributed() or _of_launcher(environment)
    if world_size is None:
        found = found or Ranks(0, 1, "default")
        if rank not in (None, found.rank) and found.world_size > 1:
            raise ValueError(
                f"consumer_index={rank}, but {found.source} says that this is process {found.rank} of "
                f"{found.world_size}; leave consumer_index out, or give nb_consumer, the number of consumers"
            )
        return found if rank is None else _checked(Ranks(rank, found.world_size, "start()"))
    if found is None:
        raise RuntimeError(
            f"there are nb_consumer={world_size} consumers, and nothing says which one this process is; call "
            f"loader.start(consumer_index) before iterating"
        )
    if found.world_size != world_size:
        raise ValueError(
            f"nb_consumer={world_size}, but {found.source} counts {found.world_size} processes; leave nb_consumer out, "
            f"or call loader.start(consumer_index) with the rank of this process"
        )
    return found


def expected_ranks(world_size: int | None) -> Ranks:
    """Return the ranks that `start()` will find, as far as it is known. The default is rank 0."""
    try:
        return find_ranks(None, world_size)
    except (RuntimeError, ValueError):
        return Ranks(0, world_size or 1, "default")


def _checked(ranks: Ranks) -> Ranks:
    if ranks.rank >= ranks.world_size:
        raise ValueError(
            f"consumer_index={ranks.rank} with nb_consumer={ranks.world_size} is too large; it must be below "
            f"nb_consumer. Give each process its own index, or raise nb_consumer"
        )
    return ranks


def torch_distributed() -> Any:
    """Return the module torch.distributed if its process group is initialised; else None. Never imports it."""
    module: Any = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def _of_torch_distributed() -> Ranks | None:
    distributed = torch_distributed()
    if distributed is None:
        return None
    return Ranks(distributed.get_rank(), distributed.get_world_size(), "torch.distributed")


def _of_launcher(environment: Mapping[str, str]) -> Ranks | None:
    for rank_name, size_name in _LAUNCHERS:
        try:
            rank, world_size = int(environment[rank_name]), int(environment[size_name])
        except (KeyError, ValueError):
            continue
        if 0 <= rank < world_size:
            return Ranks(rank, world_size, f"the launcher's {size_name}")
    return None
