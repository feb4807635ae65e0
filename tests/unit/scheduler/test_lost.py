from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.scheduler.batches import Batch
from swift_loader.scheduler.lost import LostBatches
from swift_loader.scheduler.work import IndexWork, PlannedWork, StreamWork, Work


def batch_of(sequence: int, worker_id: int | None) -> Batch[None]:
    """Return a batch that only this worker may build."""
    work: Work = PlannedWork(0, sequence)
    if worker_id is not None:
        work = StreamWork(0, sequence, worker_id, 0) if worker_id % 2 else IndexWork(0, sequence, [1], worker_id)
    return Batch(sequence, work)


@given(worker_ids=st.lists(st.none() | st.integers(0, 3), max_size=12), data=st.data())
def test_the_first_batch_of_each_worker_is_offered_in_order(worker_ids: list[int | None], data: st.DataObject) -> None:
    batches = {sequence: batch_of(sequence, worker_id) for sequence, worker_id in enumerate(worker_ids)}
    lost = LostBatches()
    for sequence in data.draw(st.permutations(list(batches))):
        lost.add(batches[sequence])
    left = dict(enumerate(worker_ids))
    while left:
        firsts = sorted({worker_id: sequence for sequence, worker_id in reversed(left.items())}.values())
        assert (lost.firsts(), len(lost), bool(lost)) == (firsts, len(left), True)
        sequence = data.draw(st.sampled_from(firsts))
        lost.remove(batches[sequence])
        del left[sequence]
    assert (lost.firsts(), len(lost), bool(lost)) == ([], 0, False)


def test_of_a_thousand_lost_batches_that_any_worker_may_build_one_is_looked_at() -> None:
    lost = LostBatches()
    for sequence in range(1000, 0, -1):
        lost.add(batch_of(sequence, None))
    assert (lost.firsts(), repr(lost)) == ([1], "<LostBatches 1000>")


def test_a_batch_that_is_not_offered_is_not_removed() -> None:
    lost = LostBatches()
    lost.add(batch_of(1, None))
    lost.add(batch_of(2, None))
    with pytest.raises(AssertionError):
        lost.remove(batch_of(2, None))


def test_batches_that_are_no_longer_bound_to_a_worker_are_sorted_anew() -> None:
    lost = LostBatches()
    for sequence in range(4):
        lost.add(batch_of(sequence, worker_id=2 * sequence))
    assert lost.firsts() == [0, 1, 2, 3]
    lost.restart(batch_of(sequence, None) for sequence in range(4))
    assert lost.firsts() == [0]
