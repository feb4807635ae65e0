"""Reads the data-parallel coordinate of this rank from a device mesh. Pure: never imports torch.

Ranks that differ only in the other dimensions (tensor, context, pipeline or expert parallel) need the same data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """Where a rank is in a device mesh, as far as data is concerned."""

    rank: int
    """The data-parallel coordinate: the data dimensions in the mesh's order, as one number."""
    world_size: int
    """How many such coordinates there are."""


def place_in(mesh: Any, data_dims: Sequence[str] | None = None) -> MeshPlace:
    """Return the data-parallel coordinate of this rank.

    Args:
        mesh: A `torch.distributed.device_mesh.DeviceMesh`, or what has its `mesh_dim_names`, `shape` and
            `get_coordinate()`.
        data_dims: Names of the dimensions whose ranks get different data. None: known by their names.

    Raises:
        TypeError: It isn't a mesh, or `data_dims` aren't names.
        ValueError: A dimension is unknown or has no name, or this rank isn't in the mesh.
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
    return MeshPlace(rank, math.prod(int(shape[axis]) for axis in chosen))


def _data_axes(names: tuple[str, ...] | None, num_axes: int, data_dims: Sequence[str] | None) -> list[int]:
    """Return the axes whose ranks get different data."""
    if data_dims is not None:
        return _named_axes(names, data_dims)
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


def _named_axes(names: tuple[str, ...] | None, data_dims: Sequence[str]) -> list[int]:
    if isinstance(data_dims, str) or not all(isinstance(name, str) for name in data_dims):
        raise TypeError(f"data_dims={data_dims!r} must be a tuple of names, such as ('dp',)")
    missing = [name for name in data_dims if name not in (names or ())]
    if missing:
        raise ValueError(
            f"data_dims names {_listed(missing)}, but the mesh has "
            f"{'the dimensions ' + _listed(names) if names else 'no names'}; name dimensions of the mesh"
        )
    assert names is not None or not data_dims
    return [axis for axis, name in enumerate(names or ()) if name in data_dims]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
