from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import exhaustive
from tests.system.integrations.dropin import NUM_STEPS
from tests.system.integrations.ranks import run_ranks


def study(num_ranks: int, folder: Path, *arguments: str) -> list[Any]:
    if find_spec("datasets") is None:
        pytest.skip("needs datasets: pip install datasets")
    launched = 0 if num_ranks == 1 else num_ranks
    return run_ranks("dropin_huggingface.py", launched, folder, *arguments, timeout_s=140, needs="transformers")


def assert_same_as_torch(rank: Any) -> None:
    assert rank["swift"]["is_swift"] == [True, True]
    for name in ("seen", "evaluated", "weights"):
        assert rank["swift"][name] == rank["torch"][name], name


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("num_ranks", [exhaustive(1), 2])
def test_a_trainer_gives_padded_batches_as_with_torch_and_resumes_exactly(num_ranks: int, tmp_path: Path) -> None:
    for rank in study(num_ranks, tmp_path, "0", "map", "7", "10"):
        assert_same_as_torch(rank)
        for run in rank["resumed"]:
            assert run["seen"] == rank["swift"]["seen"][run["num_steps"] :]
            assert run["weights"] == rank["swift"]["weights"]


@pytest.mark.exhaustive
@pytest.mark.timeout(170)
@pytest.mark.parametrize(("num_workers", "places"), [(0, ("1", "7", "14")), (2, ("9",))])
def test_a_trainer_streams_as_with_torch_and_resumes_the_epoch_exactly(
    num_workers: int, places: tuple[str, ...], tmp_path: Path
) -> None:
    (rank,) = study(1, tmp_path, str(num_workers), "stream", *places)

    assert_same_as_torch(rank)
    whole = rank["swift"]["seen"]
    for run in rank["resumed"]:
        # Later epochs have another order: the Trainer counts them from 0 after a restart if it doesn't know the length.
        rest = NUM_STEPS - run["num_steps"] % NUM_STEPS
        assert run["seen"][:rest] == whole[run["num_steps"] :][:rest], run["num_steps"]
        assert len(run["seen"]) == len(whole) - run["num_steps"]
