from __future__ import annotations

from dataclasses import replace

from swift_loader.metrics.observations import Observations
from swift_loader.report.notice import EpochNotices
from tests.support.observed import SETUP, Costs, observe

SLOW = Costs(fetch_ms=10, step_ms=3.5, cpu_share=0.02)


def of_epoch(costs: Costs, epoch: int = 0, elapsed_s: float = 90.0) -> Observations:
    observations = observe(costs)
    observations.batches["epoch"] = epoch
    return replace(observations, elapsed_s=elapsed_s)


def test_an_epoch_that_waited_gets_a_line_with_the_option_and_its_gain() -> None:
    line = EpochNotices().note(of_epoch(SLOW, epoch=3))
    assert line == "the loop waited 30 % of epoch 3 for data: worker_per_consumer=3 would bring about +43 %"


def test_the_same_advice_is_given_once() -> None:
    notices = EpochNotices()
    assert notices.note(of_epoch(SLOW))
    assert notices.note(of_epoch(SLOW, 1, elapsed_s=1000)) == ""


def test_other_advice_is_given_again() -> None:
    notices = EpochNotices()
    assert notices.note(of_epoch(SLOW))
    slower = replace(SLOW, fetch_ms=30)
    assert "worker_per_consumer=9" in notices.note(of_epoch(slower, 1, elapsed_s=1000))


def test_an_epoch_that_did_not_wait_is_not_spoken_of() -> None:
    assert EpochNotices().note(of_epoch(Costs(fetch_ms=10, step_ms=6))) == ""


def test_a_wait_that_no_change_helps_is_not_spoken_of() -> None:
    observations = of_epoch(Costs(fetch_ms=0, collate_ms=10, step_ms=3, cpu_share=1))
    crowded = replace(observations, setup=replace(SETUP, num_cores=1.0))
    assert EpochNotices().note(crowded) == ""


def test_short_runs_are_not_spoken_of() -> None:
    assert EpochNotices().note(of_epoch(SLOW, elapsed_s=50)) == ""


def test_the_next_look_is_after_twice_the_time() -> None:
    notices = EpochNotices()
    notices.note(of_epoch(SLOW, elapsed_s=90))
    assert [notices.is_due(elapsed_s) for elapsed_s in (179.0, 180.0)] == [False, True]


def test_a_loop_that_does_not_wait_is_looked_at_each_second() -> None:
    notices = EpochNotices()
    notices.note(of_epoch(Costs(step_ms=20), elapsed_s=90))
    assert [notices.is_due(elapsed_s) for elapsed_s in (90.5, 91.0)] == [False, True]
