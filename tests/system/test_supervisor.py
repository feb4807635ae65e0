"""The supervisor of processes, by itself."""

from __future__ import annotations

import pytest

from swift_loader import LoaderClosed, SwiftLoader
from swift_loader.executors.process.fleet import TemplateFleet
from swift_loader.executors.process.starter import Starter
from tests.support import datasets
from tests.support.helpers import make_loader


def supervisor_of(loader: SwiftLoader) -> TemplateFleet:
    preparation = loader._lifecycle.preparation
    supervisor = preparation._make_supervisor(loader._lifecycle.plan_settings())
    assert isinstance(supervisor, TemplateFleet)
    return supervisor


def test_a_supervisor_that_was_closed_before_it_began_keeps_nothing() -> None:
    loader = make_loader(datasets.Counting)
    supervisor = supervisor_of(loader)
    supervisor.close()
    with pytest.raises(LoaderClosed):
        supervisor.start_first()


def test_a_supervisor_whose_thread_has_failed_says_so_instead_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Starter) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Starter, "look_after", fail)
    loader = make_loader(datasets.Counting)
    supervisor = supervisor_of(loader)
    try:
        with pytest.raises(ZeroDivisionError, match="planted"):
            start_it_often(supervisor)
    finally:
        supervisor.close()


def start_it_often(supervisor: TemplateFleet) -> None:
    for _ in range(3):
        supervisor.wait_built()
        supervisor.starter.call(lambda: None).result()
