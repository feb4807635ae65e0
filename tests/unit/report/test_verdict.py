from __future__ import annotations

from dataclasses import replace

import pytest

from swift_loader.report.report import Bound, Verdict
from tests.support.observed import SETUP, Costs, observe, with_workers


@pytest.mark.parametrize(
    ("costs", "num_workers", "bound"),
    [
        (Costs(fetch_ms=10, step_ms=1), 2, Bound.DATA),
        (Costs(fetch_ms=10, step_ms=1), 12, Bound.MODEL),
        (Costs(fetch_ms=10, step_ms=4.7), 2, Bound.BALANCED),
        (Costs(fetch_ms=10, step_ms=10), 2, Bound.MODEL),
        (Costs(fetch_ms=10, step_ms=10), 0, Bound.DATA),
        (Costs(fetch_ms=[1.0] * 19 + [200.0], step_ms=5), 2, Bound.DATA),
        (Costs(fetch_ms=1, decode_ms=3, step_ms=5), 2, Bound.MODEL),
    ],
)
def test_the_verdict_follows_from_what_the_loop_waits(costs: Costs, num_workers: int, bound: Bound) -> None:
    assert Verdict.of(observe(costs, with_workers(num_workers))).bound is bound


def test_no_batches_give_no_verdict() -> None:
    assert Verdict.of(observe(Costs(), SETUP, num_batches=0)) == Verdict(Bound.STARTING, 0.0)


def test_the_wait_for_the_first_batch_does_not_count() -> None:
    observations = observe(Costs(fetch_ms=1, step_ms=2), SETUP)
    batches = observations.batches.copy()
    for name in ("delivered_ns", "received_ns"):
        batches[name] += 60_000_000_000
    batches["asked_ns"][1:] += 60_000_000_000
    late = replace(observations, batches=batches, waited_s=observations.waited_s + 60)
    assert Verdict.of(late).bound is Bound.MODEL


def test_the_time_between_two_epochs_does_not_count() -> None:
    observations = observe(Costs(fetch_ms=10, step_ms=3), SETUP, num_batches=200)
    batches = observations.batches.copy()
    batches["epoch"][100:] = 1
    for name in ("asked_ns", "delivered_ns", "received_ns", "began_ns", "sent_ns"):
        batches[name][100:] += 30_000_000_000
    assert Verdict.of(replace(observations, batches=batches)).wait_share == pytest.approx(0.4, abs=0.02)
