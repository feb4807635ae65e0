"""All at once, at random: equal to the inline executor, or a typed error. See storm.py for longer runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.helpers import exhaustive
from tests.support.storm_case import Case, Deed, Event, Leg, Pass, draw_case
from tests.support.storm_run import Verdict, run_case

SEEDS = [
    ("arrays", 2),
    exhaustive("augments", 20),
    exhaustive("augments", 21),
    exhaustive("cached open", 43),
    exhaustive("draws in constructor", 100),
    exhaustive("environment", 125),
    exhaustive("environment", 127),
    exhaustive("grows", 142),
    ("kept open", 221),
    exhaustive("open by import", 242),
    exhaustive("opened late", 262),
    exhaustive("opened late", 266),
    exhaustive("relative, kept open", 300),
    ("relative, opened late", 327),
]
"""Loaders of all kinds, kills, forks, changes of the trainer, data that grow: about a second each."""

QUIET = Leg(
    workers=2,
    start_method="template",
    in_order=True,
    multithread=True,
    data_queue_size=3,
    dataset_per_worker=False,
    timeout_s=20.0,
    slow_s=0.0,
    worker_restarts=3,
    validate=True,
    starts_by_itself=False,
    closes_in_midst=False,
    hoard=400,
    passes=(Pass(None, None, ()),),
)


def quiet_case(kind: str = "arrays", **changes: Any) -> Case:
    """Return a case in which nothing happens to one loader, but for what is given."""
    leg = replace(QUIET, **changes)
    return replace(
        draw_case(1, kind),
        num_samples=40,
        sizes="equal",
        in_bulk=False,
        as_instance=False,
        fails=(),
        batch_size=4,
        drop_last=False,
        num_consumers=1,
        ignores_sigchld=False,
        num_descriptors=0,
        closes_standard=False,
        legs=(leg,),
    )


def events(*deeds: Deed) -> tuple[Pass, ...]:
    """Return a pass in which these happen, one before each batch, from the third on."""
    return (Pass(None, None, tuple(Event(number, deed, number) for number, deed in enumerate(deeds, 2))),)


@pytest.mark.parametrize(("kind", "seed"), SEEDS)
def test_a_storm_ends_in_equal_bytes_or_a_typed_error(kind: str, seed: int) -> None:
    result = run_case(draw_case(seed, kind))
    assert result.verdict is not Verdict.DEVIATION, f"{result.case.describe()}\n{result.text}"


def test_kills_beyond_what_is_survived_are_refused_with_a_typed_error() -> None:
    case = quiet_case(worker_restarts=0, slow_s=0.01, workers=1, passes=events(Deed.KILL))
    result = run_case(case)
    assert result.verdict is Verdict.REFUSED, result.text
    assert result.text.startswith("WorkerDied")
