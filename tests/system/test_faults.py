"""What the loader promises when things go wrong: a prefix of the order, then a typed error. Never a hang or a loss."""

from __future__ import annotations

import os
import re
import signal
import traceback
from pathlib import Path
from typing import Any

import pytest

from swift_loader import (
    DataLoader,
    EncodeError,
    RemoteTraceback,
    SharedMemoryFull,
    SwiftLoaderWarning,
    WorkerDied,
    WorkerError,
)
from tests.support import datasets
from tests.support.helpers import (
    START_METHOD,
    STARTED_BY_TORCH,
    exhaustive,
    ids_of,
    is_gone,
    loader_children,
    loader_processes,
    make_loader,
    needs_template,
    slow,
    template_and_workers,
    wait_until,
    without_root,
    worker_processes,
)

NEVER_S = 3600.0
"""How long a sample takes that never comes."""

PLACES = pytest.mark.parametrize(("workers", "worker_type"), [(0, "process"), (2, "process"), (2, "thread")])
"""Where the user's code runs: on the loop's thread, in worker processes, in worker threads."""


def prefix_then_error(loader: Any, kind: type[BaseException]) -> tuple[list[int], BaseException]:
    """Return the ids delivered before the error, and the error; checks that it stays."""
    got: list[int] = []
    iterator = iter(loader)
    with pytest.raises(kind) as caught:
        got.extend(number for batch in iterator for number in batch["id"].tolist())
    for _ in range(2):
        with pytest.raises(kind) as again:
            next(iterator)
        assert again.value is caught.value
    return got, caught.value


