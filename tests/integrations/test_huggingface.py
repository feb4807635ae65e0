from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.checks import assert_resumed_exactly
from tests.integrations.ranks import run_ranks


@pytest.mark.timeout(75)
def test_a_run_resumes_exactly_from_what_the_trainer_saved_and_says_what_it_needs(tmp_path: Path) -> None:
    ranks = run_ranks("huggingface_script.py", 2, tmp_path, timeout_s=50, needs="transformers")

    assert_resumed_exactly(ranks)
    refusals = ranks[0]["refusals"]
    assert refusals["no SwiftLoader"].startswith(
        "TypeError: the Trainer's train loader is a list, which has no load_state_dict"
    )
    assert refusals["ignore_data_skip=False"].endswith("set ignore_data_skip=True")
    assert refusals["saved without it"].startswith("ValueError: the checkpoint at step 7 has no state of the loader")
