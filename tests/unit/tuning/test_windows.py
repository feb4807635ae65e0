from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from swift_loader.metrics.observations import BATCH
from swift_loader.tuning.tuner import window_of

MS = 1_000_000


def batches_of(num: int, *, wait_ms: int, step_ms: int, per_epoch: int, pause_ms: int) -> NDArray[np.void]:
    """Return batches of a loop that waits, works for a step, and pauses between epochs."""
    batches = np.zeros(num, BATCH)
    now_ns = 5_000 * MS
    for number, batch in enumerate(batches):
        batch["epoch"], batch["step"] = divmod(number, per_epoch)
        batch["asked_ns"] = now_ns
        batch["delivered_ns"] = now_ns + wait_ms * MS
        now_ns += (wait_ms + (pause_ms if number % per_epoch == per_epoch - 1 else step_ms)) * MS
    batches["fetch_ns"], batches["collate_ns"], batches["encode_ns"] = 6 * MS, 3 * MS, 1 * MS
    batches["cpu_ns"], batches["run_delay_ns"] = 4 * MS, -1
    return batches


def test_a_pause_between_epochs_is_not_a_step() -> None:
    window = window_of(batches_of(40, wait_ms=2, step_ms=8, per_epoch=10, pause_ms=60_000), 3, 0.0)
    assert window is not None
    assert window.step_s == pytest.approx(0.008)
    assert window.waited_s == pytest.approx(0.002)
    assert window.rate == pytest.approx(100)
    assert window.wait_share == pytest.approx(0.2)


@pytest.mark.parametrize("step_ms", [8, 4_000])
def test_a_pause_within_an_epoch_is_not_a_step(step_ms: int) -> None:
    batches = batches_of(40, wait_ms=2, step_ms=step_ms, per_epoch=25, pause_ms=300_000)
    batches["epoch"] = 3
    window = window_of(batches, 3, 0.0)
    assert window is not None
    assert window.step_s == pytest.approx(step_ms / 1e3)


def test_a_step_that_is_only_ten_times_as_long_is_no_pause() -> None:
    batches = batches_of(41, wait_ms=2, step_ms=100, per_epoch=10, pause_ms=1_100)
    batches["epoch"] = 3
    window = window_of(batches, 3, 0.0)
    assert window is not None
    assert window.step_s == pytest.approx(0.2)


def test_waiting_for_a_core_is_not_service() -> None:
    batches = batches_of(10, wait_ms=1, step_ms=1, per_epoch=10, pause_ms=0)
    batches["run_delay_ns"][::2] = 3 * MS
    window = window_of(batches, 3, 0.001)
    assert window is not None
    assert window.service_s == pytest.approx(0.007)
    assert window.cpu_s == pytest.approx(0.004)
    assert window.trainer_cpu_s == 0.001


def test_service_is_never_less_than_its_cpu_time() -> None:
    batches = batches_of(10, wait_ms=1, step_ms=1, per_epoch=10, pause_ms=0)
    batches["run_delay_ns"] = 9 * MS
    window = window_of(batches, 3, 0.0)
    assert window is not None
    assert window.service_s == pytest.approx(0.004)


def test_one_batch_is_no_window() -> None:
    assert window_of(np.zeros(1, BATCH), 1, 0.0) is None
