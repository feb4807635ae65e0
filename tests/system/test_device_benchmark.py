"""The benchmark of what comes after the loader: all of it runs, tried out on the CPU, and its check can fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from swift_loader.device.target import Target
from swift_loader.device.transfer import Transfer
from tests.support.fake_device import FakeDevice
from tests.support.helpers import ROOT

BENCHMARKS = ROOT / "benchmarks"
TIMEOUT_S = 110

pytestmark = pytest.mark.timeout(TIMEOUT_S + 10)

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def run_benchmark(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "device.py"), *arguments],
        # timm imports torch's compiler, which leaves a folder for its cache.
        env={**os.environ, **NO_GPU, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def rows_of(printed: str) -> set[tuple[str, str]]:
    """Return case and system of each row that has a figure."""
    return set(re.findall(r"^(\S+(?: \S+)?)  +(\w+)  +[\d.,]+ ", printed, re.MULTILINE))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import modules of the benchmarks, whose names others may have, too (`datasets`), for the time of a test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").is_relative_to(BENCHMARKS):
            del sys.modules[name]


@pytest.fixture
def checksums(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("gpu.checksums")


@pytest.mark.slow
def test_all_parts_run_on_the_cpu_and_every_byte_arrives(tmp_path: Path) -> None:
    run = run_benchmark(tmp_path, "--device", "cpu", "--quick", "--json", str(tmp_path / "figures.json"))

    assert run.returncode == 0, run.stderr
    expected = {(size, memory) for size in ("0.1 MB", "0.4 MB") for memory in ("pinned", "segments", "pageable")}
    expected |= {
        (f"{load}/{loop}", system)
        for load in ("idle", "busy")
        for loop in ("async", "sync")
        for system in ("resident", "swift_loader", "torch")
    }
    expected |= {("images", system) for system in ("torch", "swift_loader")}
    expected |= {(case, "swift_loader") for case in ("plain", "lagging", "late")}
    assert expected <= rows_of(run.stdout), run.stdout
    assert len(re.findall(r"^(?:plain|lagging|late) +swift_loader +100 +0 +", run.stdout, re.MULTILINE)) == 3
    assert "0 mismatches in 300 batches" in run.stdout
    assert "no control" in run.stdout
    assert "cpu, not a measurement of a GPU" in run.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {(result["case"], result["system"]) for result in figures["results"]} >= expected


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    run = run_benchmark(tmp_path)

    assert run.returncode == 2
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert "torch sees no such GPU" in line


class FakeGpu:
    """Stands for a GPU in the integrity check; its copies are as late as a fake device's, or not late at all."""

    is_gpu = True
    device = torch.device("cpu")

    def __init__(self, lag: int) -> None:
        self._lag = lag

    def describe(self) -> str:
        return "fake"

    def synchronize(self) -> None: ...

    def stall(self, seconds: float) -> None:
        time.sleep(seconds)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_aside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy at once, or so late that the readers see what was there before."""
        if not self._lag:
            target.copy_(source)

    def find_destination(self, *_: Any, **__: Any) -> Target:
        """Return where a loader's batches go, whatever it was told."""

        class Device(FakeDevice):
            """The loop's stream does its work at once: the sums are made by the CPU."""

            def hand_over(self, parts: Sequence[Any], event: Any) -> None:
                super().hand_over(parts, event)
                event.reach()

        device = Device(self._lag)

        def move(batch: Any, transfer: Transfer) -> torch.Tensor:
            return torch.from_numpy(device.move(batch, transfer))

        return Target(move, lambda: device)


@pytest.fixture
def check_on(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeGpu], Any]:
    """Return what runs the integrity check on a fake GPU."""

    def check(gpu: FakeGpu) -> Any:
        monkeypatch.setattr("swift_loader.lifecycle.find_target", gpu.find_destination)
        scale = replace(load("gpu.scale").TINY, num_checked=300, stall_s=0.002)
        return load("gpu.integrity").check_integrity(gpu, scale)

    return check


def test_copies_that_are_late_arrive_whole_and_a_release_too_early_is_caught(
    check_on: Callable[[FakeGpu], Any],
) -> None:
    outcome = check_on(FakeGpu(lag=9))
    assert outcome.is_right, outcome.text
    assert "0 mismatches in 900 batches" in outcome.text
    assert len(re.findall(r"^(?:lagging|late) +control +\d+ +[1-9]\d* ", outcome.text, re.MULTILINE)) == 2


def test_a_check_that_does_not_see_a_release_too_early_is_no_success(check_on: Callable[[FakeGpu], Any]) -> None:
    outcome = check_on(FakeGpu(lag=0))
    assert "0 mismatches in 900 batches" in outcome.text
    assert outcome.text.count("the control was NOT seen, so the check is blind") == 2
    assert not outcome.is_right


def test_checksums_tell_any_change_of_a_batch(checksums: ModuleType) -> None:
    samples = np.random.default_rng(0).integers(0, 256, (12, 50), dtype=np.uint8)
    weights = checksums.make_weights(4 * 50)
    expected = checksums.expected_checksums(samples, 3, 4, weights)
    assert checksums.mismatches(expected.tolist(), expected) == []

    changed = samples.copy()
    changed[5, 7] ^= 1
    assert checksums.mismatches(checksums.expected_checksums(changed, 3, 4, weights), expected) == [1]
    swapped = samples[[1, 0, *range(2, 12)]]
    assert checksums.mismatches(checksums.expected_checksums(swapped, 3, 4, weights), expected) == [0]
    rolled = np.roll(samples, 4, axis=0)
    assert checksums.mismatches(checksums.expected_checksums(rolled, 3, 4, weights), expected) == [0, 1, 2]


def test_a_corrupted_checksum_and_a_missing_batch_are_found(checksums: ModuleType) -> None:
    expected = np.arange(5, dtype=np.int64)
    corrupted = expected.copy()
    corrupted[3] += 1
    assert checksums.mismatches(corrupted, expected) == [3]
    with pytest.raises(ValueError, match="4 batches came instead of 5"):
        checksums.mismatches(expected[:4], expected)


def test_blocks_follow_from_their_index_and_no_two_are_the_same(load: Callable[[str], ModuleType]) -> None:
    blocks = load("gpu.datasets").Blocks
    first, second = blocks(2000, 100), blocks(2000, 100)
    assert len({first[index].tobytes() for index in range(2000)}) == 2000
    assert all((first[index] == second[index]).all() for index in range(0, 2000, 97))


def test_the_load_ends_with_the_context_whatever_ends_that(load: Callable[[str], ModuleType]) -> None:
    def interrupted() -> None:
        with load("gpu.load").busy_cores():
            counting.extend(psutil.Process().children())
            raise KeyboardInterrupt

    counting: list[psutil.Process] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(counting) >= len(os.sched_getaffinity(0))
    assert not any(process.is_running() for process in counting)
