from __future__ import annotations

import pytest

from swift_loader.worker.rank_environment import is_of_rank, rank_variables, set_rank_variables


@pytest.mark.parametrize(
    "name", ["RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"]
)
def test_what_a_launcher_sets_for_each_rank_is_the_ranks(name: str) -> None:
    assert is_of_rank(name)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_JOB_ID", "SLURM_TMPDIR", "OMPI_COMM_WORLD_SIZE", "HOME"])
def test_what_is_the_same_on_all_ranks_is_not_the_ranks(name: str) -> None:
    assert not is_of_rank(name)


def test_a_worker_gets_the_variables_of_its_rank_in_place_of_those_of_another_one() -> None:
    environ = {"RANK": "0", "CUDA_VISIBLE_DEVICES": "0", "HOME": "/home"}
    set_rank_variables(environ, rank_variables({"RANK": "1", "LOCAL_RANK": "1", "HOME": "/elsewhere"}))
    assert environ == {"RANK": "1", "LOCAL_RANK": "1", "HOME": "/home"}
