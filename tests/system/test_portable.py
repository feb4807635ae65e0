"""What start_method="portable" promises: the same as worker processes on Linux, by means that every system has."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from swift_loader import DataLoader, EncodeError, SwiftLoader, SwiftLoaderWarning, WorkerDied, WorkerStalled
from swift_loader.testing import portable_workers
from swift_loader.transport.portable import PipeChannel, new_pipe
from tests.support import datasets, elsewhere
from tests.support.helpers import (
    HANG_S,
    ROOT,
    exhaustive,
    ids_of,
    is_true_in_a_fork,
    loader_children,
    loader_processes,
    make_loader,
    run_script,
    set_faults,
    slow,
)
from tests.support.resumable import Shards

TESTS_THAT_APPLY = ["faults", "survival", "resume", "loader", "randomness", "sample_errors", "trial"]


OF_DATALOADER = [
    "dataloader_faults.py::test_a_worker_that_dies_is_replaced_and_the_batches_are_the_same[index-kill]",
    "dataloader_faults.py::test_a_worker_that_dies_is_replaced_and_the_batches_are_the_same[stream with state-kill]",
    "dataloader_faults.py::test_after_a_timeout_the_loop_may_wait_again[index]",
    "dataloader_faults.py::test_the_loop_goes_on_after_an_error_of_the_user[process-sample]",
    "dataloader_processes.py::test_keys_of_any_kind_and_number_reach_the_dataset",
    "portable.py::test_a_dataloader_gives_what_torchs_gives_and_resumes_with_another_number_of_workers",
]
"""The others of `test_dataloader_faults.py` apply, too, but each of them imports torch in several processes."""


def portable(dataset_class: Any, **options: Any) -> SwiftLoader:
    return make_loader(dataset_class, start_method="portable", **options)


def check_no_names_of(trainer: int) -> None:
    """Check that a trainer's workers have left no name of shared memory."""
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"swl_{trainer}_")]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("seed", [slow(0), exhaustive(1), exhaustive(2)])
def test_nothing_is_lost_however_often_workers_are_killed(seed: int) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {"kwargs": {"num_samples": 4000}, "batch_size": 4, "workers": 3, "worker_restarts": 1000}
    with portable(datasets.Counting, seed=seed, **options) as loader:
        expected = list(loader.sampler)
        got = []
        for number, batch in enumerate(loader):
            got += batch["id"].tolist()
            workers = loader_children()  # those that are being replaced aren't among them
            if number % 50 == 10:
                for worker in rng.sample(workers, rng.randint(0, len(workers))):
                    with suppress(psutil.NoSuchProcess):
                        worker.kill()
        assert got == expected
        assert loader.report()["worker_restarts"] >= 5
    check_no_names_of(os.getpid())


def test_large_batches_lie_in_shared_memory_whose_names_are_gone() -> None:
    with portable(datasets.Blocks, batch_size=8, shuffle=False) as loader:
        for number, batch in enumerate(loader):
            assert (batch == np.arange(8 * number, 8 * number + 8, dtype=np.uint8)[:, None]).all()
            mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/swl_" in line]
            assert mapped
            assert all(line.endswith("(deleted)") for line in mapped)


@pytest.mark.slow
def test_only_workers_are_started() -> None:
    with portable(datasets.Counting, workers=3) as loader:
        assert sorted(ids_of(loader)) == list(range(100))
        assert len(loader_processes()) == 3


@pytest.mark.slow
def test_the_first_worker_is_the_one_that_was_prepared() -> None:
    with portable(datasets.Counting) as loader:
        loader.prepare()
        (first,) = loader_children()
        assert len(loader) == 13
        assert sorted(ids_of(loader)) == list(range(100))
        assert first in loader_children()


@pytest.mark.slow
def test_a_prepared_loader_that_is_dropped_leaves_nothing_behind() -> None:
    loader = portable(datasets.Slow)
    loader.prepare()
    del loader
    assert not loader_processes()


@pytest.mark.slow
def test_the_log_says_in_one_line_that_starting_takes_longer(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with portable(datasets.Counting, logger=str(log)) as loader:
        list(loader)
        list(loader)
    assert (tmp_path / "log_rank0.log").read_text().count("start_method='portable'") == 1


@portable_workers()
def test_elsewhere_than_on_linux_it_is_the_default() -> None:
    with make_loader(datasets.Counting) as loader:
        assert sorted(ids_of(loader)) == list(range(100))
        assert "InterpreterFleet" in repr(loader._session)


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_killed_and_replaced(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"folder": str(tmp_path), "deed": "SIGSTOP"}
    with (
        portable(datasets.FailsOnce, kwargs=kwargs, batch_size=4, shuffle=False, timeout=1.0) as loader,
        pytest.warns(SwiftLoaderWarning, match=r"longer than timeout=1 s, and was killed"),
    ):
        assert ids_of(loader) == list(range(80))


def test_a_worker_that_is_killed_while_it_writes_leaves_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "worker.slot-write=SIGKILL,hit=2")
    with (
        portable(datasets.Counting, validate=False, worker_restarts=0) as loader,
        pytest.raises(WorkerDied, match="SIGKILL"),
    ):
        list(loader)
    check_no_names_of(os.getpid())


