"""Which rank this process is, of how many: as `start()` says, else torch.distributed, else the launcher's environment.

Pure but for a look at `sys.modules`: torch is never imported for this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Placement", "expected_placement", "find_placement", "is_one_of_many"]

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, accelerate launch
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
    # Those of srun: an sbatch script has SLURM_PROCID and SLURM_NTASKS as well, but is only one process.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


@dataclass(frozen=True, slots=True)
class Placement:
    """A rank among `world_size` of them."""

    rank: int
    world_size: int
    source: str
    """Who says so, for an error."""


def find_placement(rank: int | None, world_size: int | None, environment: Mapping[str, str] = os.environ) -> Placement:
    """Return the place of this process.

    Args:
        rank: What `start()` was told, if anything.
        world_size: `nb_consumer`, if it was given.
        environment: Where launchers leave their variables.

    Raises:
        ValueError: The rank isn't below the number of ranks, or the launcher counts other ranks than `nb_consumer`.
        RuntimeError: There are several ranks, and nobody says which one this is.
    """
    if rank is not None and world_size is not None:
        return _checked(Placement(rank, world_size, "start()"))
    if world_size == 1:
        return Placement(0, 1, "nb_consumer")
    found = _of_torch_distributed() or _of_launcher(environment)
    if world_size is None:
        found = found or Placement(0, 1, "default")
        if rank not in (None, found.rank) and found.world_size > 1:
            raise ValueError(
                f"consumer_index={rank}, but {found.source} says that this is process {found.rank} of "
                f"{found.world_size}: leave it out, or say with nb_consumer how many consumers there are"
            )
        return found if rank is None else _checked(Placement(rank, found.world_size, "start()"))
    if found is None:
        raise RuntimeError(
            f"the loader serves nb_consumer={world_size} consumers, and doesn't know which one this is; call "
            f"loader.start(consumer_index) before iterating"
        )
    if found.world_size != world_size:
        raise ValueError(
            f"nb_consumer={world_size}, but {found.source} counts {found.world_size} processes: leave nb_consumer out, "
            f"or say which consumer this is with loader.start(consumer_index)"
        )
    return found


def expected_placement(world_size: int | None) -> Placement:
    """Return the place that `start()` will find, as far as is known before; rank 0's if nobody says."""
    try:
        return find_placement(None, world_size)
    except (RuntimeError, ValueError):
        return Placement(0, world_size or 1, "default")


def is_one_of_many(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torch.distributed or a launcher has several processes, each of which makes its own loader."""
    found = _of_torch_distributed() or _of_launcher(environment)
    return found is not None and found.world_size > 1


def _checked(placement: Placement) -> Placement:
    if placement.rank >= placement.world_size:
        raise ValueError(
            f"consumer_index={placement.rank} with nb_consumer={placement.world_size}: it must be below nb_consumer; "
            f"give each process its own index, or raise nb_consumer"
        )
    return placement


def _of_torch_distributed() -> Placement | None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Placement(distributed.get_rank(), distributed.get_world_size(), "torch.distributed")


def _of_launcher(environment: Mapping[str, str]) -> Placement | None:
    for rank_name, size_name in _LAUNCHERS:
        try:
            rank, world_size = int(environment[rank_name]), int(environment[size_name])
        except (KeyError, ValueError):
            continue
        if 0 <= rank < world_size:
            return Placement(rank, world_size, f"the launcher's {size_name}")
    return None
