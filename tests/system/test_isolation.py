"""Nothing of the user's process is touched; nothing is used up; idle costs nothing."""

from __future__ import annotations

import gc
import logging
import os
import platform
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from swift_loader import SwiftLoader, SwiftLoaderWarning
from tests.support import datasets
from tests.support.helpers import is_gone, loader_processes, make_loader, slow, wait_until

MEGABYTE = 1 << 20


@pytest.mark.parametrize("workers", [0, 2])
def test_generators_signals_environment_and_logging_stay_as_they_were(workers: int) -> None:
    def snapshot() -> list[Any]:
        signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, set())
        generators = [random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()]
        return [signals, mask, generators, dict(os.environ), list(sys.path), logging.root.handlers[:], os.getcwd()]

    before = snapshot()
    with make_loader(datasets.Augmenting, workers=workers) as loader:
        list(loader)
    assert snapshot() == before


def test_loguru_of_the_user_is_left_alone(tmp_path: Path) -> None:
    from loguru import logger

    lines: list[str] = []
    handler = logger.add(lines.append, level=0)
    with make_loader(datasets.Counting, logger=str(tmp_path / "log")) as loader:
        list(loader)
    logger.info("mine")
    logger.remove(handler)
    assert len(lines) == 1
    text = (tmp_path / "log_rank0.log").read_text()
    assert "started: 100 samples" in text
    assert '"batches_delivered": 13' in text
    assert "mine" not in text


def test_logging_to_stdout_and_figures_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"logger": {"stdout": True, "level": "info"}, "benchmark_file": tmp_path / "figures.json"}
    with make_loader(datasets.Counting, **options) as loader:
        list(loader)
    assert "started: 100 samples" in capsys.readouterr().out
    assert '"fetch"' in (tmp_path / "figures.json").read_text()
    with pytest.raises(FileNotFoundError, match="there is no folder '/absent'; make it"):
        make_loader(datasets.Counting, benchmark_file="/absent/figures.json")
    loader = make_loader(datasets.Counting, benchmark_file="/dev/full")
    list(loader)
    with pytest.warns(SwiftLoaderWarning, match="benchmark_file isn't written: .*No space left"):
        loader.close()


def test_a_full_disk_for_the_log_doesnt_replace_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "log_rank0.log").symlink_to("/dev/full")
    loader = make_loader(datasets.Counting, logger=tmp_path / "log")
    with pytest.raises(KeyError), loader:
        next(iter(loader))["no such leaf"]


