from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.system.integrations.checks import assert_resumed_exactly
from tests.system.integrations.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(125)
def test_a_run_resumes_exactly_from_what_accelerate_saved(tmp_path: Path) -> None:
    assert_resumed_exactly(run_ranks("accelerate_script.py", 2, tmp_path, timeout_s=100, needs="accelerate"))


def test_what_others_have_wrapped_around_accelerates_function_isnt_taken_for_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = pytest.importorskip("accelerate.accelerator")
    from swift_loader.integrations.accelerate import keep_class

    theirs = functools.wraps(len)(lambda *arguments: None)
    monkeypatch.setattr(accelerator, "prepare_data_loader", theirs)
    keep_class()
    ours = accelerator.prepare_data_loader
    keep_class()
    assert theirs is not ours is accelerator.prepare_data_loader
