"""The report of running loaders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from loguru import logger

from swift_loader import DataLoader
from swift_loader.metrics.metrics import Metrics
from swift_loader.report.report import Bound, Report
from tests.support import datasets
from tests.support.helpers import exhaustive, make_loader

SLOW: dict[str, Any] = {"num_samples": 320, "seconds": 0.002}
"""8 samples take 16 ms: a loop that does nothing waits for each batch."""


def slow_samples() -> Any:
    """The dataset of a DataLoader."""
    return datasets.Slow(**SLOW)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), level="INFO", format="{message}")
    logger.enable("swift_loader")
    yield lines
    logger.disable("swift_loader")
    logger.remove(sink)


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advise even while other programs keep the cores of the machine busy."""
    monkeypatch.setattr("swift_loader.report.report._BUSY", 1.0)


@pytest.fixture
def _long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each run count as one of a minute, after which advice is due."""
    monkeypatch.setattr(Metrics, "elapsed_s", property(lambda metrics: 60.0))


def check_data_bound(report: Report, num_workers: int) -> None:
    assert report.verdict.bound is Bound.DATA
    assert report.observations is not None
    assert report.observations.setup.num_workers == num_workers
    parts = {part.name: part for part in report.breakdown.parts}
    assert parts["fetch"].p50_s >= 0.016
    assert report.advice
    assert json.loads(report.to_json())["advice"][0]["gain"] > 0
    assert repr(report).startswith("data-bound")


def test_a_loader_reports_why_its_loop_waits() -> None:
    with make_loader(datasets.Slow, kwargs=SLOW) as loader:
        assert loader.report() == {}
        list(loader)
        report = loader.report()
    check_data_bound(report, 2)
    assert report.advice[0].action.startswith("worker_per_consumer=")
    assert report["batches_delivered"] == 40
    assert report["stages"]["fetch"]["p50_ms"] >= 16
    assert report.observations is not None
    assert report["stages"]["fetch"]["total_s"] == pytest.approx(report.observations.batches["fetch_ns"].sum() / 1e9)


@pytest.mark.parametrize("worker_type", ["process", exhaustive("thread")])
def test_a_dataloader_reports_why_its_loop_waits(worker_type: Any) -> None:
    loader = DataLoader(slow_samples(), batch_size=8, num_workers=2, worker_type=worker_type)
    list(loader)
    report = loader.report()
    check_data_bound(report, 2)
    assert report.advice[0].action.startswith("num_workers=")
    assert report["batches_delivered"] == 40


def test_batches_of_the_loops_thread_are_data_bound() -> None:
    loader = DataLoader(slow_samples(), batch_size=8)
    list(loader)
    report = loader.report()
    assert report.verdict.bound is Bound.DATA
    assert report.advice[0].action.startswith("num_workers=")


def test_a_report_stays_as_it_was() -> None:
    with make_loader(datasets.Counting) as loader:
        list(loader)
        before = loader.report()
        list(loader)
        after = loader.report()
    assert (before["batches_delivered"], after["batches_delivered"]) == (13, 26)
    assert before.observations is not None
    assert len(before.observations.batches) == 13


@pytest.mark.usefixtures("_long_run")
def test_an_epoch_that_waited_is_followed_by_one_line(logged: list[str]) -> None:
    with make_loader(datasets.Slow, kwargs=SLOW) as loader:
        list(loader)
        list(loader)
    assert len(logged) == 1
    assert logged[0].startswith("the loop waited ")
    assert " % of epoch 0 for data: worker_per_consumer=" in logged[0]


@pytest.mark.usefixtures("_long_run")
def test_a_dataloader_says_it_too(logged: list[str]) -> None:
    list(DataLoader(slow_samples(), batch_size=8, num_workers=2))
    assert len(logged) == 1
    assert "num_workers=" in logged[0]


@pytest.mark.usefixtures("_long_run")
def test_a_loader_that_chooses_its_workers_is_silent(logged: list[str]) -> None:
    with make_loader(datasets.Slow, kwargs=SLOW, workers="auto") as loader:
        list(loader)
    list(DataLoader(slow_samples(), batch_size=8, num_workers="auto"))
    assert logged == []


def test_a_short_run_is_silent(logged: list[str]) -> None:
    with make_loader(datasets.Slow, kwargs=SLOW) as loader:
        list(loader)
    assert logged == []


def test_without_measuring_there_is_an_empty_report() -> None:
    with make_loader(datasets.Counting, benchmark=False) as loader:
        list(loader)
        report = loader.report()
    assert not report
    assert report == {}
    assert report.observations is None
