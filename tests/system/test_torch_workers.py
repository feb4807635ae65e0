"""Workers that torch's DataLoader starts, as on macOS and Windows: the same batches, and exact resume between both."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.util import get_temp_dir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from swift_loader import DataLoader, EncodeError, SwiftLoaderWarning, WorkerDied, WorkerStalled
from swift_loader.pipeline import Pipeline
from swift_loader.testing import torch_workers
from tests.support import datasets, elsewhere
from tests.support.datasets import identity
from tests.support.helpers import (
    HANG_S,
    ROOT,
    exhaustive,
    ids_of,
    loader_children,
    loader_processes,
    make_loader,
    slow,
    wait_until,
)
from tests.support.resumable import Shards


@pytest.fixture(scope="module", autouse=True)
def folder_of_multiprocessing(temporary_folder: Path) -> None:
    """Have the folder that multiprocessing makes once in a program, and removes as that ends."""
    get_temp_dir()


pytestmark = pytest.mark.timeout(300)  # spawned workers import torch
WHERE: dict[str, Callable[[], AbstractContextManager[None]]] = {"pool": nullcontext, "torch": torch_workers}


class Texts(datasets.Counting):
    """Texts of many lengths, which only pickle can send."""

    def __getitem__(self, index: int) -> Any:
        return {"text": "long " * (index % 7) * 1000, "of": (index, {index})}


class Sets(datasets.Counting):
    """What is in a set of texts, in its order, which depends on the hash seed."""

    def __getitem__(self, index: int) -> Any:
        return list({f"{number}" for number in range(20)} | {os.environ["OF_THE_PROGRAM"]})


class Plain(IterableDataset[Any]):
    """A stream without a state, which its workers share."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for number in range(info.id, 60, info.num_workers):
            yield np.full(3, number), random.random()


def of_swift_loader(dataset_class: Any, **options: Any) -> Callable[[str], Any]:
    return lambda method: make_loader(dataset_class, batch_size=4, start_method=method, **options)


def of_data_loader(make: Callable[[], Any], **options: Any) -> Callable[[str], Any]:
    options = {"batch_size": 4, "num_workers": 2, **options}
    return lambda method: DataLoader(make(), seed=3, multiprocessing_context=method, **options)


LOADERS: dict[str, Callable[[str], Any]] = {
    "numbers": of_swift_loader(datasets.Counting),
    "draws": of_swift_loader(datasets.Augmenting),
    "arrays in shared memory": of_swift_loader(datasets.Blocks),
    "texts": of_swift_loader(Texts, collate_fn=identity),
    "__getitems__": of_swift_loader(datasets.Batched),
    "tensor": of_data_loader(lambda: torch.arange(100.0), shuffle=True),
    "keys": of_data_loader(lambda: torch.arange(100.0), batch_size=None, sampler=range(0, 90, 3)),
    "stream": of_data_loader(Plain),
    "stream with a state": of_data_loader(lambda: Shards(60)),
    "persistent": of_data_loader(lambda: torch.arange(100.0), shuffle=True, persistent_workers=True),
}


def run(loader: Any, state: Any = None, stop: int = 1000) -> tuple[list[Any], Any]:
    """Return the batches of two epochs from a state on, at most `stop` of them, and the state after them."""
    found: list[Any] = []
    with loader if hasattr(loader, "__exit__") else nullcontext():
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(2):
            for batch in loader:
                found.append(batch)
                if len(found) == stop:
                    return found, loader.state_dict()
    return found, loader.state_dict()


def are_same(one: list[Any], other: list[Any]) -> bool:
    torch.testing.assert_close(plain(one), plain(other), rtol=0, atol=0)
    return True


def plain(thing: Any) -> Any:
    """Return a batch's content, with its texts and sets as arrays."""
    if isinstance(thing, dict):
        return {key: plain(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [plain(value) for value in thing]
    return np.array(bytearray(repr(thing).encode())) if isinstance(thing, (str, set)) else thing


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, "fork") for kind in LOADERS),
        *((slow if kind == "draws" else exhaustive)(kind, "spawn") for kind in LOADERS),
    ],
)
def test_batches_are_the_same_as_those_of_the_loaders_own_processes_and_a_run_may_change_between_them(
    kind: str, method: str
) -> None:
    make = LOADERS[kind]
    expected, _ = run(make(method))
    for first, second in (("pool", "torch"), ("torch", "pool")):
        with WHERE[first]():
            found, state = run(make(method), stop=5)
        with WHERE[second]():
            rest, _ = run(make(method), state)
        assert are_same(found + rest[: len(expected) - 5], expected)
    if method == "fork":
        with torch_workers():
            assert are_same(run(make(method))[0], expected)


