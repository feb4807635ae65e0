from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.helpers import exhaustive
from tests.system.integrations.checks import assert_complete
from tests.system.integrations.ranks import run_ranks
from tests.system.integrations.training import NUM_EPOCHS, NUM_STEPS

NUM_CHECKPOINTS = {
    "trainer alone": NUM_EPOCHS * (NUM_STEPS + 1),
    "callback with OneCycleLR": NUM_STEPS + 1,
    "callback and trainer": NUM_STEPS + 1,
}
"""After each step and at the end of each epoch, or of the second one."""


@pytest.mark.slow
@pytest.mark.timeout(125)
def test_a_fit_resumes_exactly_in_the_midst_of_an_epoch(tmp_path: Path) -> None:
    case, num_steps = "callback with OneCycleLR", NUM_STEPS + 2
    (rank,) = run_ranks("lightning_script.py", 0, tmp_path, case, str(num_steps), timeout_s=100, needs="lightning")

    whole, (resumed,) = rank[case]["uninterrupted"], rank[case]["resumed"]
    assert_complete([whole["seen"]])
    assert resumed["seen"] == whole["seen"][num_steps:]
    assert resumed["weights"] == whole["weights"]


@pytest.mark.exhaustive
@pytest.mark.timeout(150)
@pytest.mark.parametrize("num_ranks", [exhaustive(1), 2])
def test_a_fit_resumes_exactly_from_every_checkpoint(num_ranks: int, tmp_path: Path) -> None:
    launched = 0 if num_ranks == 1 else num_ranks
    ranks = run_ranks("lightning_script.py", launched, tmp_path, timeout_s=120, needs="lightning")

    for case, num_checkpoints in NUM_CHECKPOINTS.items():
        assert_complete([rank[case]["uninterrupted"]["seen"] for rank in ranks])
        for rank in ranks:
            whole, resumed = rank[case]["uninterrupted"], rank[case]["resumed"]
            assert len(resumed) == num_checkpoints
            for run in resumed:
                assert run["seen"] == whole["seen"][run["num_steps"] :], (case, run["place"])
                assert run["weights"] == whole["weights"], (case, run["place"])