@pytest.mark.parametrize(
    ("deed", "how"),
    [
        ("SIGKILL", "was ended by SIGKILL"),
        exhaustive("SIGSEGV", "was ended by SIGSEGV"),
        exhaustive("SIGABRT", "was ended by SIGABRT"),
        exhaustive("SIGTERM", "was ended by SIGTERM"),
        exhaustive("exit-0", "exited with code 0"),
        exhaustive("exit-7", "exited with code 7"),
        ("system-exit", "exited with code 3"),
    ],
)
@pytest.mark.parametrize(("in_order", "restarts"), [(True, 0), exhaustive(False, 0), (True, 3)])
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_a_batch_that_ends_its_workers_is_a_typed_error_that_names_batch_and_indices(
    deed: str,
    how: str,
    in_order: bool,
    restarts: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_root(monkeypatch)  # stdout is another one
    options: dict[str, Any] = {
        "worker_restarts": restarts,
        "kwargs": {"deed": deed, "at": 21},
        "shuffle": False,
        "in_order": in_order,
        "batch_size": 4,
    }
    with make_loader(datasets.Misbehaving, **options) as loader:
        got, error = prefix_then_error(loader, WorkerDied)
        text = str(error)
        assert how in text
        # Out of order, one worker may be done with everything else, and get to the next epoch's batch 5, while the
        # other one is still dying of this epoch's.
        epochs = "0" if in_order else "[01]"
        assert re.search(rf"batch 5 of epoch {epochs} \(dataset indices 20, 21, 22, 23\)", text)
        assert "of 2 (rank 0, pid " in text
        assert ("has ended two workers" in text) == bool(restarts)
        if in_order:
            assert got == list(range(len(got)))
        assert len(set(got)) == len(got)
        assert not {20, 21, 22, 23} & set(got)
        with pytest.raises(WorkerDied):
            next(iter(loader))
    assert capfd.readouterr().err == ""


def test_a_killed_worker_is_noticed_while_the_loop_waits() -> None:
    options: dict[str, Any] = {"kwargs": {"seconds": NEVER_S}, "validate": False, "worker_restarts": 0}
    with make_loader(datasets.Slow, **options) as loader:
        loader.start(0)
        worker_processes()[0].kill()
        with pytest.raises(WorkerDied, match="SIGKILL when memory runs out"):
            next(iter(loader))


@needs_template
def test_a_killed_template_is_noticed_and_takes_the_workers_along() -> None:
    with make_loader(datasets.Slow, kwargs={"seconds": NEVER_S}, validate=False, worker_restarts=0) as loader:
        loader.start(0)
        template, workers = template_and_workers()
        template.kill()
        with pytest.raises(WorkerDied):
            next(iter(loader))
        wait_until(lambda: all(is_gone(worker.pid) for worker in workers), "the end of the workers")


def test_a_death_while_the_loop_is_away_is_told_by_next() -> None:
    with make_loader(datasets.Counting, shuffle=False, worker_restarts=0) as loader:
        iterator = iter(loader)
        first = next(iterator)["id"].tolist()
        for worker in worker_processes():
            worker.kill()
            worker.wait()
        with pytest.raises(WorkerDied):
            first += ids_of(iterator)
        assert first == list(range(len(first)))


@pytest.mark.parametrize(("seed", "index"), [(None, ""), (1, ", dataset index 13")])
def test_without_workers_an_exception_of_a_dataloader_s_dataset_has_its_place(seed: int | None, index: str) -> None:
    dataset: Any = datasets.Misbehaving(at=13, deed="raise")
    with pytest.raises(datasets.CustomError) as caught:
        list(DataLoader(dataset, 4, seed=seed))
    assert getattr(caught.value, "__notes__", None) in (None, [f"swift_loader: rank 0, epoch 0, batch 3{index}"])


@PLACES
def test_an_exception_keeps_its_type_and_names_the_dataset_index(workers: int, worker_type: str) -> None:
    options: dict[str, Any] = {"kwargs": {"deed": "raise"}, "shuffle": False, "batch_size": 4, "workers": workers}
    options["worker_type"] = worker_type
    with make_loader(datasets.Misbehaving, **options) as loader:
        got, error = prefix_then_error(loader, datasets.CustomError)
        assert got == list(range(12))
        assert str(error) == "no luck"
        cause = error.__cause__
        assert isinstance(cause, RemoteTraceback)
        assert "dataset index 13" in str(cause)
        assert "batch 3 of epoch 0 (dataset indices 12, 13, 14, 15)" in str(cause)
        if hasattr(error, "__notes__"):  # from Python 3.11 on
            (note,) = error.__notes__
            worker = r", worker \d" if workers else ""
            assert re.fullmatch(f"swift_loader: rank 0{worker}, epoch 0, batch 3, dataset index 13", note)
        if workers and worker_type == "process":
            assert "of 2 (rank 0, pid " in str(cause)
            assert "in misbehave" in str(cause), "the worker's traceback should be shown"
        elif workers:
            assert "of 2 (rank 0, a thread)" in str(cause)
            assert "misbehave" in [entry.name for entry in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_after_an_exception_the_next_epoch_begins_afresh(worker_type: str) -> None:
    options: dict[str, Any] = {"kwargs": {"deed": "raise", "at": 39}, "shuffle": False, "batch_size": 4}
    options["worker_type"] = worker_type
    with make_loader(datasets.Misbehaving, **options) as loader:
        for _ in range(3):
            got, _ = prefix_then_error(loader, datasets.CustomError)
            assert got == list(range(36))


@pytest.mark.parametrize("where", ["__getitem__", "collate", "constructor"])
def test_an_exception_that_cannot_be_rebuilt_is_shown_as_text(where: str) -> None:
    def collate(samples: Any) -> Any:
        return datasets.misbehave("unbuildable")

    if where == "constructor":
        loader = make_loader(datasets.FailsToBuild, kwargs={"deed": "unbuildable"})
    elif where == "collate":
        loader = make_loader(datasets.Counting, collate_fn=collate)
    else:
        loader = make_loader(datasets.Misbehaving, kwargs={"deed": "unbuildable"})
    with loader, pytest.raises(WorkerError, match=r"tests\.support\.datasets\.UnbuildableError: 1 and 2") as caught:
        list(loader)
    assert "Traceback (most recent call last)" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "options", [{"start_method": START_METHOD}, slow({"start_method": "spawn"}), {"worker_type": "thread"}]
)
@pytest.mark.parametrize("per_worker", [False, True])
def test_an_exception_in_the_constructor_comes_out_of_start(options: dict[str, Any], per_worker: bool) -> None:
    loader = make_loader(datasets.FailsToBuild, dataset_per_worker=per_worker, **options)
    with loader, pytest.raises(datasets.CustomError, match="no luck") as caught:
        loader.start(0)
    assert "worker_type" in options or "building the dataset" in str(caught.value.__cause__)


def test_a_constructor_that_ends_the_process_is_a_death() -> None:
    loader = make_loader(datasets.FailsToBuild, kwargs={"deed": "exit-7"})
    with loader, pytest.raises(WorkerDied, match=r"(template process|first worker) .* exited with code 7"):
        loader.start(0)


@PLACES
def test_stop_iteration_never_ends_the_epoch(workers: int, worker_type: str) -> None:
    options: dict[str, Any] = {
        "kwargs": {"deed": "stop-iteration"},
        "shuffle": False,
        "batch_size": 4,
        "workers": workers,
        "worker_type": worker_type,
    }
    with make_loader(datasets.Misbehaving, **options) as loader:
        got, error = prefix_then_error(loader, RuntimeError)
    assert got == list(range(12))
    assert "StopIteration" in str(error)


@pytest.mark.parametrize(("deed", "type_name"), [("lock", "_thread.lock"), ("generator", "generator")])
@PLACES
def test_what_cannot_be_encoded_is_named_with_its_path(
    deed: str, type_name: str, workers: int, worker_type: str
) -> None:
    options: dict[str, Any] = {"kwargs": {"deed": deed}, "shuffle": False, "batch_size": 4, "workers": workers}
    options["worker_type"] = worker_type
    with make_loader(datasets.Misbehaving, **options) as loader:
        got, error = prefix_then_error(loader, EncodeError)
    assert got == list(range(12))
    assert f"batch['id'][1] is a {type_name}" in str(error)


def test_a_batch_that_cannot_be_decoded_is_a_typed_error() -> None:
    class Dataset(datasets.Counting):
        def __getitem__(self, index: int) -> Any:
            return {"id": index, "x": datasets.DecodesBadly(trainer) if index == 13 else None}

    trainer = os.getpid()
    with make_loader(Dataset, kwargs={"num_samples": 40}, shuffle=False, batch_size=4) as loader:
        got, error = prefix_then_error(loader, datasets.CustomError)
    assert got == list(range(12))
    assert "can't be rebuilt here" in str(error)


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_a_batch_20_times_the_first_is_delivered(worker_type: str) -> None:
    options: dict[str, Any] = {"shuffle": False, "batch_size": 4, "worker_type": worker_type}
    with make_loader(datasets.Growing, kwargs={"num_samples": 40}, **options) as loader:
        for _ in range(2):
            for number, batch in enumerate(loader):
                assert batch["x"].shape == (4, 20_000 if number >= 5 else 1000)
                assert batch["id"].tolist() == list(range(4 * number, 4 * number + 4))
                assert (batch["x"] == batch["id"][:, None]).all()


def test_when_memory_runs_out_the_error_names_need_and_limit() -> None:
    options: dict[str, Any] = {"kwargs": {"deed": "file-limit"}, "shuffle": False, "batch_size": 1}
    with make_loader(datasets.Misbehaving, **options) as loader:
        got, error = prefix_then_error(loader, SharedMemoryFull)
    assert got == list(range(13))
    assert isinstance(error, OSError)
    assert "reserving 8388608 bytes" in str(error)


def test_close_ends_all_processes_whatever_they_do(tmp_path: Path) -> None:
    marker = tmp_path / "hangs"
    options: dict[str, Any] = {
        "kwargs": {"deed": "hang", "marker": str(marker), "at": 0},
        "shuffle": False,
        "validate": False,
    }
    loader = make_loader(datasets.Misbehaving, **options)
    loader.start(0)
    template, workers = template_and_workers(num_workers=2)
    for process in (workers[1], workers[0] if STARTED_BY_TORCH else template):
        process.send_signal(signal.SIGSTOP)
    loader.close()
    assert not loader_processes()


@needs_template
def test_a_dataset_that_opened_a_file_is_built_once_per_worker() -> None:
    with make_loader(datasets.OpensAFile, workers=3, batch_size=4) as loader:
        for _ in range(2):
            batches = list(loader)
            assert sorted(ids_of(batches)) == list(range(200))
        assert len({pid for batch in batches for pid in batch["pid"].tolist()}) > 1


@needs_template
def test_a_dataset_that_left_a_thread_behind_gets_interpreters_of_its_own() -> None:
    with make_loader(datasets.LeavesAThread, workers=2, batch_size=4) as loader:
        with pytest.warns(SwiftLoaderWarning, match="left 1 threads running"):
            assert sorted(ids_of(loader)) == list(range(20))
        wait_until(lambda: len(loader_children()) == len(loader_processes()) == 2, "two workers, and no template")
