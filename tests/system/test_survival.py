"""What the loop doesn't notice: workers and templates that die, are killed or hang, and are replaced."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_loader import SwiftLoaderWarning, WorkerDied, WorkerStalled
from tests.support import datasets
from tests.support.checked import digest
from tests.support.helpers import (
    START_METHOD,
    STARTED_BY_TORCH,
    exhaustive,
    going_on_when_told,
    ids_of,
    loader_children,
    loader_processes,
    make_loader,
    needs_template,
    run_script,
    set_faults,
    template_and_workers,
    wait_until,
    without_root,
    worker_processes,
)

# Which a busy machine may be slow at: those who ask for the warning get it all the same.
pytestmark = pytest.mark.filterwarnings("ignore:building the dataset:swift_loader.SwiftLoaderWarning")

ONCE = ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "exit-0", "exit-7", "system-exit"]


def kill_at_once(victims: list[psutil.Process]) -> None:
    """Kill processes before anyone notices: a batch that one leaves, and another takes on, would get the blame."""
    for process in victims:
        process.kill()
    psutil.wait_procs(victims)


def kill_and_wait_until_it_is_replaced() -> None:
    """Kill one of two workers, and return once there is another one."""
    _, workers = template_and_workers(num_workers=2)
    workers[0].kill()
    workers[0].wait()
    wait_until(lambda: len(worker_processes()) == 2, "the worker is replaced")


@pytest.mark.parametrize(
    ("deed", "start_method"),
    [
        *[(deed, START_METHOD) for deed in ("SIGKILL", "system-exit")],
        *[exhaustive(deed, method) for deed in ONCE for method in ("template", "spawn")],
    ],
)
def test_a_worker_that_dies_is_replaced_and_the_loop_gets_the_same_bytes(
    deed: str, start_method: str, tmp_path: Path
) -> None:
    kwargs: dict[str, Any] = {"folder": str(tmp_path), "deed": deed}
    options: dict[str, Any] = {"kwargs": kwargs, "start_method": start_method, "batch_size": 4}
    with make_loader(datasets.FailsOnce, **options) as loader:
        with pytest.warns(SwiftLoaderWarning, match=r"is replaced \(1 of"):
            survived = [list(map(digest, loader)) for _ in range(2)]
        assert loader.report()["worker_restarts"] == 1
    with make_loader(datasets.Augmenting, kwargs={"num_samples": 80}, workers=0, batch_size=4) as loader:
        assert [list(map(digest, loader)) for _ in range(2)] == survived


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize(
    "victims",
    [
        pytest.param("template", marks=needs_template),
        "all workers",
        pytest.param("template and a worker", marks=[needs_template, pytest.mark.slow]),
    ],
)
def test_idle_processes_that_are_killed_are_replaced(victims: str) -> None:
    with make_loader(datasets.Counting, kwargs={"num_samples": 1000}, shuffle=False) as loader:
        loader.start(0)
        iterator = iter(loader)
        got = ids_of([next(iterator)])
        template, workers = template_and_workers(num_workers=2)
        kill_at_once({"template": [template], "all workers": workers}.get(victims, [workers[0], template]))
        assert got + ids_of(iterator) == list(range(1000))
        assert ids_of(loader) == list(range(1000))
        new_template, new_workers = template_and_workers(num_workers=2)
        assert (new_template.pid == template.pid) == (victims == "all workers")
        assert not {worker.pid for worker in new_workers} & {worker.pid for worker in workers}


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("multithread", [True, False])
def test_who_dies_while_a_quick_loop_stays_away_or_between_epochs_is_replaced_before_it_is_back(
    multithread: bool,
) -> None:
    options: dict[str, Any] = {"kwargs": {"num_samples": 4000}, "shuffle": False, "multithread": multithread}
    with make_loader(datasets.Counting, **options) as loader:
        for away_at in ((200, 400), ()):
            got = []
            for step, batch in enumerate(loader):
                got.append(batch)
                if step in away_at:
                    kill_and_wait_until_it_is_replaced()
            assert ids_of(got) == list(range(4000))
            kill_and_wait_until_it_is_replaced()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_a_template_is_replaced_again_and_again_as_long_as_batches_come() -> None:
    with make_loader(datasets.Counting, kwargs={"num_samples": 200}, shuffle=False, worker_restarts=1) as loader:
        for _ in range(4):
            iterator = iter(loader)
            first = next(iterator)
            template, workers = template_and_workers(num_workers=2)
            template.kill()
            psutil.wait_procs(workers)  # or, on a busy machine, they might get through the epoch before they are gone
            assert ids_of([first, *iterator]) == list(range(200))


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_a_new_worker_follows_the_plan_that_a_loaded_state_brought(tmp_path: Path) -> None:
    with make_loader(datasets.Counting, batch_size=8, seed=3) as loader:
        iterator = iter(loader)
        ids = ids_of(next(iterator) for _ in range(3))
        state = loader.state_dict()
        rest = ids_of(iterator)
    with make_loader(datasets.Counting, batch_size=5, seed=3) as loader:
        loader.start(0)
        loader.load_state_dict(state)
        kill_at_once(worker_processes())
        assert ids_of(loader) == rest
    assert sorted(ids + rest) == list(range(100))


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("start_method", ["fork", exhaustive("spawn"), exhaustive("template")])
def test_a_loader_that_loses_one_worker_after_another_is_given_up(start_method: str, tmp_path: Path) -> None:
    class DiesInWorkers(datasets.Counting):
        def __init__(self, num_samples: int) -> None:
            super().__init__(num_samples)
            if (tmp_path / "armed").exists():
                with (tmp_path / "deaths").open("a") as file:
                    file.write("x")
                os._exit(7)

    options: dict[str, Any] = {"dataset_per_worker": True, "start_method": start_method, "worker_restarts": 2}
    with make_loader(DiesInWorkers, kwargs={"num_samples": 10_000}, workers=1, **options) as loader:
        loader.start(0)
        (tmp_path / "armed").touch()
        for process in loader_processes():
            if not process.children():
                process.kill()
        with pytest.raises(WorkerDied, match="exited with code 7") as caught:
            list(loader)
    if start_method == "fork":
        assert "3 workers in a row with this id have ended without a result (worker_restarts=2)" in str(caught.value)
        assert (tmp_path / "deaths").read_text() == "xx"


def test_the_error_has_the_last_lines_of_stderr_which_are_passed_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_root(monkeypatch)  # stdout is another one

    class Talks(datasets.Counting):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                for number in range(1000):
                    os.write(2, f"line {number}\n".encode())
                os._exit(9)
            return index

    with (
        make_loader(Talks, shuffle=False, batch_size=2, worker_restarts=0, validate=False) as loader,
        pytest.raises(WorkerDied, match="exited with code 9") as caught,
    ):
        list(loader)
    assert "The last lines of its stderr:\n    line 980\n" in str(caught.value)
    assert str(caught.value).endswith("line 999")
    assert capfd.readouterr().err == "".join(f"line {number}\n" for number in range(1000))


def test_the_error_has_the_python_stack_of_a_crash(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_root(monkeypatch)  # stdout is another one
    options: dict[str, Any] = {"kwargs": {"deed": "SIGSEGV"}, "worker_restarts": 0, "batch_size": 4}
    with make_loader(datasets.Misbehaving, **options) as loader, pytest.raises(WorkerDied) as caught:
        list(loader)
    assert "Fatal Python error: Segmentation fault" in str(caught.value)
    assert "in misbehave" in str(caught.value)
    assert capfd.readouterr().err == "" or STARTED_BY_TORCH


def test_a_constructor_that_crashes_shows_its_stack() -> None:
    loader = make_loader(datasets.FailsToBuild, kwargs={"deed": "SIGSEGV"})
    with loader, pytest.raises(WorkerDied, match=r"(template process|first worker) .* was ended by SIGSEGV") as caught:
        loader.start(0)
    assert "in misbehave" in str(caught.value)


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_a_batch_is_not_blamed_for_a_worker_that_died_before_it_began_it() -> None:
    """All workers are killed at once, again and again: what one leaves goes to another that is dead already.

    They are killed no more often than one worker may be replaced: where workers start slowly, the same one may be
    killed each time before it has built a batch.
    """
    kwargs: dict[str, Any] = {"num_samples": 400, "seconds": 0.001}
    with make_loader(datasets.Slow, kwargs=kwargs, workers=3, shuffle=False, batch_size=4) as loader:
        got: list[int] = []
        for number, batch in enumerate(loader):
            got += batch["id"].tolist()
            if number in {5, 35, 65}:
                workers = worker_processes()
                for worker in workers:
                    worker.suspend()  # else it may begin what one leaves that was killed a moment before
                for worker in workers:
                    worker.kill()
        assert got == list(range(400))


# Workers that hang ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["hangs", pytest.param("is stopped", marks=[needs_template, pytest.mark.slow])])
@pytest.mark.parametrize("in_order", [True, exhaustive(False)])
@pytest.mark.filterwarnings("ignore:.*is replaced:swift_loader.SwiftLoaderWarning")
@pytest.mark.filterwarnings("ignore:no worker is ready:swift_loader.SwiftLoaderWarning")  # on a busy machine
def test_a_worker_that_hangs_is_shown_killed_and_replaced(how: str, in_order: bool, tmp_path: Path) -> None:
    deed = "hang" if how == "hangs" else "SIGSTOP"
    kwargs: dict[str, Any] = {"folder": str(tmp_path), "deed": deed}
    options: dict[str, Any] = {"kwargs": kwargs, "batch_size": 4, "shuffle": False, "in_order": in_order}
    with make_loader(datasets.FailsOnce, stall_warning=1.0, timeout=3.0, **options) as loader:
        with pytest.warns(
            SwiftLoaderWarning, match=r"has been at batch 5 .*, at dataset index 21, for \d\.\d s"
        ) as told:
            assert sorted(ids_of(loader)) == list(range(80))
        texts = [str(warning.message) for warning in told]
        warned = [text for text in texts if "was killed" not in text and "at dataset index 21" in text]
        assert ("in misbehave" if how == "hangs" else "the process is stopped, by SIGSTOP") in warned[0]
        assert Path(told[0].filename).name == "helpers.py"
        assert loader.report()["worker_restarts"] == 1


class FallsDeep(datasets.Misbehaving):
    """Misbehaves far down in its code."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.deeper(index, 60) if index == self.at else {"id": index}

    def deeper(self, index: int, depth: int) -> dict[str, Any]:
        return self.deeper(index, depth - 1) if depth else super().__getitem__(index)


