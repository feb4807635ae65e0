from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from swift_loader.report.flat import NAMES, WINDOW, flat_metrics
from tests.support.simulated import Load, observed


@pytest.mark.parametrize("num_batches", [0, 1, 2, 1000])
def test_the_keys_are_always_the_same_and_the_values_floats(num_batches: int) -> None:
    metrics = flat_metrics(observed(num_batches=num_batches), prefix="")
    assert tuple(metrics) == NAMES
    assert all(type(value) is float for value in metrics.values())


def test_a_loader_that_has_not_started_has_the_same_keys() -> None:
    assert flat_metrics(None) == dict.fromkeys(flat_metrics(observed()), 0.0)


def test_each_key_begins_with_the_prefix() -> None:
    assert all(key.startswith("swift_loader/") for key in flat_metrics(observed()))
    assert all(key.startswith("val/loader/") for key in flat_metrics(observed(), prefix="val/loader/"))


def test_figures_without_a_batch_are_zero() -> None:
    metrics = flat_metrics(observed(num_batches=0), prefix="")
    assert {name for name, value in metrics.items() if value} == {"num_workers", "restarts_total"}


def test_rates_are_of_the_last_batches() -> None:
    observations = observed(num_batches=2000, step_ms=20.0, spread=0.0, steps_per_epoch=10_000)
    metrics = flat_metrics(observations, prefix="")
    assert metrics["batches_per_s"] == pytest.approx(50, rel=0.01)
    assert metrics["samples_per_s"] == pytest.approx(32 * metrics["batches_per_s"])
    assert metrics["batches_total"] == 2000
    early = observations.batches.copy()
    early["fetch_ns"][:-WINDOW] = 10**12
    assert flat_metrics(dataclasses.replace(observations, batches=early), prefix="") == metrics


def test_time_between_epochs_does_not_count() -> None:
    load = Load(num_batches=200, step_ms=20.0, spread=0.0, between_epochs_ms=5000.0)
    steady = flat_metrics(observed(dataclasses.replace(load, steps_per_epoch=1000)), prefix="")
    broken = flat_metrics(observed(dataclasses.replace(load, steps_per_epoch=20)), prefix="")
    assert broken["batches_per_s"] == pytest.approx(steady["batches_per_s"], rel=0.06)  # but for a step an epoch


def test_the_share_of_waiting_is_of_the_time_in_which_the_loop_ran() -> None:
    waiting = flat_metrics(observed(num_workers=1, fetch_ms=10.0, step_ms=1.0, spread=0.0), prefix="")
    assert waiting["wait_share"] == pytest.approx(1 - 1.0 / 11.22, abs=0.02)
    assert waiting["wait_ms_p50"] == pytest.approx(10.22, rel=0.02)
    assert flat_metrics(observed(step_ms=100.0), prefix="")["wait_share"] < 0.01


def test_quantiles_are_those_of_the_batches() -> None:
    observations = observed(num_batches=WINDOW)
    fetches = np.sort(observations.batches["fetch_ns"]) / 1e6
    metrics = flat_metrics(observations, prefix="")
    assert metrics["fetch_ms_p50"] == fetches[round(0.5 * (WINDOW - 1) + 1e-9)]
    assert metrics["fetch_ms_p99"] == fetches[round(0.99 * (WINDOW - 1))]


def test_a_stage_that_was_not_measured_takes_no_time() -> None:
    batches = observed(num_batches=20).batches.copy()
    batches["began_ns"] = 0
    metrics = flat_metrics(dataclasses.replace(observed(num_batches=20), batches=batches), prefix="")
    assert metrics["transport_ms_p99"] == 0
