"""What tests of `resize` need: datasets that wait, the workers that a loader has, and another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swift_loader import SwiftLoader
from swift_loader.executors.executor import WorkerExecutor
from swift_loader.executors.threads import ThreadExecutor
from swift_loader.scheduler.queues import WorkerState
from tests.support.datasets import Counting
from tests.support.helpers import wait_until


class NeedsAnother(Counting):
    """The first sample comes once another worker has built the last one of the third batch of four."""

    def __init__(self, num_samples: int = 40, *, marker: str) -> None:
        super().__init__(num_samples)
        self.marker = Path(marker)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 0:
            wait_until(self.marker.exists, "a batch of another worker", 40)
        if index == 11:
            self.marker.touch()
        return super().__getitem__(index)


class WaitsToBuild(Counting):
    """Building it takes as long as there is a file."""

    def __init__(self, num_samples: int = 100, *, marker: str) -> None:
        super().__init__(num_samples)
        wait_until(lambda: not Path(marker).exists(), "the end of the file", 40)


def workers_of(loader: SwiftLoader) -> list[Any]:
    """Return the executor's handles on all workers that exist."""
    assert loader._session is not None
    executor = loader._session.engine._executor
    if isinstance(executor, ThreadExecutor):
        return list(executor._workers.values())
    assert isinstance(executor, WorkerExecutor)
    return list(executor.fleet.workers.values())


def num_ready(loader: SwiftLoader) -> int:
    assert loader._session is not None
    workers = list(loader._session.engine._scheduler.ledger.workers)
    return sum(worker.state is WorkerState.READY for worker in workers)


def await_workers(loader: SwiftLoader, number: int) -> None:
    """Wait until so many workers take tasks, and no others exist."""
    wait_until(lambda: num_ready(loader) == len(workers_of(loader)) == number, f"{number} workers")
    assert sorted(worker.worker_id for worker in workers_of(loader)) == list(range(number))


@contextmanager
def calling(function: Callable[[], object], every_s: float) -> Iterator[None]:
    """Call a function again and again on another thread."""
    stop, errors = threading.Event(), []

    def run() -> None:
        try:
            while not stop.wait(every_s):
                function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert errors == []