@pytest.mark.slow
@pytest.mark.timeout(300)
@portable_workers()
@pytest.mark.parametrize(("dataset", "options"), [(torch.arange(40), {"shuffle": True}), (Shards(40), {})])
def test_a_dataloader_gives_what_torchs_gives_and_resumes_with_another_number_of_workers(
    dataset: Any, options: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    plain: Any = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2, **options)
    expected = [batch.tolist() for batch in plain]
    torch.manual_seed(3)
    loader: Any = DataLoader(dataset, batch_size=4, num_workers=2, **options)
    iterator = iter(loader)
    found = [next(iterator).tolist() for _ in range(3)]
    assert "InterpreterFleet" in repr(loader._latest.workers)
    state = loader.state_dict()
    del iterator
    loader = DataLoader(dataset, batch_size=4, num_workers=1 if options else 2, **options)
    loader.load_state_dict(state)
    assert found + [batch.tolist() for batch in loader] == expected


class HoldsTheGil:
    def __len__(self) -> int:
        return 64 * 1024

    def __getitem__(self, index: int) -> int:
        if index == 0:
            ctypes.PyDLL(None).sleep(1000)
        return index


@pytest.mark.slow
@portable_workers()
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_a_worker_that_holds_the_gil_is_named_although_its_pipe_is_full() -> None:
    dataset: Any = HoldsTheGil()
    loader: Any = DataLoader(dataset, batch_size=1024, num_workers=2, prefetch_factor=16, timeout=1)
    with pytest.raises(WorkerStalled, match="has been at batch 0 of epoch 0"):
        next(iter(loader))


@pytest.mark.slow
@portable_workers()
def test_a_dataset_that_can_not_be_sent_is_an_error_of_a_dataloader() -> None:
    dataset: Any = [(number for number in range(3))]
    with pytest.raises(EncodeError, match="generator"):
        next(iter(DataLoader(dataset, num_workers=1)))


# Other systems --------------------------------------------------------------------------------------------------------


def environment_elsewhere(folder: Path) -> dict[str, str]:
    """Return an environment in which what only Linux has fails, in each interpreter."""
    (folder / "sitecustomize.py").write_text(elsewhere.CODE)
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}


@pytest.mark.slow
def test_what_only_linux_has_fails_where_the_tests_below_run(tmp_path: Path) -> None:
    code = """
import os
for name in ("memfd_create", "pidfd_open"):
    try:
        getattr(os, name)(0)
        raise AssertionError(name)
    except OSError:
        pass
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment_elsewhere(tmp_path), check=True)


UNREAD = """
import os, sys, threading, warnings
from tests.support import datasets
from tests.support.helpers import make_loader

warnings.simplefilter("ignore")
os.dup2(os.pipe()[1], 2)  # nobody reads it
os.set_blocking(2, False)
try:
    while True:
        os.write(2, bytes(4096))
except BlockingIOError:
    os.set_blocking(2, True)
for _ in range(2):
    kwargs = {"folder": sys.argv[1], "deed": "SIGSEGV"}
    with make_loader(datasets.FailsOnce, kwargs=kwargs, batch_size=2, shuffle=False, start_method="portable") as loader:
        assert len(list(loader)) == 40
    os.remove(sys.argv[1] + "/done")
    assert threading.active_count() == 1, threading.enumerate()
print("right")
"""


def test_nobody_reads_stderr(tmp_path: Path) -> None:
    assert run_script(UNREAD, str(tmp_path), via="-c", folder=tmp_path) == "right\n"


def test_a_message_to_a_worker_that_is_gone_is_an_error_where_sigpipe_would_end_the_trainer() -> None:
    def raises() -> bool:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        ours, theirs = new_pipe()
        theirs.close()
        with pytest.raises(BrokenPipeError):
            PipeChannel(ours).send(b"task")
        return not signal.sigpending() and not signal.pthread_sigmask(signal.SIG_BLOCK, ())

    assert is_true_in_a_fork(raises)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "names",
    [*((slow if name == "loader" else exhaustive)([f"{name}.py"]) for name in TESTS_THAT_APPLY), slow(OF_DATALOADER)],
    ids=[*TESTS_THAT_APPLY, "of DataLoader"],
)
def test_the_tests_of_workers_pass_without_what_only_linux_has(names: list[str], tmp_path: Path) -> None:
    environment = {**environment_elsewhere(tmp_path), "SWIFT_LOADER_TESTS_START_METHOD": "portable"}
    options = ["-q", "--timeout=300", f"--basetemp={tmp_path / 'temporary'}"]  # workers start slowly
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/system/test_{name}" for name in names)]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout


@pytest.mark.slow
def test_nothing_that_windows_lacks_is_imported() -> None:
    command = [sys.executable, "-m", "tests.support.windows"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (finished.stdout, finished.stderr) == ("fine\n", "")
