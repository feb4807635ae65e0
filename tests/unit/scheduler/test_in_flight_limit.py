from __future__ import annotations

import pytest

from swift_loader.scheduler.queues import InFlightLimit


@pytest.mark.parametrize(
    ("num_workers", "in_order", "num_batches"),
    [(0, True, 10), (3, True, 10), (4, True, 12), (64, True, 192), (5, False, 10), (6, False, 12), (64, False, 128)],
)
def test_every_worker_has_batches_to_build_and_in_order_one_more(
    num_workers: int, in_order: bool, num_batches: int
) -> None:
    in_flight = InFlightLimit.of(None, num_workers, in_order=in_order)
    assert (in_flight.num_batches, in_flight.is_chosen, in_flight.warning) == (num_batches, True, "")
    given = InFlightLimit.of(3, 8, in_order=in_order)
    assert (given.num_batches, given.is_chosen, given.per_worker) == (3, False, 2)


def test_fewer_batches_than_workers_are_worth_a_warning_that_says_what_to_give() -> None:
    assert InFlightLimit.of(8, 8, in_order=True).warning == InFlightLimit.of(1, 0, in_order=True).warning == ""
    assert InFlightLimit.of(6, 8, in_order=True).warning == (
        "data_queue_size=6 keeps at most 6 of worker_per_consumer=8 workers busy. Leave data_queue_size out to get "
        "24, give at least 8, or start fewer workers"
    )
    assert "to get 16" in InFlightLimit.of(6, 8, in_order=False).warning


@pytest.mark.parametrize(
    ("batch_nbytes", "text"),
    [
        (0, "24 (chosen)"),
        (1, "24 (chosen; 24 batches of 1 bytes are 24 bytes)"),
        (9_633_792, "24 (chosen; 24 batches of 9.63 MB are 231 MB)"),
        (999_999, "24 (chosen; 24 batches of 1 MB are 24 MB)"),
        (2 * 10**9, "24 (chosen; 24 batches of 2 GB are 48 GB)"),
    ],
)
def test_it_says_what_memory_it_means(batch_nbytes: int, text: str) -> None:
    assert InFlightLimit.of(None, 8, in_order=True).describe(batch_nbytes) == text
    assert InFlightLimit.of(5, 8, in_order=True).describe(1000) == "5 (5 batches of 1 kB are 5 kB)"
