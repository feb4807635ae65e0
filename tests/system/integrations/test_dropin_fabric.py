from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.helpers import exhaustive
from tests.system.integrations.dropin import NUM_STEPS
from tests.system.integrations.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("num_ranks", "num_workers"), [exhaustive(1, 0), exhaustive(2, 0), (2, 2)])
def test_a_loader_that_fabric_made_anew_gives_what_torch_gives_and_resumes_the_epoch_exactly(
    num_ranks: int, num_workers: int, tmp_path: Path
) -> None:
    launched = 0 if num_ranks == 1 else num_ranks
    for rank in run_ranks("dropin_fabric.py", launched, tmp_path, str(num_workers), timeout_s=120, needs="lightning"):
        whole = rank["swift"]
        assert whole["is_swift"]
        for name in ("seen", "weights"):
            assert whole[name] == rank["torch"][name], name
        for run in rank["resumed"]:
            rest = whole["seen"][run["num_steps"] :]
            # Fabric counts the epochs of a DistributedSampler from 0 after a restart, so later ones differ.
            num_same = len(rest) if num_ranks == 1 else -run["num_steps"] % NUM_STEPS
            assert run["seen"][:num_same] == rest[:num_same], run["num_steps"]
            assert len(run["seen"]) == len(rest)
