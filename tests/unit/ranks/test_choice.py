from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swift_loader.ranks.ranks import RankChoice
from tests.support.helpers import run_script

from .test_mesh import Mesh

MESH = Mesh(("dp", "tp"), (2, 4), (1, 3))


def found(nb_consumer: int | None = None, **choice: Any) -> tuple[int, int]:
    ranks = RankChoice(**choice).find(nb_consumer)
    return ranks.rank, ranks.world_size


def test_start_may_say_it_in_each_of_these_ways() -> None:
    assert found(consumer_index=1, nb_consumer=3) == (1, 3)
    assert found(rank=1, nb_consumer=3) == (1, 3)
    assert found(rank=1, world_size=3) == (1, 3)
    assert found(rank=1, world_size=3, nb_consumer=3) == (1, 3)
    assert found(mesh=MESH) == (1, 2)
    assert found(mesh=MESH, nb_consumer=2) == (1, 2)
    assert found(mesh=MESH, data_dims=("dp", "tp")) == (7, 8)


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        ({"rank": 1, "consumer_index": 1}, TypeError, "consumer_index and rank are both given"),
        ({"rank": 1, "mesh": MESH}, TypeError, "mesh says rank and world_size"),
        ({"world_size": 2, "mesh": MESH}, TypeError, "mesh says rank and world_size"),
        ({"data_dims": ("dp",)}, TypeError, "there is no mesh"),
        ({"rank": 0, "world_size": 2, "nb_consumer": 4}, ValueError, "world_size=2, but .* nb_consumer=4"),
        ({"rank": 2, "world_size": 2}, ValueError, "consumer_index=2 with nb_consumer"),
        ({"mesh": MESH, "nb_consumer": 4}, ValueError, "nb_consumer=4, but the mesh has 2 data-parallel ranks"),
    ],
)
def test_what_contradicts_itself_is_refused(choice: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        found(**choice)


@pytest.mark.slow
def test_a_real_mesh_tells_the_coordinate_and_which_ranks_start_the_loader(tmp_path: Path) -> None:
    script = """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore
        from swift_loader.ranks.ranks import RankChoice
        from swift_loader.ranks.ranks import file_number

        dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        for part in (mesh, mesh["dp", "tp"], mesh["dp"]):
            ranks = RankChoice(mesh=part).find(None)
            assert (ranks.rank, ranks.world_size, ranks.processes) == (0, 2, tuple(range(8))), ranks
            assert file_number(ranks) == 5
        alone = RankChoice(mesh=mesh["tp"]).find(None)
        assert (alone.rank, alone.world_size, alone.processes) == (0, 1, tuple(range(8))), alone
        all_split = RankChoice(mesh=mesh, data_dims=("pp", "dp", "tp")).find(None)
        assert (all_split.rank, all_split.world_size, all_split.processes) == (5, 8, None), all_split
        told = RankChoice(rank=1, world_size=4).find(None)
        assert (told.rank, told.world_size, told.processes) == (1, 4, tuple(range(8))), told
    """
    assert run_script(script, via="-c", folder=tmp_path) == ""