@pytest.mark.parametrize(
    ("deed", "error"), [("hang", WorkerStalled), pytest.param("SIGSEGV", WorkerDied, marks=needs_template)]
)
def test_the_stack_in_an_error_is_whole_and_the_user_s(deed: str, error: type[Exception]) -> None:
    options: dict[str, Any] = {"kwargs": {"deed": deed}, "validate": False, "shuffle": False, "worker_restarts": 0}
    with make_loader(FallsDeep, workers=1, timeout=1, **options) as loader, pytest.raises(error) as caught:
        list(loader)
    text = str(caught.value)
    assert text.count("in deeper\n") == 61
    assert text.count("Thread 0x") + text.count("Current thread 0x") == 1
    assert "write_when_asked" not in text
    assert "threading.py" not in text


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("restarts", [0, 3])
def test_past_the_budget_a_hung_worker_is_a_typed_error_with_its_stack(restarts: int) -> None:
    options: dict[str, Any] = {"kwargs": {"deed": "hang"}, "shuffle": False, "batch_size": 4}
    with make_loader(datasets.Misbehaving, timeout=1.0, worker_restarts=restarts, **options) as loader:
        got: list[int] = []
        with pytest.raises(WorkerStalled, match=r"batch 3 of epoch 0 \(dataset indices 12, 13, 14, 15\)") as caught:
            got.extend(number for batch in loader for number in batch["id"].tolist())
        assert got == list(range(12))
        assert re.search(r"at dataset index 13, for \d+\.\d s, longer than timeout=1 s", str(caught.value))
        assert "in misbehave" in str(caught.value)


