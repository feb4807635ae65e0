from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from swift_loader.report.life import Life, activity, steady
from tests.support.observed import SETUP, Costs, observe


def test_the_parts_of_a_life_are_what_the_batch_cost() -> None:
    life = Life.of(observe(Costs(fetch_ms=8, collate_ms=1, encode_ms=0.5, transport_ms=0.2, decode_ms=0.1)))
    for name, seconds in {"fetch": 8e-3, "collate": 1e-3, "encode": 5e-4, "transport": 2e-4, "decode": 1e-4}.items():
        assert getattr(life, name) == pytest.approx(seconds, abs=1e-8), name
    assert life.service == pytest.approx(9.5e-3)


def test_a_batch_behind_a_slow_one_waits_for_its_turn() -> None:
    life = Life.of(observe(Costs(fetch_ms=[1.0, 50.0, 1.0, 1.0], transport_ms=0, decode_ms=0), num_batches=4))
    assert life.order == pytest.approx([0, 0, 48e-3, 47e-3])


def test_in_completion_order_no_batch_waits_for_its_turn() -> None:
    life = Life.of(observe(Costs(fetch_ms=[1.0, 50.0]), replace(SETUP, in_order=False)))
    assert not life.order.any()


def test_a_worker_idles_while_there_is_no_room() -> None:
    life = Life.of(observe(Costs(fetch_ms=1, step_ms=10)))
    assert np.nanmedian(life.idle) == pytest.approx(19e-3, rel=0.01)
    assert np.isnan(life.idle[:2]).all()


def test_the_last_step_of_an_epoch_is_unknown() -> None:
    observations = observe(Costs(), num_batches=6)
    observations.batches["epoch"][3:] = 1
    assert np.isnan(Life.of(observations).step).tolist() == [False, False, True, False, False, True]


def test_batches_of_the_start_are_left_out_as_long_as_they_are_there() -> None:
    observations = observe(Costs(), num_batches=100)
    assert len(steady(observations).batches) == 97
    assert len(steady(replace(observations, num_delivered=101)).batches) == 100


def test_activity_counts_what_runs_at_the_same_time() -> None:
    began, ended = np.array([0.0, 0.0, 1.0]), np.array([2.0, 1.0, 3.0])
    assert activity(began, ended, np.ones(3)) == pytest.approx([2.0, 2.0, 1.5])
    assert activity(began, ended, np.array([1.0, 0.5, 0.0])) == pytest.approx([1.25, 1.5, 0.5])
