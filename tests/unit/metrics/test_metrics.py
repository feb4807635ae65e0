from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.metrics.metrics import NOT_NOTED, Metrics
from swift_loader.metrics.observations import CAPACITY, Setup
from swift_loader.scheduler.actions import Send
from swift_loader.scheduler.work import PlannedWork
from swift_loader.transport.messages import Batch

SETUP = Setup(1, 10, True, True, 4, "process", 2.0, 1, False)


def batch_of(
    fetch_ns: int, collate_ns: int, encode_ns: int, num_samples: int = 4, slow: tuple[int, int] = (0, 0)
) -> Batch:
    return Batch(1, 0, 0, 0, b"", 0, 0, num_samples, fetch_ns, collate_ns, encode_ns, 64, 1100, 9, -1, *slow)


def task_of(epoch: int = 0, step: int = 0) -> Send:
    return Send(0, 1, step, PlannedWork(epoch, step), sent_s=1e-6)


def deliver(metrics: Metrics, step: int = 0, asked_ns: int = 0, wait_ns: int = 50) -> int:
    """Let a batch arrive, and the loop get it."""
    arrival = metrics.note_arrival(batch_of(10, 20, 30), task_of(step=step), 0, 2000, 40)
    metrics.note_asked(asked_ns)
    return metrics.note_delivery(arrival, asked_ns, asked_ns + wait_ns, num_ready=3)


def test_a_report_counts_batches_samples_and_stages() -> None:
    metrics = Metrics(enabled=True)
    deliver(metrics)
    metrics.note_arrival(batch_of(10, 20, 30), task_of(), 0, 2000, 40)
    report = metrics.report()
    assert report["batches_built"] == 2
    assert report["batches_delivered"] == 1
    assert report["samples_built"] == 8
    assert report["mean_batches_ready"] == 3
    totals = {name: round(stage["total_s"] * 1e9) for name, stage in report["stages"].items()}
    assert totals == {"fetch": 10, "collate": 20, "encode": 30, "decode": 40, "wait": 50}


def test_metrics_that_are_off_measure_nothing() -> None:
    metrics = Metrics(enabled=False)
    assert deliver(metrics) == NOT_NOTED
    assert metrics.report() == {}
    observed = metrics.observations(SETUP)
    assert (len(observed.batches), observed.num_delivered, observed.elapsed_s, observed.slowest) == (0, 0, 0, ())


def test_a_row_has_what_was_measured_on_both_sides() -> None:
    metrics = Metrics(enabled=True)
    arrival = metrics.note_arrival(batch_of(10, 20, 30), task_of(3, 5), 1, 2000, 40)
    metrics.note_asked(100)
    number = metrics.note_delivery(arrival, 100, 2100, num_ready=2)
    metrics.note_copy(number, 77)
    (row,) = metrics.observations(SETUP).batches
    assert dict(zip(row.dtype.names, row.item(), strict=True)) == {
        "epoch": 3,
        "step": 5,
        "worker_id": 1,
        "num_samples": 4,
        "nbytes": 64,
        "sent_ns": pytest.approx(1000 + metrics._clock_offset_ns),
        "began_ns": 1100,
        "fetch_ns": 10,
        "collate_ns": 20,
        "encode_ns": 30,
        "cpu_ns": 9,
        "run_delay_ns": -1,
        "received_ns": 2000,
        "decode_ns": 40,
        "asked_ns": 100,
        "delivered_ns": 2100,
        "num_ready": 2,
        "pass_number": 1,
        "copy_ns": 77,
    }


@given(fates=st.lists(st.booleans(), max_size=60), seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_each_delivered_batch_has_its_own_arrival_whatever_is_dropped(fates: list[bool], seed: int) -> None:
    metrics = Metrics(enabled=True)
    arrived = {
        step: metrics.note_arrival(batch_of(1000 + step, 0, 0), task_of(step=step), 0, 0, 0)
        for step in random.Random(seed).sample(range(len(fates)), len(fates))
    }
    for step, is_delivered in enumerate(fates):
        if is_delivered:
            metrics.note_asked(step)
            metrics.note_delivery(arrived[step], step, step + 1, 0)
    observed = metrics.observations(SETUP)
    kept = [step for step, is_delivered in enumerate(fates) if is_delivered]
    assert observed.batches["step"].tolist() == kept
    assert observed.batches["fetch_ns"].tolist() == [1000 + step for step in kept]
    assert observed.num_delivered == len(kept)


def test_a_wait_that_gave_no_batch_counts_as_waiting_alone() -> None:
    metrics = Metrics(enabled=True)
    deliver(metrics, wait_ns=1_000_000)
    metrics.note_delivery(None, 2_000_000, 5_000_000, 0)
    observed = metrics.observations(SETUP)
    assert (observed.num_delivered, observed.waited_s, observed.elapsed_s) == (1, 0.004, 0.005)


def test_totals_hold_more_batches_than_the_timeline() -> None:
    metrics = Metrics(enabled=True)
    for step in range(CAPACITY + 500):
        deliver(metrics, step, asked_ns=100 * step)
    observed = metrics.observations(SETUP)
    assert len(observed.batches) == CAPACITY
    assert observed.num_delivered == CAPACITY + 500
    assert observed.num_samples == 4 * (CAPACITY + 500)
    assert observed.totals["fetch"]["total_s"] == pytest.approx(10e-9 * (CAPACITY + 500))
    assert observed.waited_s == pytest.approx(50e-9 * (CAPACITY + 500))


@pytest.mark.processes
def test_nothing_is_lost_between_threads() -> None:
    metrics = Metrics(enabled=True)

    def note_many() -> None:
        for step in range(500):
            metrics.note_arrival(batch_of(1, 1, 1, slow=(step, step)), task_of(step=step), 0, 0, 1)

    threads = [threading.Thread(target=note_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        metrics.report()
    for thread in threads:
        thread.join()
    report = metrics.report()
    assert (report["batches_built"], report["samples_built"]) == (2000, 8000)