def test_a_first_batch_that_hangs_ends_by_the_same_rule() -> None:
    options: dict[str, Any] = {"kwargs": {"deed": "hang", "at": 2}, "timeout": 1.0, "worker_restarts": 0}
    where = r"has been at batch 0 of epoch 0 \(dataset indices 0, 1, 2, 3\), at dataset index 2,"
    with (
        make_loader(datasets.Misbehaving, shuffle=False, batch_size=4, **options) as loader,
        pytest.raises(WorkerStalled, match=where),
    ):
        loader.start(0)


def test_a_first_batch_that_fails_in_the_end_leaves_out_no_warning() -> None:
    options: dict[str, Any] = {"kwargs": {"deed": "exit-3", "at": 2}, "shuffle": False, "batch_size": 4}
    with (
        make_loader(datasets.Misbehaving, **options) as loader,
        pytest.warns(SwiftLoaderWarning, match="It is replaced"),
        pytest.raises(WorkerDied, match="has ended two workers"),
    ):
        loader.start(0)


def test_a_dataset_that_takes_long_to_build_is_shown(tmp_path: Path) -> None:
    may_go_on = tmp_path / "may go on"

    class Slow(datasets.Counting):
        def __init__(self) -> None:
            super().__init__()
            while not may_go_on.exists():
                time.sleep(0.01)

    with make_loader(Slow, stall_warning=1.0) as loader:
        with going_on_when_told(r"building the dataset has taken [0-9.]+ s so far", may_go_on.touch) as told:
            loader.start(0)
        assert "in __init__" in told[0]


