from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.integrations.ranks import run_ranks
from tests.system.integrations.training import SAVED_AFTER, assert_complete


@pytest.mark.slow
@pytest.mark.timeout(125)
def test_a_run_resumes_exactly_in_the_midst_of_an_epoch_and_says_what_it_needs(tmp_path: Path) -> None:
    (rank,) = run_ranks("huggingface_script.py", 0, tmp_path, timeout_s=100, needs="transformers")

    whole, resumed = rank["uninterrupted"], rank["mid-epoch"]
    assert_complete([whole["seen"]])
    assert resumed["seen"] == whole["seen"][SAVED_AFTER["mid-epoch"] :]
    assert resumed["weights"] == whole["weights"]
    refusals = rank["refusals"]
    assert refusals["no SwiftLoader"].startswith(
        "TypeError: the Trainer's train loader is a list, which has no load_state_dict"
    )
    assert refusals["ignore_data_skip=False"].endswith("set ignore_data_skip=True")
    assert refusals["saved without it"].startswith("ValueError: the checkpoint at step 7 has no state of the loader")
