"""Stages as train and validation loaders of a Lightning Trainer."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support.helpers import exhaustive
from tests.system.integrations.ranks import run_ranks

NUM_EPOCHS = 3
NUM_STEPS = {1: 5, 2: 3}
"""Of an epoch, for so many ranks."""

NUM_VALIDATED = {1: 2, 2: 1}
"""Batches that each rank validates, once to see whether it works and after each epoch."""


@pytest.mark.exhaustive
@pytest.mark.timeout(150)
@pytest.mark.parametrize("num_ranks", [exhaustive(1), 2])
def test_a_fit_sees_what_a_plain_loop_does_and_resumes_exactly_from_every_checkpoint(
    num_ranks: int, tmp_path: Path
) -> None:
    launched = 0 if num_ranks == 1 else num_ranks
    ranks = run_ranks("lightning_stages.py", launched, tmp_path, timeout_s=120, needs="lightning")

    assert {len(cases) for cases in ranks} == {3}
    num_steps = NUM_STEPS[num_ranks] * NUM_EPOCHS
    for name, case in itertools.chain.from_iterable(cases.items() for cases in ranks):
        whole = case["uninterrupted"]
        assert whole["seen"] == list(itertools.chain.from_iterable(case["plain"])), name
        assert len(whole["seen"]) == num_steps
        assert len(whole["validated"]) == NUM_VALIDATED[num_ranks] * (1 + NUM_EPOCHS)
        assert len(case["resumed"]) == num_steps + NUM_EPOCHS
        for run in case["resumed"]:
            assert run["seen"] == whole["seen"][run["num_steps"] :], (name, run["place"])
            assert run["weights"] == whole["weights"], (name, run["place"])
        assert case["threads"] == [], name
    for name in ranks[0]:
        parts = [numbers_of(cases[name]["plain"][0]) for cases in ranks]
        assert sorted(itertools.chain.from_iterable(parts)) == list(range(18)), name


def numbers_of(batches: list[list[tuple[float, float]]]) -> list[float]:
    return [number for batch in batches for number, _ in batch]
