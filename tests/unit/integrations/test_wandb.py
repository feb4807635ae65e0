from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from swift_loader.integrations.wandb import log_metrics, log_report
from tests.support.measured import MeasuredLoader


class Run:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int | None, bool]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert commit is not None
        self.logged.append((data, step, commit))


def test_metrics_join_the_step_that_the_loop_commits() -> None:
    loader, run = MeasuredLoader(), Run()
    log_metrics(run, loader, 4)
    assert run.logged == [(loader.metrics(), 4, False)]


def test_a_report_without_wandb_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="pip install wandb"):
        log_report(Run(), MeasuredLoader())


SCRIPT = """
import sys, wandb
from swift_loader.integrations.wandb import log_metrics, log_report
from tests.support.measured import MeasuredLoader

loader = MeasuredLoader()
run = wandb.init(mode="offline", dir=sys.argv[1], project="test")
log_metrics(run, loader)
log_report(run, loader)
run.log({"loss": 1.0})
assert run.summary["swift_loader/batches_total"] == 100
assert run.summary["swift_loader/report"]["_type"] == "image-file"
assert run.summary["_step"] == 0
run.finish()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="needs W&B")
def test_an_offline_run_takes_metrics_and_report(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # it leaves folders there
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=55, check=False)
    assert finished.returncode == 0, finished.stderr
