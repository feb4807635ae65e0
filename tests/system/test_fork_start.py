"""`start_method="fork"`: the workers are forks of a fork of the trainer, and have its very dataset."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import re
import signal
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from swift_loader import DataLoader, SwiftLoader, SwiftLoaderWarning, WorkerDied
from swift_loader.executors.process.fleet import TemplateFleet
from swift_loader.executors.process.trainer_fork import ForkWatch
from tests.support import datasets
from tests.support.helpers import ids_of, is_tracker, make_loader, run_script

_CONTEXT = multiprocessing.get_context("fork")
_COUNT = _CONTEXT.Value("i", 0)
"""Made here, because multiprocessing keeps a file open from the first value on."""


class Held(datasets.Counting):
    """A dataset that holds something, and shows in each sample what a function makes of it."""

    def __init__(self, held: Any, look: Callable[[Any, int], Any]) -> None:
        super().__init__(24)
        self.held, self.look = held, look

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "seen": self.look(self.held, index)}


def seen_by_workers(held: Any, look: Callable[[Any, int], Any], **options: Any) -> list[Any]:
    options = {"shuffle": False, "validate": False} | options
    with forking(Held(held, look), **options) as loader:
        return [sample for batch in loader for sample in batch["seen"]]


def forking(dataset: Any, **options: Any) -> SwiftLoader:
    return SwiftLoader(dataset=dataset, batch_size=4, worker_per_consumer=2, seed=7, start_method="fork", **options)


def fleet_of(loader: SwiftLoader) -> TemplateFleet:
    session = loader._lifecycle.session
    assert session is not None
    fleet: TemplateFleet = session.engine._executor.fleet  # type: ignore[attr-defined]
    return fleet


def test_the_dataset_may_hold_an_open_file(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(bytes(range(24)))
    warned = pytest.warns(SwiftLoaderWarning, match="share the position")
    with (tmp_path / "numbers").open("rb") as file, warned:
        seen = seen_by_workers(file, lambda file, index: os.pread(file.fileno(), 1, index)[0])
    assert seen == list(range(24))


@pytest.mark.parametrize("validate", [False, True])
def test_a_value_is_shared_with_the_trainer(validate: bool) -> None:
    def count(value: Any, _: int) -> int:
        with value.get_lock():
            value.value += 1
        return int(os.getppid())

    before = _COUNT.value
    parents = set(seen_by_workers(_COUNT, count, validate=validate))
    assert _COUNT.value >= before + 24
    assert len(parents) == 1
    assert os.getpid() not in parents


def test_a_tensor_in_shared_memory_is_shared_with_the_trainer() -> None:
    shared = torch.zeros(24).share_memory_()  # type: ignore[no-untyped-call]
    seen_by_workers(shared, lambda tensor, index: tensor[index].fill_(index).item())
    assert shared.tolist() == list(range(24))


def test_a_queue_that_the_trainer_used_works_in_the_workers() -> None:
    queue = _CONTEXT.Queue()
    queue.put(-1)
    assert queue.get(timeout=20) == -1
    seen_by_workers(queue, lambda queue, index: queue.put(index))
    missing = set(range(24))
    while missing:
        missing.discard(queue.get(timeout=20))
    queue.close()
    queue.join_thread()


def test_an_instance_of_a_local_class_arrives_as_one() -> None:
    class Local(Held):
        pass

    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    dataset = Local(None, lambda _, index: index)
    with forking(dataset, collate_fn=lambda samples: [dataset.__class__, len(samples)], validate=False) as loader:
        assert next(iter(loader))[0] is Local


def test_a_dataset_class_that_opens_files_is_built_by_each_worker(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(bytes(range(24)))

    class Reader(datasets.Counting):
        def __init__(self) -> None:
            super().__init__(24)
            self.file, self.builder = (tmp_path / "numbers").open("rb"), os.getpid()

        def __getitem__(self, index: int) -> dict[str, Any]:
            self.file.seek(index)
            return {"id": self.file.read(1)[0], "is_own": self.builder == os.getpid()}

    with make_loader(Reader, start_method="fork", shuffle=False) as loader:
        batches = list(loader)
    assert ids_of(batches) == list(range(24))
    assert all(batch["is_own"].all() for batch in batches)


@pytest.mark.filterwarnings("ignore:.*sqlite3:pytest.PytestUnraisableExceptionWarning")  # its thread alone can close it
def test_the_dataset_has_what_belongs_to_the_thread_that_starts_the_loader_which_may_end() -> None:
    local, lock, started = threading.local(), threading.Lock(), list[SwiftLoader]()

    def look(database: Any, _: int) -> int:
        with lock:
            return int(local.value + database.execute("select 20").fetchone()[0] + torch.is_grad_enabled())

    def start() -> None:
        local.value = 3
        torch.set_grad_enabled(False)
        started.append(forking(Held(sqlite3.connect(":memory:"), look), validate=False))
        started[0].start()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with started[0] as loader:
        assert [batch["seen"].tolist() for batch in loader] == [[23] * 4] * 6


def test_torch_has_one_thread_there_even_if_the_trainer_has_used_more() -> None:
    torch.rand(300, 300) @ torch.rand(300, 300)
    seen = seen_by_workers(torch.rand(300, 300), lambda matrix, _: (matrix @ matrix, torch.get_num_threads())[1])
    assert set(seen) == {1}


def test_a_worker_that_dies_is_replaced_with_the_same_dataset() -> None:
    with make_loader(datasets.Counting, start_method="fork", kwargs={"num_samples": 400}) as loader:
        expected = ids_of(loader)
    dataset = datasets.Counting(400)
    with SwiftLoader(
        dataset=dataset, batch_size=8, worker_per_consumer=2, seed=7, start_method="fork", data_queue_size=4
    ) as loader:
        batches, iterator = [], iter(loader)
        batches.append(next(iterator))
        worker = next(iter(fleet_of(loader).workers.values()))
        os.kill(worker.process.pid, signal.SIGKILL)
        with pytest.warns(UserWarning, match="SIGKILL"):
            batches += list(iterator)
    assert ids_of(batches) == expected


def test_a_fork_of_the_trainer_that_dies_is_replaced_if_the_dataset_can_be_sent() -> None:
    with forking(datasets.Counting(400)) as loader:
        expected = ids_of(loader)
    with forking(datasets.Counting(400)) as loader:
        iterator = iter(loader)
        batches = [next(iterator)]
        template = fleet_of(loader).starter.template
        assert template is not None
        os.kill(template.pid, signal.SIGKILL)
        with pytest.warns(SwiftLoaderWarning, match="SIGKILL"):
            batches += list(iterator)
    assert ids_of(batches) == expected


def test_a_dataloader_whose_fork_dies_says_so_after_a_correct_prefix_and_goes_on_from_its_state() -> None:
    dataset: Any = datasets.Counting(4000)
    dataset.unsendable = (number for number in range(1))
    loader: DataLoader[Any] = DataLoader(dataset, num_workers=2, multiprocessing_context="fork")
    iterator = iter(loader)
    got = [int(next(iterator)["id"])]
    os.kill(psutil.Process(iterator._workers[0].pid).ppid(), signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"can't be made again.*dataset\.unsendable is a generator.*state_dict\(\)"):
        got.extend(int(batch["id"]) for batch in iterator)
    loader.load_state_dict(loader.state_dict())
    assert [*got, *(int(batch["id"]) for batch in loader)] == list(range(4000))
    assert len(got) < 4000


@pytest.mark.parametrize("front", [DataLoader, SwiftLoader])
def test_one_warning_names_a_file_that_the_dataset_holds_open(front: type, tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(bytes(24))
    with (tmp_path / "numbers").open("rb") as file, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        held: Any = Held({"files": [file]}, lambda _, index: index)
        for _ in range(2):
            part = torch.utils.data.Subset(held, range(4))
            if front is DataLoader:
                list(DataLoader(part, num_workers=1, multiprocessing_context="fork"))
            else:
                with forking(part) as loader:
                    list(loader)
    (line,) = [str(one.message) for one in told if one.category is SwiftLoaderWarning]
    assert str(tmp_path / "numbers") in line
    assert "multiprocessing_context='forkserver' to DataLoader, start_method='template' to SwiftLoader" in line


# Locks that another thread of the program holds

_LOCK = threading.Lock()


def takes_lock(_: Any, index: int) -> int:
    if index >= 12:  # the first worker has answered by then
        with _LOCK:
            return index
    return index


@pytest.mark.parametrize(
    ("place", "device"),
    [
        pytest.param("sample", None, marks=pytest.mark.slow),
        pytest.param("sample", "cpu", marks=pytest.mark.slow),
        ("template", None),
    ],
)
def test_a_fork_that_waits_for_ever_is_replaced_by_an_interpreter(
    place: str, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForkWatch, "proof_s", 0.1)
    dataset: Any = Held({}, takes_lock)
    monkeypatch.setitem(dataset.held, "hangs", place == "template")  # until the end of this test
    multiprocessing.util.register_after_fork(dataset, lambda dataset: dataset.held["hangs"] and takes_lock(None, 12))
    loader = DataLoader(dataset, num_workers=2, multiprocessing_context="fork", device=device)
    with _LOCK, pytest.warns(SwiftLoaderWarning) as warned:
        got = [int(batch["id"]) for batch in loader]
    assert got == list(range(24))
    assert re.search(r"pid \d+\) is a fork.*Give multiprocessing_context='forkserver'", str(warned.pop().message))
    assert not [one for one in warned if one.category is SwiftLoaderWarning], "one is enough"


def test_without_an_interpreter_in_its_place_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForkWatch, "proof_s", 0.1)
    dataset: Any = Held((number for number in range(1)), takes_lock)
    loader = DataLoader(dataset, num_workers=2, multiprocessing_context="fork")
    with (
        _LOCK,
        pytest.warns(SwiftLoaderWarning),
        pytest.raises(WorkerDied, match=r"'forkserver'(.|\n)*can't be sent") as hung,
    ):
        list(loader)
    assert "'fork'" not in str(hung.value).replace('"', "'"), "one advice"


def wait_for_a_lock(limit: float = -1) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=limit)


def wait_beside(function: Callable[[], object]) -> None:
    threading.Thread(target=function, daemon=True).start()
    wait_for_a_lock()


@pytest.mark.parametrize(
    ("does", "hangs"),
    [
        (wait_for_a_lock, True),
        (partial(wait_beside, wait_for_a_lock), True),
        (partial(wait_for_a_lock, 1e6), False),
        (partial(time.sleep, 1e6), False),
        (partial(wait_beside, partial(time.sleep, 1e6)), False),
        (partial(wait_beside, lambda: sum(iter(int, 1))), False),
    ],
    ids=["lock", "locks", "limit", "sleep", "thread that sleeps", "thread that works"],
)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_only_what_nobody_can_end_counts_as_a_hang(
    does: Callable[[], object], hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForkWatch, "proof_s", 0.1)
    process = multiprocessing.get_context("fork").Process(target=does)
    process.start()
    try:
        watch, num_looks, found = ForkWatch(), 0, False
        while not found and (hangs or num_looks < 20):
            time.sleep(0.05)
            found, num_looks = watch.finds(process.pid or 0), num_looks + 1
        assert found is hangs
    finally:
        process.kill()
        process.join()


def test_workers_have_no_descriptors_of_other_loaders() -> None:
    def of_loaders(_: Any, __: int) -> list[str]:
        found = []
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/self/fd/{number}"))
        return [target for target in found if target.startswith(("socket", "pipe"))]

    def own() -> int:
        return len(of_loaders(None, 0))

    few = own()
    with forking(Held(None, lambda _, index: len(of_loaders(None, index)) - few), validate=False) as alone:
        expected = next(iter(alone))["seen"]
    with make_loader(datasets.Counting) as first, make_loader(datasets.Counting, start_method="fork") as second:
        next(iter(first))
        next(iter(second))
        with forking(Held(None, lambda _, index: len(of_loaders(None, index)) - few), validate=False) as third:
            assert next(iter(third))["seen"].tolist() == expected.tolist()


def test_workers_print_to_the_stdout_of_the_program(tmp_path: Path) -> None:
    script = """
        import contextlib, sys
        from pathlib import Path
        from swift_loader import SwiftLoader

        class Tee:
            def write(self, text):
                with Path(sys.argv[1]).open("a") as file:
                    file.write(text)

            def flush(self):
                raise RuntimeError("which ends nobody")

        class Data:
            def __len__(self):
                return 4

            def __getitem__(self, index):
                print(index)
                return index

        with contextlib.redirect_stdout(Tee()):
            with SwiftLoader(dataset=Data(), batch_size=2, worker_per_consumer=1, start_method="fork") as loader:
                list(loader)
    """
    run_script(script, str(tmp_path / "copy"), folder=tmp_path)
    assert set((tmp_path / "copy").read_text().split()) == {"0", "1", "2", "3"}


class Patient(datasets.Counting):
    """Says which process has made a sample."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "pid": os.getpid()}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize(
    "method", ["fork", *[pytest.param(one, marks=pytest.mark.slow) for one in ("template", "spawn")]]
)
def test_a_signal_that_the_program_handles_ends_no_process_of_a_loader(method: str, number: int) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda *_: seen.append(1))
    try:
        options: Any = {"batch_size": 4, "shuffle": False, "worker_per_consumer": 2, "start_method": method}
        with SwiftLoader(dataset=Patient(400), **options) as loader:
            iterator = iter(loader)
            batches = [next(iterator)]
            for process in psutil.Process().children(recursive=True):  # as a scheduler does with a whole job
                if not is_tracker(process):  # multiprocessing's own dies of SIGUSR1
                    process.send_signal(number)
            os.kill(os.getpid(), number)
            batches += list(iterator)
    finally:
        signal.signal(number, before)
    assert ids_of(batches) == list(range(400))
    assert seen
    assert len({int(pid) for batch in batches for pid in batch["pid"]}) <= 2, "nobody was replaced"


