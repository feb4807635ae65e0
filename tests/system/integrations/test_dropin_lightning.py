from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import exhaustive
from tests.system.integrations.ranks import run_ranks


def study(num_ranks: int, folder: Path, num_workers: int, *arguments: str) -> list[Any]:
    launched = 0 if num_ranks == 1 else num_ranks
    arguments = (str(num_workers), *arguments)
    return run_ranks("dropin_lightning.py", launched, folder, *arguments, timeout_s=120, needs="lightning")


def assert_same_as_torch(rank: Any) -> None:
    assert rank["swift"]["is_swift"] == [True, True], "the Trainer made plain loaders of them"
    for name in ("seen", "validated", "weights"):
        assert rank["swift"][name] == rank["torch"][name], name


def assert_resumed_exactly(rank: Any, *, but: str | None = None) -> None:
    whole = rank["swift"]
    assert rank["resumed"]
    for run in rank["resumed"]:
        if but is None or not run["place"].startswith(but):
            assert run["seen"] == whole["seen"][run["num_steps"] :], run["place"]
            assert run["weights"] == whole["weights"], run["place"]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_fit_sees_what_torch_gives_and_resumes_from_each_step(tmp_path: Path) -> None:
    (rank,) = study(1, tmp_path, 0)

    assert_same_as_torch(rank)
    # The Trainer doesn't load the loader's state from a checkpoint of an epoch's end; the callback does.
    assert_resumed_exactly(rank, but="end")


@pytest.mark.exhaustive
@pytest.mark.timeout(150)
@pytest.mark.parametrize("arguments", [exhaustive(()), ("callback",)])
def test_a_fit_of_two_ranks_sees_what_torch_gives_and_resumes_from_each_checkpoint(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    for rank in study(2, tmp_path, 0, *arguments):
        assert_same_as_torch(rank)
        assert_resumed_exactly(rank)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_callback_resumes_a_fit_where_the_trainer_loads_no_state(
    tmp_path: Path,
) -> None:
    (rank,) = study(1, tmp_path, 0, "callback")

    assert_same_as_torch(rank)
    assert_resumed_exactly(rank)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_fit_with_workers_sees_what_torch_gives_and_resumes_from_the_end_of_an_epoch(tmp_path: Path) -> None:
    for rank in study(2, tmp_path, 2):
        assert_same_as_torch(rank)
        assert_resumed_exactly(rank)
