from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swift_loader.scheduler.work import PlannedWork, Work, WorkSource
from tests.support.work import planned


def first(source: WorkSource, num: int) -> list[Work | None]:
    return [source.next() for _ in range(num)]


@given(epoch=st.integers(0, 5), step=st.integers(0, 6), length=st.integers(0, 6), later=st.integers(1, 5))
def test_planned_work_goes_on_across_the_ends_of_epochs(epoch: int, step: int, length: int, later: int) -> None:
    expected = [PlannedWork(epoch, one) for one in range(step, length)]
    expected += [PlannedWork(epoch + 1 + one // later, one % later) for one in range(20)]
    source = planned(epoch, step, lambda asked: length if asked == epoch else later)
    assert first(source, 20) == expected[:20]


def test_epochs_without_batches_hand_out_nothing_or_are_passed_over_up_to_the_last_irregular_one() -> None:
    assert first(planned(4, 0, lambda _: 0), 2) == [None, None]
    only = planned(0, 1, lambda epoch: 2 if epoch == 0 else 0)
    assert first(only, 3) == [PlannedWork(0, 1), None, None]
    lengths = {0: 1, 1: 0, 2: 0, 3: 1}
    source = planned(0, 0, lambda epoch: lengths.get(epoch, 2), last_irregular_epoch=3)
    assert first(source, 4) == [PlannedWork(0, 0), PlannedWork(3, 0), PlannedWork(4, 0), PlannedWork(4, 1)]
