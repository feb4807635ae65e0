"""What a portable executor leaves behind."""

from __future__ import annotations

import os
from typing import Any

import pytest

from swift_loader.errors import LoaderClosed
from swift_loader.executors.portable.executor import PortableExecutor
from swift_loader.executors.portable.supervisor import PortableSupervisor
from swift_loader.metrics.metrics import Metrics
from tests.support import datasets
from tests.support.helpers import make_loader
from tests.support.specs import spec_of


def test_a_start_that_ends_after_the_executor_was_closed_leaves_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(dataset_class=datasets.Counting)
    supervisor = PortableSupervisor(spec, make_loader(datasets.Counting)._options.delivery)
    executor = PortableExecutor(supervisor, Metrics(enabled=False), lambda line: None)
    wait = supervisor.wait_first_build

    def wait_and_close(*args: Any) -> Any:
        built = wait(*args)
        executor.stop()
        executor.close()
        return built

    monkeypatch.setattr(supervisor, "wait_first_build", wait_and_close)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(LoaderClosed):
        executor.start()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_supervisor_that_was_closed_before_it_began_starts_nothing() -> None:
    spec = spec_of(dataset_class=datasets.Counting)
    supervisor = PortableSupervisor(spec, make_loader(datasets.Counting)._options.delivery)
    assert not supervisor.is_current()
    supervisor.close()
    supervisor.close()
    with pytest.raises(LoaderClosed):
        supervisor.start_first()
    assert repr(supervisor) == "<PortableSupervisor closed, 0 workers>"