@pytest.mark.slow
@torch_workers()
def test_a_stage_of_a_pipeline_has_them_too() -> None:
    with Pipeline(range(-40, 0)).map(abs, concurrency=2, on="process") as pipeline:
        assert list(pipeline) == list(range(40, 0, -1))


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.slow
@torch_workers()
def test_nothing_is_lost_however_often_workers_are_killed() -> None:
    rng = random.Random(0)
    options: dict[str, Any] = {"kwargs": {"num_samples": 4000}, "batch_size": 4, "workers": 3, "worker_restarts": 1000}
    with make_loader(datasets.Counting, start_method="fork", **options) as loader:
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


@torch_workers()
def test_a_worker_that_hangs_is_killed_and_replaced(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"folder": str(tmp_path), "deed": "SIGSTOP"}
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "timeout": 1.0, "start_method": "fork"}
    generator = torch.get_rng_state()
    with (
        make_loader(datasets.FailsOnce, kwargs=kwargs, **options) as loader,
        pytest.warns(SwiftLoaderWarning, match=r"longer than timeout=1 s, and was killed"),
    ):
        assert ids_of(loader) == list(range(80))
    assert torch.equal(torch.get_rng_state(), generator)


@torch_workers()
def test_a_dataset_whose_worker_dies_again_and_again_is_an_error() -> None:
    """Also where torch's DataLoader is used, which has a signal handler raise errors of its workers."""
    given: Any = [1]
    list(torch.utils.data.DataLoader(given, num_workers=1))
    options: dict[str, Any] = {"kwargs": {"deed": "SIGKILL"}, "worker_restarts": 0, "start_method": "fork"}
    with make_loader(datasets.Misbehaving, **options) as loader, pytest.raises(WorkerDied, match="SIGKILL"):
        list(loader)


class EndsItsProcess(datasets.Counting):
    def __init__(self) -> None:
        os._exit(3)


@torch_workers()
@pytest.mark.parametrize("dataset_class", [EndsItsProcess, datasets.FailsToBuild])
def test_a_dataset_that_can_not_be_built_is_an_error(dataset_class: Any) -> None:
    with make_loader(dataset_class, start_method="fork") as loader:
        ends = dataset_class is EndsItsProcess
        with pytest.raises(WorkerDied if ends else Exception, match="exited with code 3" if ends else None):
            next(iter(loader))
    assert not loader_processes()


@torch_workers()
def test_a_loader_whose_workers_hang_is_closed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    kwargs = {"deed": "hold-the-interpreter", "marker": str(marker), "at": 0}
    loader = make_loader(datasets.Misbehaving, kwargs=kwargs, shuffle=False, validate=False, start_method="fork")
    loader.start(0)
    iterator = iter(loader)
    wait_until(marker.exists, "a worker that hangs")
    for process in loader_processes():
        if process.pid != int(marker.read_text()):
            process.send_signal(signal.SIGSTOP)
    loader.close()
    assert not loader_processes()
    del iterator


class StartsAProcess(datasets.Counting):
    """Gives what a process of its own and torch tell of where it is."""

    def __getitem__(self, index: int) -> Any:
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
        return process.exitcode, get_worker_info()


@torch_workers()
def test_a_dataset_may_start_processes_and_is_no_worker_of_torchs() -> None:
    with make_loader(StartsAProcess, kwargs={"num_samples": 4}, start_method="fork", collate_fn=list) as loader:
        assert list(loader) == [[(0, None)] * 4]


