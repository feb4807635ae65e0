"""The fleet of processes, by itself."""

from __future__ import annotations

import pytest

from swift_loader import SwiftLoader
from swift_loader.executors.process.fleet import TemplateFleet
from swift_loader.executors.process.server import Process
from tests.support import datasets
from tests.support.helpers import make_loader


def fleet_of(loader: SwiftLoader) -> TemplateFleet:
    fleet = loader._lifecycle._make_fleet(loader._lifecycle.plan_settings())
    assert isinstance(fleet, TemplateFleet)
    return fleet


class Interrupted(Exception):
    """Of a signal handler."""


def test_an_interrupted_stop_kills_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Process) -> None:
        raise Interrupted

    loader = make_loader(datasets.Counting)
    fleet = fleet_of(loader)
    try:
        fleet.wait_built()
        template = fleet.starter.template
        assert template is not None
        monkeypatch.setattr(Process, "request_exit", interrupt)
        with pytest.raises(Interrupted):
            fleet.close()
        monkeypatch.undo()
        assert template.wait_end(30)
    finally:
        fleet.close()
