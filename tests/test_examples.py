"""The examples run as a newcomer would run them: as scripts, in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 40


def run_example(folder: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    missing = [module for module in ("rich", "sklearn") if find_spec(module) is None]
    if missing:
        pytest.skip(f"the examples need {', '.join(missing)}: pip install -e '.[examples]'")
    search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # torch makes its compiler's cache folder when an optimiser is made, and never removes it.
    environment = {**os.environ, "PYTHONPATH": search_path, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_digits_are_learned_and_the_times_reported(tmp_path: Path) -> None:
    run = run_example(tmp_path, "train_digits.py", "--epochs", "4", "--required-accuracy", "0.9")

    assert run.returncode == 0, run.stderr
    assert "2 workers" in run.stdout
    epoch_line = re.compile(r"^epoch +(\d+): loss \d+\.\d+, held-out accuracy \d+\.\d+%$", re.MULTILINE)
    assert epoch_line.findall(run.stdout) == ["1", "2", "3", "4"]
    assert re.search(r"^total time: \d+\.\d s, of which training \d+\.\d s$", run.stdout, re.MULTILINE)
    assert re.search(r"^speed: [\d,]+ samples/s$", run.stdout, re.MULTILINE)
    assert re.search(r"^waited for data: \d+\.\d+ s, \d+\.\d% of the training time$", run.stdout, re.MULTILINE)


def test_digits_without_workers_end_with_status_1_if_the_accuracy_is_too_low(tmp_path: Path) -> None:
    run = run_example(tmp_path, "train_digits.py", "--workers", "0", "--epochs", "1", "--required-accuracy", "1.01")

    assert run.returncode == 1
    assert "0 workers" in run.stdout
    last_line = run.stderr.splitlines()[-1]
    assert re.fullmatch(r"held-out accuracy is \d+\.\d+%, below the 101\.00% that are required", last_line)
