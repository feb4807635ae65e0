from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.integrations.checks import assert_resumed_exactly
from tests.system.integrations.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.timeout(125)
def test_a_run_resumes_exactly_from_what_fabric_saved(tmp_path: Path) -> None:
    assert_resumed_exactly(run_ranks("fabric_script.py", 2, tmp_path, timeout_s=100, needs="lightning"))
