"""Promises about time, each once, on a machine with nothing else to do. The limits are three times what is promised."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from swift_loader import LoaderClosed, SwiftLoader, SwiftLoaderWarning, WorkerDied, WorkerStalled
from swift_loader.pipeline import Pipeline
from tests.support import datasets
from tests.support.helpers import loader_processes, make_loader, session_of, template_and_workers, wait_until
from tests.system.test_ctrl_c import CTRL_C, run_until, wait_for_stage, wait_for_the_end
from tests.system.test_parent_death import STATES, trainer, wait_for_state
from tests.system.test_pipeline_close import HangsInProcess

pytestmark = pytest.mark.alone

NOTICED_WITHIN_S = 3 * 1.0
GONE_WITHIN_S = 3 * 2.0
CLOSED_WITHIN_S = 3 * 5.0
INTERRUPTED_WITHIN_S = 3 * 2.0
STALL_WARNING_S = 1.0


@contextmanager
def at_most(limit_s: float) -> Iterator[None]:
    """Fail if what is done meanwhile takes longer."""
    began_s = time.monotonic()
    yield
    took_s = time.monotonic() - began_s
    assert took_s < limit_s, f"it took {took_s:.1f} s"


def take_one(loader: SwiftLoader | Pipeline) -> None:
    with pytest.raises(LoaderClosed):
        next(iter(loader))


@pytest.mark.parametrize("whom", ["worker", "template"])
def test_a_process_that_is_killed_is_noticed(whom: str) -> None:
    with make_loader(datasets.Slow, kwargs={"seconds": 3600}, validate=False, worker_restarts=0) as loader:
        loader.start(0)
        template, workers = template_and_workers()
        with at_most(NOTICED_WITHIN_S):
            (template if whom == "template" else workers[0]).kill()
            with pytest.raises(WorkerDied):
                next(iter(loader))


@pytest.mark.parametrize(("start_method", "state"), [("template", "idle"), ("template", "sending"), ("spawn", "idle")])
def test_the_processes_of_a_killed_trainer_are_gone(start_method: str, state: str, tmp_path: Path) -> None:
    with trainer(STATES[state], start_method, tmp_path) as process:
        wait_for_state(state, process, start_method)
        with at_most(GONE_WITHIN_S):
            process.kill()
            wait_until(lambda: not session_of(process.pid), "the end of its processes")


def test_a_worker_that_hangs_is_told(tmp_path: Path) -> None:
    marker = tmp_path / "hangs"
    kwargs = {"deed": "hang", "marker": str(marker), "at": 0}
    options: dict[str, Any] = {"stall_warning": STALL_WARNING_S, "timeout": 2 * STALL_WARNING_S, "worker_restarts": 0}
    with make_loader(datasets.Misbehaving, kwargs=kwargs, shuffle=False, validate=False, **options) as loader:
        loader.start(0)
        told = pytest.warns(SwiftLoaderWarning, match="has been at batch 0")
        with at_most(3 * options["timeout"]), told, pytest.raises(WorkerStalled):
            list(loader)


def test_a_loader_whose_processes_hang_is_closed(tmp_path: Path) -> None:
    """One worker holds the GIL; the other one and the template are stopped."""
    marker = tmp_path / "marker"
    kwargs = {"deed": "hold-the-interpreter", "marker": str(marker), "at": 0}
    loader = make_loader(datasets.Misbehaving, kwargs=kwargs, shuffle=False, validate=False)
    loader.start(0)
    iterator = iter(loader)
    wait_until(marker.exists, "a worker that hangs")
    for process in loader_processes():
        if process.pid != int(marker.read_text()):
            process.send_signal(signal.SIGSTOP)
    with at_most(CLOSED_WITHIN_S):
        loader.close()
    del iterator


def test_a_loader_is_closed_while_its_many_workers_are_being_started() -> None:
    loader = make_loader(datasets.Counting, workers=36)
    next(iter(loader))
    with at_most(CLOSED_WITHIN_S):
        loader.close()


class Hanging(datasets.Counting):
    """Waits at its first sample. Each of its instances in this process can be released."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waiting, self.may_go_on = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.is_waiting.set()
        self.may_go_on.wait()
        return super().__getitem__(index)


def test_a_loader_whose_threads_hang_is_closed() -> None:
    dataset = Hanging()
    loader = SwiftLoader(dataset=dataset, worker_per_consumer=2, worker_type="thread", batch_size=4)
    loop = threading.Thread(target=take_one, args=(loader,))
    loop.start()
    dataset.is_waiting.wait()
    with at_most(CLOSED_WITHIN_S):
        loader.close()
    dataset.may_go_on.set()
    loop.join()


def test_a_pipeline_whose_stages_hang_is_closed(tmp_path: Path) -> None:
    """All three together, not one after the other."""
    pipeline = Pipeline(range(40))
    for position in reversed(range(3)):  # the last stage hangs at the first item
        pipeline = pipeline.map(HangsInProcess(position, tmp_path), on="process")
    loop = threading.Thread(target=take_one, args=(pipeline,))
    loop.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 3, "all stages hang")
    with at_most(CLOSED_WITHIN_S):
        pipeline.close()
    loop.join()


@pytest.mark.parametrize("stage", ["start", "iteration", "close"])
def test_ctrl_c_ends_the_program(stage: str, tmp_path: Path) -> None:
    with run_until(stage, "template", tmp_path) as shell:
        wait_for_stage(stage, shell, tmp_path / "marker")
        with at_most(INTERRUPTED_WITHIN_S):
            shell.press(CTRL_C)
            wait_for_the_end(shell)
