"""What an executor leaves behind."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from swift_loader.errors import LoaderClosed
from swift_loader.executors.process.executor import ProcessExecutor
from swift_loader.executors.wording import LOADER_WORDING
from swift_loader.metrics.metrics import Metrics
from swift_loader.sampling.plan import PlanSettings, Uneven
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.transport.by_value import Definitions

ORDER = OrderSettings.of(seed=0, shuffle=False, window=None, batch_size=2)
PLAN = PlanSettings(order=ORDER, batch_size=2, world_size=1, rank=0, uneven=Uneven.PAD, drop_last=False)


class ClosedSupervisor:
    """Another thread closes the executor once the dataset is built."""

    wording = LOADER_WORDING

    def __init__(self) -> None:
        self.spec = SimpleNamespace(plan=PLAN, options=SimpleNamespace(torch=None))
        self.options = SimpleNamespace(stall_warning_s=None, num_workers=3, thread_per_worker=True, batch_decoder=None)
        self.templates = SimpleNamespace(first=None, description="", definitions=Definitions(), datasets=None)
        self.executor: ProcessExecutor | None = None

    def wait_built(self, *_: object) -> tuple[int, float]:
        assert self.executor is not None
        self.executor.close()
        return 10, 0.1

    def start_workers(self, inboxes: object) -> None:
        raise LoaderClosed("the loader was closed")

    def stop(self) -> None:
        """Do nothing."""

    def close_processes(self) -> list[Any]:
        return []


def test_a_start_that_ends_after_the_executor_was_closed_leaves_no_descriptors() -> None:
    supervisor: Any = ClosedSupervisor()
    supervisor.executor = executor = ProcessExecutor(supervisor, Metrics(enabled=False), lambda line: None)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(LoaderClosed):
        executor.start()
    executor.stop()
    assert set(os.listdir("/proc/self/fd")) <= before