def test_a_loop_that_is_away_for_long_is_no_stall() -> None:
    with make_loader(datasets.Counting, timeout=1.5) as loader:
        iterator = iter(loader)
        next(iterator)
        time.sleep(2)
        assert len(ids_of(iterator)) == 92


@pytest.mark.slow
def test_a_slow_worker_with_a_queue_is_no_stall_as_long_as_each_batch_is_in_time() -> None:
    kwargs: dict[str, Any] = {"num_samples": 6, "seconds": 0.5}
    with make_loader(datasets.Slow, kwargs=kwargs, workers=1, batch_size=1, timeout=2, validate=False) as loader:
        assert sorted(ids_of(loader)) == list(range(6))


def test_a_warning_that_is_made_an_error_loses_nothing(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"folder": str(tmp_path), "deed": "SIGKILL"}
    with (
        make_loader(datasets.FailsOnce, kwargs=kwargs, shuffle=False, batch_size=4) as loader,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", SwiftLoaderWarning)
        iterator = iter(loader)
        got: list[int] = []
        with pytest.raises(SwiftLoaderWarning):
            got.extend(number for batch in iterator for number in batch["id"].tolist())
        state = loader.state_dict()
    assert got == list(range(len(got)))
    assert state["position"] == len(got)


def test_a_loader_can_be_closed_while_workers_are_being_replaced() -> None:
    class DiesAtOnce(datasets.Counting):
        def __getitem__(self, index: int) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(5):
        loader = make_loader(DiesAtOnce, worker_restarts=1000, validate=False, workers=3)
        loader.start(0)
        loader.close()
        assert not loader_processes()


def test_looking_at_a_worker_that_is_slow_does_not_interrupt_its_system_calls() -> None:
    """C code that waits, and isn't prepared for a signal, fails; it isn't Python's own, which would wait again."""

    class Polls(datasets.Counting):
        def __getitem__(self, index: int) -> Any:
            import ctypes

            if index == 5 and ctypes.CDLL(None, use_errno=True).poll(None, 0, 1000):
                raise OSError(ctypes.get_errno(), "poll was interrupted")
            return index

    with (
        make_loader(Polls, shuffle=False, stall_warning=0.4, validate=False) as loader,
        pytest.warns(SwiftLoaderWarning, match="at dataset index 5") as told,
    ):
        assert [int(number) for batch in loader for number in batch] == list(range(100))
    assert any("in __getitem__" in str(warning.message) for warning in told)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
@needs_template
def test_a_spawned_worker_that_is_killed_late_is_told_of_with_its_signal() -> None:
    with make_loader(datasets.Counting, start_method="spawn", worker_restarts=0) as loader:
        iterator = iter(loader)
        next(iterator)
        time.sleep(0.7)  # longer than anyone waits for an exit status
        for worker in loader_children():
            worker.kill()
        with pytest.raises(WorkerDied, match="was ended by SIGKILL"):
            list(iterator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_workers_that_build_their_own_datasets_may_take_longer_than_a_batch() -> None:
    class SlowToBuild(datasets.Counting):
        def __init__(self) -> None:
            super().__init__()
            time.sleep(2.5)

    with make_loader(SlowToBuild, dataset_per_worker=True, timeout=1.5) as loader:
        assert sorted(ids_of(loader)) == list(range(100))
        assert loader.report()["worker_restarts"] == 0


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_what_a_dead_worker_said_of_its_samples_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FailsAtFirst(datasets.FailsOnce):
        def __getitem__(self, index: int) -> Any:
            try:
                self.marker.touch(exist_ok=index != self.at)
            except FileExistsError:
                return {"id": index}
            if index == self.at:
                raise datasets.CustomError("for once")
            return {"id": index}

    marker = tmp_path / "killed"
    set_faults(monkeypatch, f"worker.after-commit=SIGKILL,hit=2,once={marker}")
    kwargs = {"folder": str(tmp_path / "none"), "deed": "", "at": 5}
    options: dict[str, Any] = {"workers": 1, "on_error": "skip"}
    with make_loader(FailsAtFirst, kwargs=kwargs, shuffle=False, batch_size=4, validate=False, **options) as loader:
        (tmp_path / "none").mkdir()
        ids = []
        for batch in loader:
            ids += batch["id"].tolist()
            assert loader.batch_indices.tolist() == batch["id"].tolist()
        assert marker.exists()
        assert ids == list(range(80))
        assert loader.failures == []


STOPPED = """
import os, signal, subprocess, sys, time, warnings
import psutil
from tests.support import datasets
from tests.support.helpers import ids_of, make_loader

warnings.simplefilter("error")

def stop_me_for(seconds, others):
    numbers = " ".join(map(str, [os.getpid(), *others]))
    script = f"sleep 0.1; kill -STOP {numbers}; sleep {seconds}; kill -CONT {numbers}"
    return subprocess.Popen(["/bin/sh", "-c", script])

options = dict(kwargs={"num_samples": 24, "seconds": 0.05}, batch_size=4, shuffle=False, validate=False)
with make_loader(datasets.Slow, timeout=2.0, stall_warning=None, worker_restarts=0, **options) as loader:
    loader.start(0)
    family = [child.pid for child in psutil.Process().children(recursive=True)]
    cases = [(family, 1), ([], 1), (family, 5), ([], 5)][:int(sys.argv[1])]
    for others, batches in cases:
        got, iterator = [], iter(loader)
        for _ in range(batches):
            got += next(iterator)["id"].tolist()
        stopper = stop_me_for(3.0, others)
        got += ids_of(iterator)
        assert got == list(range(24)), got
        while stopper.poll() is None:
            list(loader)
        assert stopper.wait() == 0
    assert loader.report()["worker_restarts"] == 0
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_cases", ["1", exhaustive("4")])
def test_a_stop_of_the_trainer_or_of_all_is_no_stall(num_cases: str, tmp_path: Path) -> None:
    assert run_script(STOPPED, num_cases, via="-c", folder=tmp_path) == "right\n"


@needs_template
def test_a_process_that_takes_too_long_for_the_first_samples_is_reaped(tmp_path: Path) -> None:
    marker = tmp_path / "pids"
    with make_loader(datasets.SlowAtFirst, kwargs={"marker": str(marker)}) as loader:
        next(iter(loader))
        first = int(marker.read_text().split()[0])  # the one that looks at samples while the loader starts
        wait_until(lambda: not psutil.pid_exists(first), "it is reaped")
