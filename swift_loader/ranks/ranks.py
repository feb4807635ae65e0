"""Finds the rank of this process and the world size: from `start()`, else torch.distributed, else the launcher.

Reads `sys.modules` to see whether torch.distributed is imported. Never imports torch.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Reads the data-parallel coordinate of this rank from a device mesh. Pure: never imports torch.
#
# Ranks that differ only in the other dimensions (tensor, context, pipeline or expert parallel) need the same data.

DATA_DIMS = frozenset(
    {
        "batch",
        "data",
        "data_parallel",
        "ddp",
        "dp",
        "dp_replicate",
        "dp_shard",
        "dp_shard_in_ep",  # torchtitan splits dp_shard in two, if experts are parallel
        "dp_shard_mod_ep",
        "fsdp",
        "hsdp",
        "replicate",
        "shard",
    }
)
"""Names of dimensions whose ranks get different data."""

MODEL_DIMS = frozenset(
    {
        "context",
        "context_parallel",
        "cp",
        "ep",
        "etp",
        "expert",
        "expert_parallel",
        "model",
        "model_parallel",
        "mp",
        "pipeline",
        "pipeline_parallel",
        "pp",
        "sequence",
        "sequence_parallel",
        "sp",
        "tensor",
        "tensor_parallel",
        "tp",
    }
)
"""Names of dimensions whose ranks get the same data."""


def ranks_of_mesh(mesh: Any, data_dims: Sequence[str] | None, world_size: int | None) -> Ranks:
    """Return the data-parallel coordinate of this rank: the data dimensions in the mesh's order, as one number.

    `mesh`: a `torch.distributed.device_mesh.DeviceMesh`, or what has its `mesh_dim_names`, `shape` and
    `get_coordinate()`. `data_dims`: names of the dimensions whose ranks get different data; None: known by their names.
    `world_size`: the option `nb_consumer`, or None. Raises `TypeError` if it isn't a mesh or these aren't names,
    `ValueError` if a dimension is unknown or has no name, this rank isn't in the mesh, or the mesh isn't one of
    `nb_consumer` data-parallel ranks.
    """
    try:
        names, shape, coordinate = mesh.mesh_dim_names, tuple(mesh.shape), mesh.get_coordinate()
    except AttributeError:
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; it must be a torch.distributed.device_mesh.DeviceMesh"
        ) from None
    if coordinate is None:
        raise ValueError(
            "this rank isn't in the mesh, so it has no data-parallel coordinate; give the mesh of the job, or "
            "start() only on the ranks of this one"
        )
    chosen = _data_axes(None if names is None else tuple(names), len(shape), data_dims)
    rank = 0
    for axis in chosen:
        rank = rank * int(shape[axis]) + int(coordinate[axis])
    place = Ranks(rank, math.prod(int(shape[axis]) for axis in chosen), "the mesh")
    if world_size not in (None, place.world_size):
        raise ValueError(
            f"nb_consumer={world_size}, but the mesh has {place.world_size} data-parallel ranks; leave nb_consumer out"
        )
    get_whole = getattr(mesh, "_get_root_mesh", None)  # private: before torch 2.8 it is elsewhere
    job = None if get_whole is None else tuple(sorted(get_whole().mesh.flatten().tolist()))
    return _with_processes(place, job)  # of the mesh that this one is a part of, if torch tells


def _data_axes(names: tuple[str, ...] | None, num_axes: int, data_dims: Sequence[str] | None) -> list[int]:
    """Return the axes whose ranks get different data."""
    if data_dims is not None:
        if isinstance(data_dims, str) or not all(isinstance(name, str) for name in data_dims):
            raise TypeError(f"data_dims={data_dims!r} must be a tuple of names, such as ('dp',)")
        if missing := [name for name in data_dims if name not in (names or ())]:
            raise ValueError(
                f"data_dims names {_listed(missing)}, but the mesh has "
                f"{'the dimensions ' + _listed(names) if names else 'no names'}; name dimensions of the mesh"
            )
        return [axis for axis, name in enumerate(names or ()) if name in data_dims]
    if names is None:
        if num_axes == 1:
            return [0]
        raise ValueError(
            f"the mesh has {num_axes} dimensions without names, so nothing says which of them split the data; give "
            f"mesh_dim_names to init_device_mesh, or rank= and world_size= of the data-parallel ranks to start()"
        )
    unknown = [name for name in names if name.lower() not in DATA_DIMS | MODEL_DIMS]
    if unknown:
        raise ValueError(
            f"the mesh has the dimensions {_listed(names)}, and nothing says whether ranks of {_listed(unknown)} get "
            f"different data; name all dimensions that split the data, such as data_dims=({names[0]!r},). Known by "
            f"their names are {_listed(sorted(DATA_DIMS))} (different data) and {_listed(sorted(MODEL_DIMS))} (same "
            f"data)"
        )
    return [axis for axis, name in enumerate(names) if name.lower() in DATA_DIMS]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


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

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError(
                f"consumer_index={self.rank} with nb_consumer={self.world_size} is too large; it must be below "
                f"nb_consumer. Give each process its own index, or raise nb_consumer"
            )


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


def find_ranks(rank: int | None, world_size: int | None, environment: Mapping[str, str] = os.environ) -> Ranks:
    """Return the rank of this process and the world size.

    `rank`: the `consumer_index` given to `start()`, or None. `world_size`: the option `nb_consumer`, or None. Launchers
    set both in `environment`. Raises `ValueError` if the rank isn't below the world size or the launcher's world size
    isn't `nb_consumer`, `RuntimeError` if there are several ranks, and nothing says which one this is.
    """
    if rank is not None and world_size is not None:
        return Ranks(rank, world_size, "start()")
    if world_size == 1:
        return Ranks(0, 1, "nb_consumer")
    found = _of_job(environment)
    if world_size is None:
        found = found or Ranks(0, 1, "default")
        if rank not in (None, found.rank) and found.world_size > 1:
            raise ValueError(
                f"consumer_index={rank}, but {found.source} says that this is process {found.rank} of "
                f"{found.world_size}; leave consumer_index out, or give nb_consumer, the number of consumers"
            )
        return found if rank is None else Ranks(rank, found.world_size, "start()")
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
    job = _of_job(environment)
    return ranks.rank if job is None or job.world_size == ranks.world_size else job.rank


def torch_distributed() -> Any:
    """Return the module torch.distributed if its process group is initialised; else None. Never imports it."""
    module: Any = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def _of_job(environment: Mapping[str, str]) -> Ranks | None:
    """Return what torch.distributed says, else the launcher; None if neither does."""
    distributed = torch_distributed()
    if distributed is not None:
        return Ranks(distributed.get_rank(), distributed.get_world_size(), "torch.distributed")
    for rank_name, size_name in _LAUNCHERS:
        try:
            rank, world_size = int(environment[rank_name]), int(environment[size_name])
        except (KeyError, ValueError):
            continue
        if 0 <= rank < world_size:
            return Ranks(rank, world_size, f"the launcher's {size_name}")
    return None


@dataclass(frozen=True, slots=True)
class RankChoice:
    """The arguments of `start()` that say which data this rank gets. The integers are checked."""

    consumer_index: int | None = None
    rank: int | None = None
    """The same as `consumer_index`; only one of them may be given."""
    world_size: int | None = None
    """How many data-parallel ranks there are."""
    mesh: Any = None
    data_dims: Sequence[str] | None = None
    share_batches: bool = True
    """Whether ranks of one node that need the same data load it once."""

    def find(self, nb_consumer: int | None) -> Ranks:
        """Return the rank of this process. `nb_consumer` is the option, or None.

        Raises `TypeError` if two arguments exclude each other, `ValueError` if they contradict each other, the option
        or the launcher, `RuntimeError` if there are several ranks, and nothing says which one this is.
        """
        if self.consumer_index is not None and self.rank is not None:
            raise TypeError("consumer_index and rank are both given; they are one argument, so give rank only")
        rank = self.consumer_index if self.rank is None else self.rank
        if self.mesh is not None:
            if rank is not None or self.world_size is not None:
                raise TypeError("mesh says rank and world_size; give mesh, or rank and world_size, not both")
            return ranks_of_mesh(self.mesh, self.data_dims, nb_consumer)
        if self.data_dims is not None:
            raise TypeError("data_dims names dimensions of a mesh, but there is no mesh; give mesh, too")
        if self.world_size is not None and nb_consumer not in (None, self.world_size):
            raise ValueError(
                f"world_size={self.world_size}, but the loader was made with nb_consumer={nb_consumer}; they are one "
                f"number, so give world_size only"
            )
        if rank is not None and self.world_size is not None:
            return _with_processes(Ranks(rank, self.world_size, "start()"), None)  # all ranks of the job call it
        return find_ranks(rank, nb_consumer if self.world_size is None else self.world_size)
