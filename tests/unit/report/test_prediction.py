from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.metrics.observations import Observations, SlowSample
from swift_loader.report.prediction import Change, Data, predict
from swift_loader.report.verdict import Verdict
from tests.support.observed import SETUP, Costs, observe, with_workers

IO = 0.02
"""CPU share of work that only waits."""


def rate_of(observations: Observations) -> float:
    """Batches per second in the last two thirds."""
    delivered = observations.batches["delivered_ns"]
    first = len(delivered) // 3
    return float((len(delivered) - first - 1) / (delivered[-1] - delivered[first]) * 1e9)


@given(
    fetch_ms=st.lists(st.floats(1, 40), min_size=1, max_size=25),
    step_ms=st.floats(0.5, 20),
    num_workers=st.integers(1, 8),
)
@settings(max_examples=15, deadline=None)
def test_no_change_is_what_was_observed(fetch_ms: list[float], step_ms: float, num_workers: int) -> None:
    observations = observe(Costs(fetch_ms=fetch_ms, step_ms=step_ms, cpu_share=IO), with_workers(num_workers))
    prediction = predict(observations, Change())
    assert prediction.gain == pytest.approx(0, abs=0.05)
    assert prediction.batches_per_s == pytest.approx(rate_of(observations), rel=0.08)
    assert prediction.wait_share == pytest.approx(Verdict.of(observations).wait_share, abs=0.08)


@given(
    fetch_ms=st.floats(2, 40),
    step_ms=st.floats(0.5, 20),
    num_workers=st.integers(1, 4),
    other=st.integers(1, 12),
)
@settings(max_examples=15, deadline=None)
def test_another_number_of_workers_is_as_fast_as_predicted(
    fetch_ms: float, step_ms: float, num_workers: int, other: int
) -> None:
    costs = Costs(fetch_ms=fetch_ms, step_ms=step_ms, cpu_share=IO)
    prediction = predict(observe(costs, with_workers(num_workers)), Change(num_workers=other))
    assert prediction.batches_per_s == pytest.approx(rate_of(observe(costs, with_workers(other))), rel=0.08)


def test_work_that_needs_cores_gains_no_more_than_there_are() -> None:
    setup = replace(with_workers(1), num_cores=2.0)
    prediction = predict(observe(Costs(step_ms=0.1, cpu_share=1), setup), Change(num_workers=8))
    assert prediction.gain == pytest.approx(1, abs=0.1)


def test_ranks_on_the_same_machine_share_its_cores() -> None:
    setup = replace(with_workers(1), num_cores=8.0, world_size_here=4)
    prediction = predict(observe(Costs(step_ms=0.1, cpu_share=1), setup), Change(num_workers=8))
    assert prediction.gain == pytest.approx(1, abs=0.1)


def test_the_trainers_own_cpu_time_is_taken_from_the_workers() -> None:
    setup = replace(with_workers(1), num_cores=2.0)
    costs = Costs(fetch_ms=10, step_ms=4, cpu_share=1, trainer_cpu_ms=4)
    prediction = predict(observe(costs, setup), Change(num_workers=4))
    assert prediction.gain == pytest.approx(2 / 1.4 - 1, abs=0.1)


def test_work_that_waited_for_a_core_has_no_waiting_left_without_competition() -> None:
    crowded = replace(with_workers(4), num_cores=2.0)
    observations = observe(Costs(fetch_ms=10, step_ms=0.1, cpu_share=0.5, delay_share=0.5), crowded)
    assert predict(observations, Change(num_workers=2)).gain == pytest.approx(0, abs=0.1)


def test_a_free_fetch_leaves_the_rest() -> None:
    observations = observe(Costs(fetch_ms=9, collate_ms=1, step_ms=0.1, cpu_share=0.1), with_workers(1))
    assert predict(observations, Change(data=Data.CACHED)).gain == pytest.approx(9, rel=0.15)


def test_free_data_leaves_the_loop() -> None:
    prediction = predict(observe(Costs(fetch_ms=10, step_ms=2, cpu_share=IO)), Change(data=Data.FREE))
    assert prediction.batches_per_s == pytest.approx(500)
    assert prediction.wait_share == 0


def test_mended_slow_samples_take_as_long_as_the_others() -> None:
    slowest = tuple(SlowSample(index, 0.2, 0) for index in range(15))
    observations = observe(
        Costs(fetch_ms=[10.0] * 19 + [210.0], step_ms=1, cpu_share=IO), with_workers(1), slowest=slowest
    )
    prediction = predict(observations, Change(data=Data.SLOWEST_FIXED))
    assert prediction.gain == pytest.approx(1, abs=0.15)


def test_larger_batches_bring_the_same_samples_where_nothing_is_fixed() -> None:
    observations = observe(Costs(fetch_ms=10, step_ms=1, cpu_share=IO))
    prediction = predict(observations, Change(batch_size=64))
    assert prediction.gain == pytest.approx(0, abs=0.05)
    assert prediction.samples_per_s == pytest.approx(64 * prediction.batches_per_s)


def test_an_unknown_slowdown_lowers_the_lower_end() -> None:
    prediction = predict(observe(Costs(step_ms=0.1, cpu_share=1), with_workers(1)), Change(num_workers=4))
    assert prediction.low < 0.6 * prediction.gain


def test_the_gain_lies_between_low_and_high() -> None:
    prediction = predict(observe(Costs(cpu_share=0.5)), Change(num_workers=3))
    assert prediction.low <= prediction.gain <= prediction.high


@pytest.mark.parametrize("change", [Change(num_workers=-1), Change(batch_size=0), Change(max_in_flight=0)])
def test_a_change_out_of_range_is_refused(change: Change) -> None:
    with pytest.raises(ValueError, match="can't be predicted; give an integer of at least"):
        predict(observe(Costs()), change)


def test_too_few_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="a prediction needs 16: run the loop longer"):
        predict(observe(Costs(), SETUP, num_batches=12), Change())


def test_a_prediction_takes_less_than_a_third_of_a_second() -> None:
    observations = observe(Costs(fetch_ms=[5.0, 9.0, 30.0], cpu_share=0.4), with_workers(6), num_batches=4096)
    began = time.process_time()
    predict(observations, Change(num_workers=12))
    assert time.process_time() - began < 0.6


def test_a_loop_is_never_said_to_lose_all_of_its_speed() -> None:
    # The trainer computes for longer than its steps take, so the simulation can't be as fast as what was observed.
    costs = Costs(fetch_ms=0.1, step_ms=1, cpu_share=1, delay_share=0.9, trainer_cpu_ms=5)
    prediction = predict(observe(costs, with_workers(4), num_batches=80), Change())
    assert -1 < prediction.low <= prediction.gain <= prediction.high
