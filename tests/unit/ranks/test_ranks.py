from __future__ import annotations

import pytest

from swift_loader.ranks.ranks import Ranks, expected_ranks, file_number, find_ranks

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4"}


def place(rank: int | None, world_size: int | None, environment: dict[str, str]) -> tuple[int, int]:
    found = find_ranks(rank, world_size, environment)
    return found.rank, found.world_size


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        (TORCHRUN, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, (1, 3)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2)),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, (5, 8)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),  # the one process of an sbatch script
        ({"RANK": "2"}, (0, 1)),
        ({"RANK": "x", "WORLD_SIZE": "4"}, (0, 1)),
        ({"RANK": "4", "WORLD_SIZE": "4"}, (0, 1)),
        (TORCHRUN | {"PMI_RANK": "0", "PMI_SIZE": "2"}, (2, 4)),
    ],
)
def test_nobody_needs_to_say_what_the_launcher_knows(environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert place(None, None, environment) == expected


def test_what_start_says_comes_first() -> None:
    assert place(1, 3, TORCHRUN) == (1, 3)
    assert place(2, None, TORCHRUN) == (2, 4)
    assert place(None, 4, TORCHRUN) == (2, 4)
    assert place(None, 1, TORCHRUN) == (0, 1)


def test_before_start_rank_0_stands_for_a_rank_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert expected_ranks(3).rank == 0
    assert expected_ranks(3).world_size == 3
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert expected_ranks(3).rank == 2
    assert expected_ranks(2).rank == 0  # several processes for each of two consumers


@pytest.mark.parametrize(
    ("rank", "world_size", "environment", "error", "text"),
    [
        (None, 2, {}, RuntimeError, r"nb_consumer=2 consumers, .* call loader\.start"),
        (None, 3, TORCHRUN, ValueError, "nb_consumer=3, but the launcher's WORLD_SIZE counts 4 processes"),
        (3, 3, TORCHRUN, ValueError, "consumer_index=3 with nb_consumer"),
        (1, None, {}, ValueError, "consumer_index=1 with nb_consumer"),
        (0, None, TORCHRUN, ValueError, "consumer_index=0, but the launcher's WORLD_SIZE says .* process 2 of 4"),
    ],
)
def test_what_contradicts_the_launcher_is_refused(
    rank: int | None, world_size: int | None, environment: dict[str, str], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        place(rank, world_size, environment)


@pytest.mark.parametrize(
    ("rank", "world_size", "environment", "expected"),
    [
        (1, 3, {}, 1),
        (3, 4, TORCHRUN, 3),  # as many consumers as processes: whoever starts them may count them otherwise
        (0, 1, TORCHRUN, 2),  # each process has the whole dataset
        (1, 2, TORCHRUN, 2),  # two processes for each consumer
    ],
)
def test_each_process_has_its_own_number_for_its_files(
    rank: int, world_size: int, environment: dict[str, str], expected: int
) -> None:
    assert file_number(Ranks(rank, world_size, "start()"), environment) == expected