def test_waiting_for_a_slow_worker_is_no_polling() -> None:
    def num_sleeps() -> int:
        """Return how often the threads of this process have fallen asleep."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw

    with make_loader(datasets.Slow, kwargs={"seconds": 0.25}, batch_size=8, validate=False) as loader:
        loader.start(0)
        before, cpu_s = num_sleeps(), time.process_time()
        next(iter(loader))  # after 2 s
        assert num_sleeps() - before < 150  # polling every 10 ms would be 200
        assert time.process_time() - cpu_s < 0.2  # 0.01 on a quiet machine; polling without a sleep would be 2


def pids_of_loaders() -> list[int]:
    return [process.pid for process in loader_processes()]


def measure() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": psutil.Process().num_fds(),
        "threads": threading.active_count(),  # not the kernel's count: pyarrow's allocator starts threads when it likes
        "children": len(loader_processes()),
        "maps": sum("memfd:swift_loader" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }


def measure_steady() -> dict[str, int]:
    """Return what there is once it stays the same: a descriptor that a worker sends is open for a moment."""
    seen = [measure()]
    while len(seen) < 4 or any(one != seen[-1] for one in seen[-4:]):
        time.sleep(0.005)
        seen.append(measure())
    return seen[-1]


def memory_of(pid: int) -> tuple[int, int]:
    """Return KB of ordinary and of shared memory, both proportional."""
    fields = dict.fromkeys(("Pss_Anon", "Pss_Shmem"), 0)
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it hung, and its killing took until now
        return 0, 0
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in fields:
            fields[name] = int(rest.split()[0])
    return fields["Pss_Anon"], fields["Pss_Shmem"]


def test_thirty_epochs_use_up_nothing() -> None:
    with make_loader(datasets.Images, kwargs={"num_samples": 160, "side": 64}, batch_size=8) as loader:
        figures, memory = [], []
        for _ in range(30):
            for batch in loader:
                del batch
            figures.append(measure())
            memory.append(sum(sum(memory_of(pid)) for pid in [os.getpid(), *pids_of_loaders()]))
    for name in ("descriptors", "threads", "children"):
        # The least of five epochs: a segment's descriptor is open while a thread maps it for the epoch to come.
        early, late = (min(figure[name] for figure in figures[start : start + 5]) for start in (1, 25))
        assert early == late, name
    assert figures[29]["maps"] <= 2 * (10 + 8)
    assert memory[29] - memory[1] < 8 * 1024


@pytest.mark.slow
def test_starting_and_closing_many_times_uses_up_nothing() -> None:
    with make_loader(datasets.Counting) as loader:  # starts what belongs to the process
        next(iter(loader))
    before = measure_steady()
    for number in range(8):
        with make_loader(datasets.Counting, workers=1 + number % 3, multithread=bool(number % 2)) as loader:
            next(iter(loader))
    wait_until(lambda: all(number <= before[name] for name, number in measure().items()), f"no more than {before}")


def test_a_loader_that_is_dropped_takes_its_processes_with_it() -> None:
    loader = make_loader(datasets.Counting)
    next(iter(loader))
    assert loader.sampler is not None
    wait_until(lambda: len(loader_processes()) == 3, "a template and two workers")
    children = pids_of_loaders()
    gc.disable()  # the last reference is enough; nobody needs to look for cycles
    try:
        del loader
    finally:
        gc.enable()
    wait_until(lambda: all(map(is_gone, children)), "the end of its processes")


def test_kept_batches_hold_no_descriptors() -> None:
    with make_loader(datasets.Images, workers=4, kwargs={"num_samples": 200}, batch_size=2) as loader:
        found = []
        for num_epochs in (1, 3):
            kept = [batch for _ in range(num_epochs) for batch in loader]
            found.append(measure_steady()["descriptors"])
            assert len(kept) == num_epochs * 100
    assert found[0] == found[1]


def test_a_shared_dataset_is_one_copy(tmp_path: Path) -> None:
    class Big(datasets.Counting):
        def __init__(self) -> None:
            super().__init__()
            self.data = np.ones(64 * MEGABYTE, np.uint8)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"id": index, "sum": int(self.data[index * MEGABYTE // 2 :][:10].sum())}

    def held_mb(loader: SwiftLoader) -> float:
        list(loader)
        return sum(sum(memory_of(pid)) for pid in pids_of_loaders()) / 1024

    with make_loader(Big, workers=1) as loader:
        one = held_mb(loader)
    with make_loader(Big, workers=6) as loader:
        six = held_mb(loader)
    assert six < one + 3 * 64  # five more copies would be 320


class Images:
    """Samples of about 1 MB: how many pages the process has got from the kernel so far."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        np.ones(3 * MEGABYTE, np.uint8).astype(np.uint16)  # what is decoded, and converted
        return np.full(MEGABYTE // 8, resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
@pytest.mark.parametrize("start_method", ["template", "fork", slow("spawn")])
def test_a_worker_uses_the_memory_of_the_last_sample_for_the_next(start_method: str) -> None:
    with make_loader(Images, workers=1, batch_size=4, shuffle=False, start_method=start_method) as loader:
        num_faults = [int(batch[0, 0]) for batch in loader]
    assert num_faults[-1] - num_faults[16] < 5000  # of 60 samples, of 2500 pages each, and maybe of a new slot
