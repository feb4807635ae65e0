from __future__ import annotations

import pytest

from swift_loader.report.breakdown import Breakdown
from tests.support.observed import SETUP, Costs, observe


def part(breakdown: Breakdown, name: str) -> tuple[float, float]:
    found = next(one for one in breakdown.parts if one.name == name)
    return found.p50_s, found.p99_s


def test_each_part_has_its_median_and_its_tail() -> None:
    breakdown = Breakdown.of(observe(Costs(fetch_ms=[5.0] * 19 + [100.0], collate_ms=2)))
    assert part(breakdown, "fetch") == pytest.approx((5e-3, 0.1))
    assert part(breakdown, "collate") == pytest.approx((2e-3, 2e-3))


@pytest.mark.parametrize("step_ms", [0.5, 30])
def test_the_shares_add_up(step_ms: float) -> None:
    breakdown = Breakdown.of(observe(Costs(step_ms=step_ms)))
    assert sum(one.share for one in breakdown.parts) == pytest.approx(1)


def test_even_workers_have_equal_shares() -> None:
    workers = Breakdown.of(observe(Costs())).workers
    assert [worker.worker_id for worker in workers] == [0, 1]
    assert [worker.busy_share for worker in workers] == pytest.approx([1, 1], abs=0.02)
    assert sum(worker.num_batches for worker in workers) == 297


def test_idle_workers_are_seen() -> None:
    breakdown = Breakdown.of(observe(Costs(fetch_ms=1, step_ms=10)))
    assert breakdown.idle.share == pytest.approx(0.95, abs=0.01)


def test_a_worker_runs_waits_for_io_and_waits_for_a_core() -> None:
    cpu = Breakdown.of(observe(Costs(cpu_share=0.5, delay_share=0.2))).cpu
    assert cpu is not None
    assert (cpu.running, cpu.waiting_for_core, cpu.waiting_for_io) == pytest.approx((0.5, 0.2, 0.3))


def test_cpu_time_that_was_not_measured_is_not_told() -> None:
    assert Breakdown.of(observe(Costs(cpu_share=0))).cpu is None


def test_no_batches_give_zeros() -> None:
    breakdown = Breakdown.of(observe(Costs(), SETUP, num_batches=0))
    assert all(one.p99_s == one.share == 0 for one in breakdown.parts)
    assert breakdown.workers == ()
