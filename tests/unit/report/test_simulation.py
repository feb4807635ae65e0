from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.report.simulation import Loader, simulate
from swift_loader.report.workload import Workload


def workload_of(
    waiting: list[float] | float = 0.0, cpu: list[float] | float = 0.0, step: float = 0.0, cores: float = 4.0
) -> Workload:
    waits, cpus = (np.atleast_1d(np.asarray(values, np.float64)) for values in (waiting, cpu))
    waits, cpus = (values.copy() for values in np.broadcast_arrays(waits, cpus))
    zeros = np.zeros(len(waits))
    return Workload(
        waiting=waits,
        cpu=cpus,
        fetch_share=np.ones(len(waits)),
        lag=0.0,
        transport=0.0,
        round_trip=False,
        decode=zeros,
        pickup=zeros,
        pickup_ready=zeros,
        step_waiting=np.array([step]),
        step_cpu=np.zeros(1),
        aside_cpu=0.0,
        cores=cores,
        interference=1.0,
        slowdown=0.0,
        is_slowdown_known=True,
        samples_per_batch=32.0,
    )


def loader_of(num_workers: int, *, in_order: bool = True, max_in_flight: int | None = None) -> Loader:
    limit = max(10, (3 if in_order else 2) * num_workers) if max_in_flight is None else max_in_flight
    return Loader(num_workers, limit, in_order)


times = st.floats(0.001, 0.1)


@given(service=times, step=times, num_workers=st.integers(1, 9))
@settings(max_examples=20, deadline=None)
def test_the_rate_of_io_is_the_workers_or_the_loops(service: float, step: float, num_workers: int) -> None:
    outcome = simulate(workload_of(service, step=step), loader_of(num_workers), num_batches=200)
    assert outcome.batches_per_s == pytest.approx(min(num_workers / service, 1 / step), rel=0.06)


@given(cpu=times, num_workers=st.integers(1, 9), cores=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_the_rate_of_cpu_work_is_limited_by_the_cores(cpu: float, num_workers: int, cores: int) -> None:
    outcome = simulate(workload_of(cpu=cpu, cores=cores), loader_of(num_workers), num_batches=200)
    assert outcome.batches_per_s == pytest.approx(min(num_workers, cores) / cpu, rel=0.06)


@given(
    waiting=st.lists(times, min_size=1, max_size=20),
    step=times,
    num_workers=st.integers(1, 12),
    max_in_flight=st.integers(1, 20),
    in_order=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_each_batch_is_built_and_delivered_once(
    waiting: list[float], step: float, num_workers: int, max_in_flight: int, in_order: bool
) -> None:
    loader = loader_of(num_workers, in_order=in_order, max_in_flight=max_in_flight)
    outcome = simulate(workload_of(waiting, cpu=0.001, step=step), loader, num_batches=120)
    assert outcome.num_delivered == 120
    assert 0 <= outcome.num_built - outcome.num_delivered <= max_in_flight


@given(waiting=st.lists(times, min_size=1, max_size=30), step=times, num_workers=st.integers(1, 12))
@settings(max_examples=20, deadline=None)
def test_another_worker_never_slows_io_down(waiting: list[float], step: float, num_workers: int) -> None:
    workload = workload_of(waiting, step=step)
    fewer, more = (simulate(workload, loader_of(number)).batches_per_s for number in (num_workers, num_workers + 1))
    assert more >= fewer * 0.97


@given(waiting=st.lists(times, min_size=1, max_size=30), num_workers=st.integers(1, 12), limit=st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_in_order_is_never_faster_than_completion_order(waiting: list[float], num_workers: int, limit: int) -> None:
    workload = workload_of(waiting, step=0.002)
    in_order, completion = (
        simulate(workload, loader_of(num_workers, in_order=order, max_in_flight=limit)).batches_per_s
        for order in (True, False)
    )
    assert in_order <= completion * 1.03


def test_a_loop_that_is_slower_than_the_workers_does_not_wait() -> None:
    outcome = simulate(workload_of(0.01, step=0.05), loader_of(2))
    assert outcome.wait_share < 0.01


def test_a_loop_that_does_nothing_waits_all_the_time() -> None:
    assert simulate(workload_of(0.01), loader_of(2)).wait_share == pytest.approx(1)


def test_one_batch_in_flight_means_that_only_one_worker_works() -> None:
    outcome = simulate(workload_of(0.01), loader_of(4, max_in_flight=1))
    assert outcome.batches_per_s == pytest.approx(100, rel=0.02)


def test_without_workers_batches_and_steps_take_turns() -> None:
    outcome = simulate(workload_of(0.01, cpu=0.01, step=0.02), loader_of(0, max_in_flight=1))
    assert outcome.batches_per_s == pytest.approx(25)
    assert outcome.wait_share == pytest.approx(0.5)


def test_decoding_is_done_one_batch_at_a_time() -> None:
    workload = replace(workload_of(0.001), decode=np.array([0.01]))
    assert simulate(workload, loader_of(8)).batches_per_s == pytest.approx(100, rel=0.02)


def test_the_trainer_takes_its_cpu_time_from_the_workers() -> None:
    workload = replace(workload_of(cpu=0.01, cores=1.0), aside_cpu=0.01)
    assert simulate(workload, loader_of(2)).batches_per_s == pytest.approx(50, rel=0.05)


def test_a_round_trip_to_the_trainer_costs_each_worker_its_time() -> None:
    workload = replace(workload_of(0.01), transport=0.01, round_trip=True)
    assert simulate(workload, loader_of(2)).batches_per_s == pytest.approx(100, rel=0.05)


def test_the_same_seed_gives_the_same_outcome_and_another_one_nearly() -> None:
    workload = workload_of(list(np.linspace(0.001, 0.05, 60)), step=0.003)
    first, again, other = (simulate(workload, loader_of(4), seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert other.batches_per_s == pytest.approx(first.batches_per_s, rel=0.05)


def test_a_simulation_is_fast() -> None:
    workload = workload_of(list(np.linspace(0.001, 0.05, 60)), cpu=0.01, step=0.003)
    simulate(workload, loader_of(8))
    began = time.process_time()
    simulate(workload, loader_of(8))
    assert time.process_time() - began < 0.2
