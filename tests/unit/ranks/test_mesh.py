from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from swift_loader.ranks.ranks import place_in


@dataclass
class Mesh:
    """What is needed of a DeviceMesh."""

    mesh_dim_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self.coordinate


def place(names: tuple[str, ...] | None, shape: tuple[int, ...], coordinate: tuple[int, ...], **more: Any) -> Any:
    found = place_in(Mesh(names, shape, coordinate), **more)
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


def test_a_name_that_nobody_knows_is_refused_with_all_names() -> None:
    with pytest.raises(ValueError, match=r"dimensions 'dp', 'rows', and nothing says .* 'rows' get .* data_dims="):
        place(("dp", "rows"), (2, 2), (0, 0))


def test_a_dimension_that_is_both_is_not_guessed() -> None:
    with pytest.raises(ValueError, match="'dp_cp'"):
        place(("dp_cp", "tp"), (2, 2), (0, 0))


def test_dimensions_without_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 dimensions without names.*mesh_dim_names"):
        place(None, (2, 2), (0, 0))
    with pytest.raises(ValueError, match="the mesh has no names"):
        place(None, (2, 2), (0, 0), data_dims=("dp",))


def test_data_dims_name_dimensions_of_the_mesh() -> None:
    with pytest.raises(ValueError, match=r"data_dims names 'ddp', but the mesh has the dimensions 'dp', 'tp'"):
        place(("dp", "tp"), (2, 2), (0, 0), data_dims=("ddp",))
    with pytest.raises(TypeError, match="tuple of names"):
        place(("dp", "tp"), (2, 2), (0, 0), data_dims="dp")


def test_a_rank_outside_the_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="isn't in the mesh"):
        place_in(Mesh(("dp",), (2,), None))


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(TypeError, match="mesh is a int; it must be"):
        place_in(3)
