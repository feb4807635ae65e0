"""The tests of devices, on the simulated one. They have a process of their own: see `simulated`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.helpers import ROOT

COMPILER = shlex.split(os.environ.get("CXX", "c++"))[0]


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine, the build takes a minute; each test has its own limit
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"needs a C++ compiler, {COMPILER}")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="the simulated device is written for torch 2.13")
def test_what_runs_on_a_gpu_runs_on_the_simulated_one(tmp_path: Path) -> None:
    options = [
        "-q",
        "-p",
        "tests.device.simulated",
        "-p",
        "no:cacheprovider",
        "-m",
        "not cuda",
        f"--basetemp={tmp_path}/on",
    ]
    command = [sys.executable, "-m", "pytest", *options, "tests/system/device/cuda"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert run.returncode == 0, run.stdout
    assert "skipped" not in run.stdout
