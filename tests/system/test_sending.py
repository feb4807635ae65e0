"""What a loader sends to its workers when it starts: the dataset, its arguments, and what the trainer chose."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader import DataLoader, SwiftLoader
from swift_loader.errors import EncodeError
from tests.support.helpers import HANG_S, ROOT, exhaustive, make_loader, needs_template, set_environ, slow


class Holding:
    """Samples say what the dataset holds."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"kind": type(self.held).__name__, "value": self.held[index]}


def full_queue() -> Any:
    made: queue.SimpleQueue[int] = queue.SimpleQueue()
    made.put(3)
    return made


UNSENDABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "an open file": (lambda: open(os.devnull, "rb"), r" is a _io.BufferedReader.*to the workers.*dataset_class="),
    "a thread": (threading.current_thread, r".* a thread that has been started can't be sent"),
    "a queue": (full_queue, r" is a _queue.SimpleQueue.* a SimpleQueue that isn't empty"),
    "a result": (lambda: torch.ones(2, requires_grad=True) * 2, r" is a torch.Tensor.* requires grad and isn't a leaf"),
}


@needs_template
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("name", UNSENDABLE)
def test_what_cannot_be_sent_is_named_by_its_place_and_type(name: str) -> None:
    make, text = UNSENDABLE[name]
    places: dict[str, dict[str, Any]] = {
        r"dataset_kwargs\['held'\]": {"dataset_class": Holding, "dataset_kwargs": {"held": make()}},
        r"dataset\.held": {"dataset": Holding(make())},
    }
    for place, options in places.items():
        loader = SwiftLoader(**options, nb_consumer=1, worker_per_consumer=1)
        with loader, pytest.raises(EncodeError, match=f"^{place}{text}"):
            loader.start(0)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_mapped_array_is_a_mapping_of_the_same_file_in_a_worker(mode: Any, tmp_path: Path) -> None:
    file = tmp_path / "data"
    np.arange(100, dtype=np.int32).tofile(file)
    mapped = np.memmap(file, np.int32, mode, offset=40, shape=(9, 10))[:8, 3]
    with make_loader(Holding, kwargs={"held": mapped}, workers=1, shuffle=False) as loader:
        (batch,) = loader
    assert batch["kind"] == ["memmap"] * 8
    assert batch["value"].tolist() == list(range(13, 93, 10))


@pytest.mark.parametrize("change", ["private", "replaced"])
def test_a_mapping_that_the_file_no_longer_stands_for_is_sent_with_its_content(change: str, tmp_path: Path) -> None:
    file = tmp_path / "data"
    np.arange(8, dtype=np.int32).tofile(file)
    mapped = np.memmap(file, np.int32, "c" if change == "private" else "r")
    if change == "private":
        mapped += 1
    else:
        file.unlink()
        np.zeros(8, np.int32).tofile(file)
    expected = mapped.tolist()
    with make_loader(Holding, kwargs={"held": mapped}, workers=1, shuffle=False) as loader:
        (batch,) = loader
    assert batch["value"].tolist() == expected


class Settings:
    """Samples have torch's default dtype, and tell its number of threads."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(0.5), torch.get_num_threads()


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["template", exhaustive("spawn")])
def test_workers_have_the_default_dtype_of_the_trainer_and_the_number_of_threads_of_the_environment(
    start_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environ(monkeypatch, "OMP_NUM_THREADS", "2")
    torch.set_default_dtype(torch.float64)
    try:
        with make_loader(Settings, workers=1, start_method=start_method) as loader:
            ((values, nums_of_threads),) = loader
    finally:
        torch.set_default_dtype(torch.float32)
    assert values.dtype == torch.float64
    assert nums_of_threads.tolist() == [2] * 4


# What multiprocessing hands over to a child

HANDED_OVER = (
    *("shared tensor", "views of one tensor", "parameters", "300 shared tensors", "shared memory by name"),
    *("shared memory", "Value", "Array", "RawArray", "RawValue", "a ctypes value of its own", "Event", "Barrier"),
    *("Queue", "SimpleQueue", "Pipe", "socket", "a manager's dict", "Lock", "RLock", "Semaphore", "BoundedSemaphore"),
    *("Condition", "authkey", "log level", "a parent", "sys.argv", "environment", "working directory"),
)


@needs_template
@pytest.mark.timeout(3 * HANG_S + 10)
@pytest.mark.parametrize(
    "how",
    [
        ("DataLoader", "fork"),
        *(slow(("DataLoader", method)) for method in ("forkserver", "spawn")),
        *(slow(("SwiftLoader", method)) for method in ("template", "spawn")),
        slow(("dataset_class", "template")),
    ],
    ids="-".join,
)
def test_workers_get_what_children_of_multiprocessing_get(how: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "tests.support.handed_over", *how]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=3 * HANG_S, check=True, cwd=ROOT)
    assert json.loads(finished.stdout) == dict.fromkeys(HANDED_OVER, "")


class Filled(Holding):
    """Its workers fill a tensor that they all have."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.held[index] = index + 1
        return {}


@needs_template
@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_tensors_are_moved_into_shared_memory_as_torch_does_it(method: str) -> None:
    dataset: Any = Filled(torch.zeros(3))
    dataset.other = torch.eye(3).to_sparse()
    for _ in range(2):
        list(DataLoader(dataset, sampler=range(3), num_workers=2, multiprocessing_context=method))
    assert dataset.held.tolist() == [1, 2, 3]
    assert dataset.held.is_shared()


@needs_template
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_nobody_is_forked_who_asked_not_to(method: str) -> None:
    lock = multiprocessing.get_context("fork").Lock()
    dataset: Any = Holding(lock)
    loader: DataLoader[Any] = DataLoader(dataset, num_workers=1, multiprocessing_context=method)
    with pytest.raises(
        RuntimeError, match=r"^dataset\.held is a multiprocessing.synchronize.Lock.*fork context"
    ) as told:
        iter(loader)
    assert told.type is EncodeError


@needs_template
def test_an_npz_file_and_a_weak_proxy_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", a=np.zeros(3))
    with np.load(tmp_path / "arrays.npz") as arrays:
        for held in (arrays, [weakref.proxy(threading.current_thread())]):
            dataset: Any = Holding(held)
            loader: DataLoader[Any] = DataLoader(dataset, num_workers=1, multiprocessing_context="forkserver")
            with pytest.raises(EncodeError, match=r"^dataset\.held"):
                iter(loader)
