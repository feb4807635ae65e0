from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.report.advice import DATALOADER, advise
from swift_loader.report.prediction import Change, Data
from tests.support.observed import SETUP, Costs, observe, with_workers

IO = 0.02


def actions_of(costs: Costs, num_workers: int = 2, **setup: object) -> list[str]:
    changed = replace(with_workers(num_workers), **setup)  # type: ignore[arg-type]
    return [advice.action for advice in advise(observe(costs, changed))]


@given(fetch_ms=st.floats(0.5, 10), num_workers=st.integers(1, 4))
@settings(max_examples=10, deadline=None)
def test_a_loop_that_does_not_wait_gets_no_advice(fetch_ms: float, num_workers: int) -> None:
    assert actions_of(Costs(fetch_ms=fetch_ms, step_ms=1.2 * fetch_ms), num_workers) == []


def test_too_few_batches_give_no_advice() -> None:
    assert advise(observe(Costs(), SETUP, num_batches=10)) == ()


def test_io_needs_as_many_workers_as_keep_the_loop_fed() -> None:
    assert actions_of(Costs(fetch_ms=10, step_ms=2, cpu_share=IO))[0] == "worker_per_consumer=5"


def test_no_more_workers_are_advised_than_there_are_cores_for() -> None:
    actions = actions_of(Costs(fetch_ms=10, step_ms=0.1, cpu_share=1), 1, num_cores=3.0)
    assert actions[0] == "worker_per_consumer=3"


def test_with_all_cores_busy_only_the_dataset_can_help() -> None:
    actions = actions_of(Costs(fetch_ms=9, collate_ms=1, step_ms=0.1, cpu_share=1), 4, num_cores=4.0)
    assert actions == ["a cache of samples, so that fetching costs nothing"]


def test_the_first_advice_brings_most() -> None:
    advices = advise(
        observe(Costs(fetch_ms=[5.0] * 15 + [150.0] + [5.0] * 4, step_ms=3, cpu_share=IO), with_workers(4))
    )
    options = [advice.prediction.gain for advice in advices if advice.change.data is Data.AS_IS]
    assert options == sorted(options, reverse=True)


def test_a_limit_that_keeps_workers_idle_is_raised_with_them() -> None:
    setup = replace(with_workers(2), max_in_flight=2, is_in_flight_chosen=False)
    advice = advise(observe(Costs(fetch_ms=10, step_ms=2, cpu_share=IO), setup))[0]
    assert advice.change == Change(num_workers=5, max_in_flight=15)
    assert advice.action == "worker_per_consumer=5 and data_queue_size=15"


def test_options_are_called_as_the_class_calls_them() -> None:
    setup = replace(with_workers(2), max_in_flight=2, is_in_flight_chosen=False)
    advice = advise(observe(Costs(fetch_ms=10, step_ms=2, cpu_share=IO), setup), DATALOADER)[0]
    assert advice.action == "num_workers=5 and prefetch_factor=3"


def test_batches_in_the_loops_thread_get_workers() -> None:
    assert actions_of(Costs(fetch_ms=10, step_ms=12, cpu_share=IO), 0)[0] == "worker_per_consumer=1"


def test_advice_reads_as_a_sentence_with_its_gain() -> None:
    advice = advise(observe(Costs(fetch_ms=10, step_ms=2, cpu_share=IO)))[0]
    assert str(advice).startswith("worker_per_consumer=5: about +1")
    assert advice.prediction.gain == pytest.approx(1.5, abs=0.06)
