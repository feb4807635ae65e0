"""Stages as train and validation loaders of a Lightning Trainer."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.system.integrations.ranks import run_ranks

NUM_VALIDATED = 2 * 4
"""Batches: once to see whether it works, and after each epoch."""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_fit_sees_what_a_plain_loop_does_and_resumes_exactly_from_every_checkpoint(tmp_path: Path) -> None:
    (cases,) = run_ranks("lightning_stages.py", 0, tmp_path, timeout_s=120, needs="lightning")

    assert set(cases) == {"StageLoader", "Pipeline", "Pipeline with OneCycleLR"}
    for name, case in cases.items():
        whole = case["uninterrupted"]
        assert whole["seen"] == list(itertools.chain.from_iterable(case["plain"])), name
        assert len(whole["seen"]) == 15
        assert len(whole["validated"]) == NUM_VALIDATED
        assert len(case["resumed"]) == 18, "after each of 15 steps and 3 epochs"
        for run in case["resumed"]:
            assert run["seen"] == whole["seen"][run["num_steps"] :], (name, run["place"])
            assert run["weights"] == whole["weights"], (name, run["place"])
        assert case["threads"] == [], name