def test_a_new_epoch_shows_no_warning_again_that_was_shown_once() -> None:
    def warn_once() -> None:
        warnings.warn("shown once", UserWarning, stacklevel=1)

    def look(_: Any, index: int) -> int:
        warn_once()
        return index

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        shown: list[str] = []
        warnings.showwarning = lambda message, *_: shown.append(str(message))
        warn_once()
        for _ in range(2):
            list(DataLoader(Held(None, look), num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
            warn_once()
    assert shown == ["shown once"]


def test_prepare_is_followed_by_a_fork_of_its_own() -> None:
    dataset = Held([0], lambda held, _: held[0])
    loader = forking(dataset, validate=False)
    with loader:
        loader.prepare()
        dataset.held[0] = 5
        assert next(iter(loader))["seen"].tolist() == [5] * 4


def test_the_end_of_a_script_runs_once(tmp_path: Path) -> None:
    script = """
        import atexit, os, sys, weakref
        from swift_loader import SwiftLoader

        class Data:
            def __init__(self):
                self.file = open(os.devnull)
            def __len__(self):
                return 8
            def __getitem__(self, index):
                return index

        class Finalised:
            pass

        atexit.register(print, "at exit")
        thing = Finalised()
        weakref.finalize(thing, print, "finalised")
        print("buffered", end=" ")
        loader = SwiftLoader(dataset=Data(), batch_size=4, start_method="fork", shuffle=False)
        print([batch.tolist() for batch in loader])
    """
    printed = run_script(script, folder=tmp_path).split("\n")
    assert printed[0] == "buffered [[0, 1, 2, 3], [4, 5, 6, 7]]"
    assert sorted(printed[1:]) == ["", "at exit", "finalised"]
