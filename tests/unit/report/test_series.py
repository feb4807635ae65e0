from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from swift_loader.metrics.observations import BATCH, Observations
from swift_loader.report.series import MAX_ROWS, Series
from tests.support.simulated import Load, observed, setup_of

_S = 1_000_000_000


def by_hand(rows: list[dict[str, int]], num_workers: int = 1) -> Observations:
    """Return observations of these batches. Times are in seconds."""
    batches = np.zeros(len(rows), BATCH)
    for place, row in enumerate(rows):
        for name, value in row.items():
            batches[name][place] = value * _S if name.endswith("_ns") else value
    observations = observed(num_batches=1, num_workers=num_workers)
    return dataclasses.replace(observations, batches=batches, setup=setup_of(Load(num_workers=num_workers)))


def test_throughput_counts_each_batch_once() -> None:
    observations = observed(num_batches=500, steps_per_epoch=100)
    series = Series.of(observations)
    assert (series.batches_per_s * np.diff(series.edges_s)).sum() == pytest.approx(500)


def test_the_share_of_waiting_adds_up_to_the_waits() -> None:
    observations = observed(num_batches=500, steps_per_epoch=100)
    series = Series.of(observations)
    waits = (observations.batches["delivered_ns"] - observations.batches["asked_ns"]).sum() / _S
    assert (series.wait_share * np.diff(series.edges_s)).sum() == pytest.approx(waits)
    assert series.wait_share.min() >= 0
    assert series.wait_share.max() <= 1 + 1e-9


def test_a_wait_lies_in_the_bins_that_it_covers() -> None:
    rows = [{"asked_ns": 10 + place, "delivered_ns": 10 + place} for place in range(8)]
    rows[4]["asked_ns"], rows[4]["delivered_ns"] = 13, 14
    rows[7]["delivered_ns"] = 18
    series = Series.of(by_hand(rows))
    assert series.edges_s.tolist() == [0, 4, 8]
    assert series.wait_share.tolist() == [0.25, 0.25]
    assert series.batches_per_s.tolist() == [1.25, 0.75]


def test_occupancy_is_each_workers_own() -> None:
    rows = [
        {"asked_ns": 10, "delivered_ns": 14, "worker_id": 1, "began_ns": 11, "fetch_ns": 2, "collate_ns": 1},
        {"asked_ns": 14, "delivered_ns": 18, "worker_id": 0, "began_ns": 12, "fetch_ns": 4, "encode_ns": 2},
    ]
    series = Series.of(by_hand(rows, num_workers=3))
    assert series.occupancy.tolist() == [[0.75], [0.375], [0]]
    assert series.workers_per_row == 1


def test_what_workers_did_after_the_last_delivered_batch_is_unknown() -> None:
    rows = [{"asked_ns": 10 + p, "delivered_ns": 11 + p, "began_ns": 10 + p, "fetch_ns": 1} for p in range(8)]
    rows += [{"asked_ns": 18 + p, "delivered_ns": 19 + p, "began_ns": 17, "fetch_ns": 1} for p in range(8)]
    occupancy = Series.of(by_hand(rows)).occupancy
    assert np.isnan(occupancy[0]).tolist() == [False, False, True, True]


@pytest.mark.parametrize(("num_workers", "num_rows", "each"), [(64, 64, 1), (65, 33, 2), (1000, 63, 16)])
def test_many_workers_share_rows(num_workers: int, num_rows: int, each: int) -> None:
    series = Series.of(observed(num_batches=200, num_workers=num_workers, max_in_flight=2 * num_workers))
    assert series.occupancy.shape[0] == num_rows <= MAX_ROWS
    assert series.workers_per_row == each
    assert np.nanmax(series.occupancy) <= 1


def test_epochs_begin_where_the_loop_asked() -> None:
    observations = observed(num_batches=30, steps_per_epoch=10)
    first_s = observations.batches["asked_ns"][0] / _S
    numbers, begins = zip(*Series.of(observations).epochs, strict=True)
    assert numbers == (1, 2)
    assert begins == pytest.approx([observations.batches["asked_ns"][place] / _S - first_s for place in (10, 20)])
