"""Worker threads: the same batches as from processes, in the same order, and what differs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader import (
    DataLoader,
    LoaderClosed,
    SwiftLoader,
    SwiftLoaderWarning,
    WorkerDied,
    WorkerStalled,
    sample_rng,
)
from tests.support import datasets
from tests.support.helpers import ROOT, going_on_when_told, ids_of, make_loader, wait_until
from tests.system.test_dataloader_faults import worker_threads
from tests.system.test_faults import prefix_then_error


def thread_loader(dataset_class: Any, **options: Any) -> SwiftLoader:
    return make_loader(dataset_class, worker_type="thread", **options)


class Varied(datasets.Counting):
    """Draws from `sample_rng`, and gives arrays and tensors of all kinds; some are views of its own memory."""

    ROWS = np.arange(400, dtype=np.int16).reshape(100, 4)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "id": index,
            "drawn": sample_rng().random(3),
            "row": self.ROWS[index],
            "tensor": torch.full((2, 2), index, dtype=torch.bfloat16),
            "text": str(index) * 3,
            "ragged": None if index % 3 else np.float64(index),
        }


def digest(loader: SwiftLoader) -> list[Any]:
    """What each batch consists of: types and bytes."""
    return [described(batch) for _ in range(2) for batch in loader]


def described(thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        return thing.dtype, thing.stride(), thing.is_inference(), thing.tolist()
    if isinstance(thing, np.ndarray):
        return thing.dtype.str, thing.strides, thing.flags.writeable, thing.tolist()
    if isinstance(thing, dict):
        return {name: described(value) for name, value in thing.items()}
    return type(thing), list(map(described, thing)) if isinstance(thing, list) else thing


@pytest.mark.parametrize("collate_fn", [None, datasets.identity])
@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_batches_have_the_bytes_and_types_of_those_of_processes(collate_fn: Any, in_inference_mode: bool) -> None:
    found = []
    for worker_type, workers in (("process", 2), ("thread", 1), ("thread", 3)):
        options: dict[str, Any] = {"collate_fn": collate_fn, "worker_type": worker_type, "workers": workers}
        with torch.inference_mode(in_inference_mode), make_loader(Varied, **options) as loader:
            found.append(digest(loader))
    assert found == [found[0]] * 3


def test_batches_share_no_memory_with_the_dataset() -> None:
    with thread_loader(Varied, collate_fn=datasets.first_only, shuffle=False) as loader:
        for batch in loader:
            batch["row"][:] = -1
            assert batch["row"].base is not Varied.ROWS
    assert (np.arange(400) == Varied.ROWS.ravel()).all()


def test_batches_are_built_before_the_loop_asks() -> None:
    built: list[int] = []

    class Notes(datasets.Counting):
        def __getitem__(self, index: int) -> Any:
            built.append(index)
            return super().__getitem__(index)

    for validate in (True, False):
        built.clear()
        with thread_loader(Notes, validate=validate, data_queue_size=5) as loader:
            loader.start(0)
            wait_until(lambda: len(built) == 40, "five batches are built")


def test_a_decoder_that_fails_is_an_error_of_the_loop() -> None:
    def decode(data: bytes) -> Any:
        raise datasets.CustomError("no luck")

    with (
        thread_loader(datasets.Counting, batch_encoder=lambda batch: b"", batch_decoder=decode) as loader,
        pytest.raises(datasets.CustomError),
    ):
        next(iter(loader))


TESTS_THAT_APPLY = ["resume", "sample_errors", "trial", "combinations"]
"""Others kill workers, or look at their processes."""


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TESTS_THAT_APPLY)
def test_the_tests_of_workers_pass_with_threads(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "SWIFT_LOADER_TESTS_WORKER_TYPE": "thread"}
    temporary = f"--basetemp={tmp_path / 'temporary'}"
    command = [sys.executable, "-m", "pytest", "-q", temporary, f"tests/system/test_{name}.py"]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout


# Random numbers


both = pytest.mark.parametrize(
    ("front", "options"), [(SwiftLoader, {"worker_per_consumer": 2}), (DataLoader, {"num_workers": 2})]
)


@both
def test_a_dataset_that_draws_from_the_global_generators_is_told_once(front: Any, options: dict[str, Any]) -> None:
    loader = front(dataset=datasets.AugmentingWithAll(), worker_type="thread", batch_size=10, **options)
    with pytest.warns(SwiftLoaderWarning) as told:
        assert [len(list(loader)) for _ in range(3)] == [10] * 3
    (warning,) = told
    assert "draws from random and numpy.random and torch's default generator" in str(warning.message)
    assert "or give worker_type='process'" in str(warning.message)
    assert warning.filename == __file__


def test_with_rng_none_draws_are_not_told() -> None:
    with thread_loader(datasets.Augmenting, rng=None) as loader:
        assert len(ids_of(loader)) == 100


def test_the_users_generators_stay_as_they_are() -> None:
    def states() -> list[Any]:
        return [random.getstate(), [list(map(str, np.random.get_state()))], torch.get_rng_state().tolist()]

    before = states()
    with thread_loader(Varied) as loader:
        for _ in loader:
            assert states() == before
    assert states() == before


@both
def test_rng_by_worker_is_refused(front: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rng='worker' doesn't work with worker_type='thread'"):
        front(dataset=datasets.Counting(), rng="worker", worker_type="thread", **options)


# Datasets


class SaysWhichItIs(datasets.Counting):
    """Samples name the instance that they are from."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.001)
        return {"id": index, "instance": id(self)}


