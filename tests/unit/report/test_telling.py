from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from loguru import logger

from swift_loader.metrics.observations import Observations
from swift_loader.report.advice import SWIFT_LOADER
from swift_loader.report.telling import Teller
from tests.support.observed import Costs, observe


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What loguru's users get to see, from INFO on."""
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), level="INFO", format="{message}")
    yield lines
    logger.remove(sink)


def slow() -> Observations:
    return replace(observe(Costs(fetch_ms=10, step_ms=3.5, cpu_share=0.02)), elapsed_s=90.0)


def test_a_line_goes_to_the_log_of_loguru_and_to_the_loaders_own(logged: list[str]) -> None:
    own: list[str] = []
    Teller(SWIFT_LOADER, own.append).tell(90.0, slow)
    assert len(logged) == len(own) == 1
    assert "worker_per_consumer=3" in logged[0]


def test_nobody_looks_at_a_short_run(logged: list[str]) -> None:
    def observe_nothing() -> Observations:
        raise AssertionError("looked")

    Teller(SWIFT_LOADER).tell(3.0, observe_nothing)
    assert logged == []


def test_an_error_in_the_advice_does_not_reach_the_loop(logged: list[str]) -> None:
    def fail() -> Observations:
        raise ZeroDivisionError

    Teller(SWIFT_LOADER).tell(90.0, fail)
    assert logged == []
