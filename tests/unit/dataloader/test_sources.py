from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swift_loader.dataloader.sources import IndexQueue
from swift_loader.scheduler.work import IndexWork


@given(first_step=st.integers(0, 9), num_workers=st.integers(1, 4))
def test_in_order_the_workers_take_turns_from_the_epochs_first_batch_on(first_step: int, num_workers: int) -> None:
    queue = IndexQueue(3, num_workers, in_order=True)
    for step in range(first_step, first_step + 9):
        queue.put(step, [step])
    for step in range(first_step, first_step + 9):
        assert queue.next() == IndexWork(3, step, [step], step % num_workers)
    assert queue.next() is None


def test_out_of_order_any_worker_builds_a_batch() -> None:
    queue = IndexQueue(0, 2, in_order=False)
    queue.put(1, [5])
    assert queue.next() == IndexWork(0, 1, [5], None)
    queue.end_shard(0)