@pytest.mark.parametrize("per_worker", [False, True])
@pytest.mark.parametrize("as_instance", [False, True])
def test_threads_share_the_dataset_or_have_one_each(per_worker: bool, as_instance: bool) -> None:
    instance = SaysWhichItIs()
    options: dict[str, Any] = {"dataset": instance} if as_instance else {"dataset_class": SaysWhichItIs}
    with SwiftLoader(
        worker_per_consumer=2, worker_type="thread", batch_size=4, dataset_per_worker=per_worker, **options
    ) as loader:
        found = {number for batch in loader for number in batch["instance"].tolist()}
        assert id(loader.dataset) in found
    assert len(found) == 1 + per_worker


# Threads that hang or end


class Hangs(datasets.Counting):
    """Waits at sample 21 until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(40)
        self.is_waiting, self.go_on = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 21:
            self.is_waiting.set()
            self.go_on.wait(60)
        return super().__getitem__(index)


@pytest.fixture
def hanging() -> Iterator[Hangs]:
    dataset = Hangs()
    yield dataset
    dataset.go_on.set()
    wait_until(lambda: not worker_threads(), "the abandoned thread has ended")


def loader_of(dataset: Hangs, **options: Any) -> SwiftLoader:
    return SwiftLoader(
        dataset=dataset, worker_per_consumer=2, worker_type="thread", batch_size=4, shuffle=False, **options
    )


def test_a_thread_that_hangs_is_told_with_its_stack_and_may_go_on(hanging: Hangs) -> None:
    with loader_of(hanging, stall_warning=0.2) as loader:
        with going_on_when_told("at dataset index 21", hanging.go_on.set) as told:
            got = ids_of(loader)
        assert got == list(range(40))
    text = told[0]
    assert "of 2 (rank 0, a thread) has been at batch 5 of epoch 0 " in text
    assert "(dataset indices 20, 21, 22, 23), at dataset index 21, for " in text
    stack = text[text.index("Its Python stack") :]
    assert "self.go_on.wait(60)" in stack
    assert "swift_loader/executors" not in stack


def test_after_the_timeout_the_loop_gets_an_error_and_close_waits_for_no_thread(hanging: Hangs) -> None:
    with loader_of(hanging, timeout=0.3) as loader:
        iterator, got = iter(loader), list[int]()
        for _ in range(2):
            with pytest.raises(
                WorkerStalled, match=r"index 21, for .* longer than timeout=0.3 s. A thread can't be kil"
            ):
                got += ids_of(iterator)
        assert got == list(range(len(got)))
        assert not {20, 21, 22, 23} & set(got)
        loader.close()
    assert len(worker_threads()) == 1


def test_a_thread_that_the_dataset_ends_is_a_typed_error() -> None:
    options: dict[str, Any] = {"kwargs": {"deed": "system-exit", "at": 21}, "shuffle": False, "batch_size": 4}
    with thread_loader(datasets.Misbehaving, **options) as loader:
        got, error = prefix_then_error(loader, WorkerDied)
    assert got == list(range(len(got)))
    assert isinstance(error.__cause__, SystemExit)
    assert "at batch 5 of epoch 0 (dataset indices 20, 21, 22, 23), was ended by SystemExit(3)" in str(error)


# Ends


def test_a_loader_that_is_closed_while_it_starts_has_no_threads() -> None:
    class ClosesItsLoader(datasets.Counting):
        def __len__(self) -> int:
            loader.close()
            return 10

    loader = thread_loader(ClosesItsLoader)
    with pytest.raises(LoaderClosed):
        loader.start(0)
    assert not worker_threads()


@pytest.mark.parametrize("num_batches", [0, 3])
def test_a_loader_that_is_dropped_ends_its_threads(num_batches: int) -> None:
    loader = thread_loader(datasets.Counting)
    loader.start(0)
    assert len(worker_threads()) == 2
    for _, _ in zip(range(num_batches), loader, strict=False):
        continue
    del loader
    wait_until(lambda: not worker_threads(), "the threads have ended")
