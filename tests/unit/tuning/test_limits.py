from __future__ import annotations

import pytest

from swift_loader.tuning.tuner import most_workers

GB = 1 << 30


@pytest.mark.parametrize(
    ("num_cores", "free_nbytes", "batch_nbytes", "num_workers", "expected"),
    [
        (1, 100 * GB, 1 << 20, 1, 8),
        (0.25, 100 * GB, 1 << 20, 1, 4),
        (128, 1000 * GB, 1 << 20, 1, 64),
        (8, 1 * GB, 64 << 20, 2, 4),
        (8, 0, 64 << 20, 3, 3),
        (8, 0, 0, 0, 1),
    ],
)
def test_is_limited_by_cores_and_memory(
    num_cores: float, free_nbytes: int, batch_nbytes: int, num_workers: int, expected: int
) -> None:
    assert most_workers(num_cores, free_nbytes, batch_nbytes, num_workers) == expected
