"""Finds the rank of this process and the world size: from `start()`, else torch.distributed, else the launcher.

Reads `sys.modules` to see whether torch.distributed is imported. Never imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swift_loader.ranks.mesh import place_in

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
    processes: tuple[int, ...] | None = None
    """All ranks of torch.distributed that start the loader, if some of them have the same `rank` here and get the same
    data. None: each has its own."""


def ranks_of_mesh(mesh: Any, data_dims: Sequence[str] | None, world_size: int | None) -> Ranks:
    """Return the data-parallel rank in a device mesh.

    Args:
        mesh: A `torch.distributed.device_mesh.DeviceMesh`.
        data_dims: Names of the dimensions that split the data. None: known by their names.
        world_size: The option `nb_consumer`, or None.

    Raises:
        TypeError: It isn't a mesh, or `data_dims` aren't names.
        ValueError: The mesh doesn't tell the coordinate, or it isn't that of `nb_consumer` ranks.
    """
    place = place_in(mesh, data_dims)
    if world_size not in (None, place.world_size):
        raise ValueError(
            f"nb_consumer={world_size}, but the mesh has {place.world_size} data-parallel ranks; leave nb_consumer out"
        )
    return _with_processes(Ranks(place.rank, place.world_size, "the mesh"), _ranks_in(mesh))


def ranks_of_job(rank: int, world_size: int) -> Ranks:
    """Return the data-parallel rank that `start(rank, world_size=...)` gave. All ranks of the job call it.

    Raises:
        ValueError: The rank isn't below the world size.
    """
    return _with_processes(_checked(Ranks(rank, world_size, "start()")), None)


def _with_processes(ranks: Ranks, processes: tuple[int, ...] | None) -> Ranks:
    """Add the ranks of torch.distributed that start the loader, by default all, unless each has its own data."""
    distributed = torch_distributed()
    if distributed is None:
        return ranks
    everyone = tuple(range(distributed.get_world_size()))
    processes = everyone if processes is None or distributed.get_rank() not in processes else processes
    if processes == everyone and len(everyone) <= ranks.world_size:
        return ranks
    return replace(ranks, processes=processes)


def _ranks_in(mesh: Any) -> tuple[int, ...] | None:
    """Return the ranks of a mesh; of the one that it is a part of, if torch tells. None if nothing tells."""
    get_whole = getattr(mesh, "_get_root_mesh", None)  # private: before torch 2.8 it is elsewhere
    return None if get_whole is None else tuple(sorted(get_whole().mesh.flatten().tolist()))


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


def file_number(ranks: Ranks, environment: Mapping[str, str] = os.environ) -> int:
    """Return a number for the names of files that no other process of the job has.

    It is the data-parallel rank if there are as many of them as processes, else the rank in the job.
    """
    job = _of_torch_distributed() or _of_launcher(environment)
    return ranks.rank if job is None or job.world_size == ranks.world_size else job.rank


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
