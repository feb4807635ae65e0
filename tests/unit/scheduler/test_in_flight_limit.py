from __future__ import annotations

import pytest

from swift_loader.scheduler.queues import Limits


@pytest.mark.parametrize(
    ("num_workers", "in_order", "num_batches"),
    [(0, True, 10), (3, True, 10), (4, True, 12), (64, True, 192), (5, False, 10), (6, False, 12), (64, False, 128)],
)
def test_every_worker_has_batches_to_build_and_in_order_one_more(
    num_workers: int, in_order: bool, num_batches: int
) -> None:
    assert Limits.of(None, None, 1, num_workers, in_order=in_order).max_in_flight == num_batches
    assert Limits.of(3, None, 1, 8, in_order=in_order) == Limits(3, 2, 1, in_order)
