"""Runs the scripts of this folder, in one process or in several ranks, and reads what each rank reports."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import ROOT, program_environment

FOLDER = Path(__file__).resolve().parent
GRACE_S = 15
"""For ranks that have to end, and torchrun, which looks after them."""


def run_ranks(
    script: str, num_ranks: int, folder: Path, *arguments: str, timeout_s: float, needs: str = "torch"
) -> list[Any]:
    """Run a script of this folder as so many ranks of torchrun, or without it if 0; return their reports by rank.

    Args:
        script: Its name; it has to call `run_rank`.
        num_ranks: How many.
        folder: Where it may write.
        arguments: What the script takes besides.
        timeout_s: After this, each rank ends itself and shows the stacks of its threads.
        needs: The framework, without which the test is skipped.
    """
    if find_spec(needs) is None:
        pytest.skip(f"needs {needs}: pip install -r requirements.txt")
    # --standalone finds a free port by itself, so that tests can't meet each other.
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", f"--log-dir={folder}"]
    command = [sys.executable, *(torchrun if num_ranks else []), str(FOLDER / script), str(folder), str(timeout_s)]
    command += arguments
    environment = program_environment(folder)
    run = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s + GRACE_S, check=False
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(_report_file(folder, rank).read_text()) for rank in range(max(1, num_ranks))]


def run_rank(study: Callable[[Path], Any]) -> None:
    """Write down what the study of this rank returns, given a folder. What the scripts do when they are run."""
    folder, timeout_s = Path(sys.argv[1]), float(sys.argv[2])
    faulthandler.enable()
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    torch.set_num_threads(1)
    found = study(folder)
    # JSON keeps floats to the last digit.
    _report_file(folder, int(os.environ.get("RANK", "0"))).write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        # Join leaves cycles that hold DDP, and that the group; gloo's threads abort an exit at which they still run
        # (https://github.com/pytorch/pytorch/issues/190489).
        gc.collect()
        torch.distributed.destroy_process_group()


def _report_file(folder: Path, rank: int) -> Path:
    return folder / f"report-{rank}.json"