UNGUARDED = """
    import numpy as np, sys
    from swift_loader import SwiftLoader
    from swift_loader.testing import torch_workers
    with torch_workers():
        list(SwiftLoader(dataset=np.zeros(int(sys.argv[1])), batch_size=4, worker_per_consumer=1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("length", [8, 1_000_000])
def test_a_script_without_a_guard_is_told_to_have_one(length: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(UNGUARDED))
    ended = subprocess.run(
        [sys.executable, script, str(length)], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ended.returncode == 1
    assert 'A script that starts a loader needs if __name__ == "__main__": around that' in ended.stderr


@pytest.mark.parametrize("deed", ["closed", "dropped", slow("used")])
@torch_workers()
def test_a_prepared_loader_leaves_nothing_behind(deed: str) -> None:
    loader = make_loader(datasets.Counting, start_method="spawn" if deed == "used" else "fork")
    loader.prepare()
    wait_until(lambda: len(loader_children()) == 1, "the first worker")
    (first,) = loader_children()
    if deed == "used":
        assert len(loader) == 13
        assert sorted(ids_of(loader)) == list(range(100))
        assert first in loader_children()
    if deed != "dropped":
        loader.close()
    del loader
    wait_until(lambda: not loader_processes(), "the end of the first worker")


@pytest.mark.slow
@torch_workers()
def test_a_program_that_has_threads_and_sets_its_environment_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("OF_THE_PROGRAM", "1")
    before, is_over = dict(os.environ), threading.Event()
    other = threading.Thread(target=is_over.wait)
    other.start()
    with make_loader(Sets, workers=2, batch_size=4, shuffle=False, collate_fn=identity) as loader:
        assert len({tuple(sample) for batch in loader for sample in batch}) == 1
        assert "TorchFleet" in repr(loader._session)
    is_over.set()
    other.join()
    assert dict(os.environ) == before


def test_a_dataset_that_can_not_be_sent_is_an_error_unless_it_is_forked() -> None:
    dataset: Any = [(number for number in range(3))]
    with torch_workers():
        with pytest.raises(EncodeError, match="generator"):
            next(iter(DataLoader(dataset, num_workers=1, multiprocessing_context="spawn")))
        loader: Any = DataLoader(dataset, num_workers=1, multiprocessing_context="fork", collate_fn=len)
        assert list(loader) == [1]


@torch_workers()
def test_a_dataloader_may_wait_again_after_its_timeout() -> None:
    dataset: Any = datasets.Misbehaving(deed="hang", at=0)
    iterator = iter(DataLoader(dataset, num_workers=1, timeout=1, multiprocessing_context="fork"))
    for _ in range(2):
        with pytest.raises(WorkerStalled, match="DataLoader timed out after 1 seconds"):
            next(iterator)


# Other systems --------------------------------------------------------------------------------------------------------


def environment_elsewhere(folder: Path) -> dict[str, str]:
    """Return an environment in which what only Linux has fails for the package, in each interpreter."""
    (folder / "sitecustomize.py").write_text(elsewhere.CODE)
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}


DIES = "dataloader_faults.py::test_a_worker_that_dies_is_replaced_and_the_batches_are_the_same"
APPLY = {
    "survival": ["survival.py"],
    "resume": ["resume.py"],
    "loader": ["loader.py"],
    "randomness": ["randomness.py"],
    "sample errors": ["sample_errors.py"],
    "DataLoader": [
        f"{DIES}[index-kill]",
        f"{DIES}[stream with state-kill]",
        "dataloader_faults.py::test_the_loop_goes_on_after_an_error_of_the_user[process-sample]",
        "dataloader_processes.py::test_keys_of_any_kind_and_number_reach_the_dataset",
    ],
}


@pytest.mark.timeout(900)
@pytest.mark.exhaustive
@pytest.mark.parametrize("names", APPLY)
def test_the_tests_of_workers_pass_without_what_only_linux_has(names: str, tmp_path: Path) -> None:
    environment = {**environment_elsewhere(tmp_path), "SWIFT_LOADER_TESTS_STARTED_BY_TORCH": "1"}
    with TemporaryDirectory(dir="/tmp") as folder:
        options = ["-q", "--timeout=300", f"--basetemp={folder}/on"]  # workers start slowly
        command = [sys.executable, "-m", "pytest", *options, *(f"tests/system/test_{name}" for name in APPLY[names])]
        finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout


@pytest.mark.slow
def test_nothing_that_windows_lacks_is_imported() -> None:
    command = [sys.executable, "-m", "tests.support.windows"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (finished.stdout, finished.stderr) == ("fine\n", "")
