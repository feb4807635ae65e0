"""Random kills never show in what the loop gets; and if they did, it would be noticed. See chaos.py for longer runs."""

from __future__ import annotations

from collections import Counter

import pytest

from swift_loader import ProtocolError, SwiftLoaderError, WorkerStalled
from swift_loader.scheduler.delivery import BatchState, Delivery
from swift_loader.scheduler.ledger import Ledger
from tests.support.chaos import Case, run_case
from tests.support.helpers import exhaustive
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
    assert run_case(QUICK).kills.total() >= QUICK.num_kills


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_hundred_kills_of_all_kinds_never_show_in_the_data() -> None:
    kills: Counter[Aim] = Counter()
    for case in CASES:
        done = run_case(case).kills
        assert done.total() >= case.num_kills, case
        kills.update(done)
    assert kills.total() >= 100
    assert set(kills) >= {Aim.ANYONE, Aim.UNREAD, Aim.ALL, Aim.SLOT_WRITE, Aim.TEMPLATE}


@pytest.mark.parametrize("in_order", [True, exhaustive(False)])
def test_a_ledger_that_forgets_what_a_dead_worker_had_is_caught(
    in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Ledger.remove_worker

    def remove_worker(ledger: Ledger, index: int) -> int:
        num_lost = real(ledger, index)
        ledger._lost.clear()
        return num_lost

    monkeypatch.setattr(Ledger, "remove_worker", remove_worker)
    with pytest.raises(WorkerStalled, match="no worker is ready for"):
        run_case(Case(seed=1, workers=2, in_order=in_order, num_kills=10, timeout_s=3.0))


@pytest.mark.exhaustive
def test_a_ledger_that_builds_again_what_is_here_already_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """In completion order; in order the second copy of a batch is never looked at."""
    real = Ledger.remove_worker

    def remove_worker(ledger: Ledger, index: int) -> int:
        for batch in list(ledger.ready.values()):
            if batch.worker == index:
                again = Delivery(batch.work, ledger._next_sequence, state=BatchState.LOST)
                ledger._batches[again.sequence] = again
                ledger._note_lost([again.sequence])
                ledger._next_sequence += 1
        return real(ledger, index)

    monkeypatch.setattr(Ledger, "remove_worker", remove_worker)
    with pytest.raises((AssertionError, SwiftLoaderError)) as caught:
        run_case(Case(seed=2, workers=2, in_order=False, num_kills=60, timeout_s=5.0))
    # A second copy at the end of an epoch is a batch where another epoch's is due: a plain SwiftLoaderError.
    assert type(caught.value) in (AssertionError, ProtocolError, SwiftLoaderError)
    assert "killed" not in str(caught.value), "it is the data that must tell, not the count of kills"
