from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from swift_loader.ranks.ranks import ranks_of_mesh


@dataclass
class Mesh:
    mesh_dim_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self.coordinate


def place(names: tuple[str, ...] | None, shape: tuple[int, ...], coordinate: tuple[int, ...], **more: Any) -> Any:
    found = ranks_of_mesh(Mesh(names, shape, coordinate), more.get("data_dims"), None)
    return found.rank, found.world_size


@pytest.mark.parametrize(
    ("names", "shape", "coordinate", "expected"),
    [
        (("dp",), (4,), (3,), (3, 4)),
        (("dp", "tp"), (2, 4), (1, 3), (1, 2)),
        (("tp",), (8,), (5,), (0, 1)),
        (("pp", "dp", "cp", "tp"), (2, 4, 2, 2), (1, 2, 1, 0), (2, 4)),
        (("pp", "dp_replicate", "dp_shard", "tp"), (2, 2, 4, 2), (0, 1, 2, 1), (6, 8)),
        (("replicate", "shard"), (2, 3), (1, 1), (4, 6)),
        (("FSDP", "TP"), (2, 2), (1, 0), (1, 2)),
        (("dp_replicate", "dp_shard_mod_ep", "dp_shard_in_ep", "tp"), (2, 2, 2, 2), (1, 0, 1, 1), (5, 8)),
        (None, (4,), (2,), (2, 4)),
    ],
)
def test_the_dimensions_that_split_the_data_are_known_by_name(
    names: tuple[str, ...] | None, shape: tuple[int, ...], coordinate: tuple[int, ...], expected: tuple[int, int]
) -> None:
    assert place(names, shape, coordinate) == expected


def test_data_dims_say_it_otherwise() -> None:
    assert place(("x", "y"), (2, 3), (1, 2), data_dims=("x",)) == (1, 2)
    assert place(("dp", "tp"), (2, 3), (1, 2), data_dims=("dp", "tp")) == (5, 6)
    assert place(("dp", "tp"), (2, 3), (1, 2), data_dims=("tp", "dp")) == (5, 6)  # the mesh's order, not theirs
    assert place(("dp", "tp"), (2, 3), (1, 2), data_dims=()) == (0, 1)


def test_each_coordinate_stands_for_equally_many_ranks() -> None:
    shape = (2, 3, 2)
    found = [place(("tp", "dp", "fsdp"), shape, at)[0] for at in product(*map(range, shape))]
    assert sorted(found) == sorted(2 * list(range(6)))


@pytest.mark.parametrize(
    ("mesh", "data_dims", "error", "text"),
    [
        (Mesh(("dp", "rows"), (2, 2), (0, 0)), None, ValueError, r"'dp', 'rows', and nothing .* 'rows' .* data_dims="),
        (Mesh(("dp_cp", "tp"), (2, 2), (0, 0)), None, ValueError, "'dp_cp'"),
        (Mesh(None, (2, 2), (0, 0)), None, ValueError, r"2 dimensions without names.*mesh_dim_names"),
        (Mesh(None, (2, 2), (0, 0)), ("dp",), ValueError, "the mesh has no names"),
        (
            Mesh(("dp",), (2,), (0,)),
            ("ddp",),
            ValueError,
            "data_dims names 'ddp', but the mesh has .*'dp'",
        ),
        (Mesh(("dp",), (2,), (0,)), "dp", TypeError, "tuple of names"),
        (Mesh(("dp",), (2,), None), None, ValueError, "isn't in the mesh"),
        (3, None, TypeError, "mesh is a int; it must be"),
    ],
)
def test_a_mesh_that_does_not_tell_is_refused(mesh: Any, data_dims: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ranks_of_mesh(mesh, data_dims, None)
