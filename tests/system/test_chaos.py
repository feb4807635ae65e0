"""Random kills never show in what the loop gets."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.chaos import Case, run_case
from tests.support.killer import Aim

QUICK = Case(seed=7, workers=2, in_order=True, num_kills=6, num_templates=1, is_narrow=True)
CASES = [
    Case(seed=1, workers=2, in_order=True, num_kills=26),
    Case(seed=2, workers=3, in_order=False, num_kills=26, is_narrow=True),
    Case(seed=3, workers=4, in_order=True, num_kills=26, is_narrow=True, multithread=False),
    Case(seed=4, workers=2, in_order=False, num_kills=26, multithread=False),
    Case(seed=5, workers=3, in_order=True, num_kills=26, is_narrow=True),
    Case(seed=6, workers=2, in_order=True, num_kills=4, start_method="spawn"),
]


def test_a_few_killed_workers_never_show_in_the_data() -> None:
    assert run_case(QUICK).total() >= QUICK.num_kills


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_hundred_kills_of_all_kinds_never_show_in_the_data() -> None:
    kills: Counter[Aim] = Counter()
    for case in CASES:
        done = run_case(case)
        assert done.total() >= case.num_kills, case
        kills.update(done)
    assert kills.total() >= 100
    assert set(kills) >= {Aim.ANYONE, Aim.UNREAD, Aim.ALL, Aim.SLOT_WRITE, Aim.TEMPLATE}
