from __future__ import annotations

from dataclasses import replace

import numpy as np

from swift_loader.sampling.past_plans import MAX_PLANS, PastPlans
from swift_loader.sampling.plan import Plan, PlanSettings


def plan_of(batch_size: int) -> Plan:
    return Plan.of(100, replace(PlanSettings.of_seed(0), batch_size=batch_size))


def test_a_batch_is_named_by_the_plan_of_its_time() -> None:
    plans = PastPlans()
    plans.note(10, plan_of(4))
    plans.note(20, plan_of(5))
    assert [plans.indices_of(0, 1, when_ns).tolist() for when_ns in (10, 19, 20, 30)] == [
        [4, 5, 6, 7],
        [4, 5, 6, 7],
        [5, 6, 7, 8, 9],
        [5, 6, 7, 8, 9],
    ]


def test_a_batch_that_no_remembered_plan_has_gets_no_indices() -> None:
    plans = PastPlans()
    plans.note(10, plan_of(50))
    assert plans.indices_of(0, 0, 9).size == plans.indices_of(0, 2, 11).size == 0
    assert np.array_equal(plans.indices_of(0, 1, 11), np.arange(50, 100))


def test_passes_with_one_plan_push_no_other_out() -> None:
    plans = PastPlans()
    plans.note(0, plan_of(4))
    for now_ns in range(1, 2 * MAX_PLANS):
        plans.note(now_ns, plan_of(5))
    assert plans.indices_of(0, 0, 0).tolist() == [0, 1, 2, 3]
