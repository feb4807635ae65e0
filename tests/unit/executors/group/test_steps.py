from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swift_loader.executors.group.messages import BatchId
from swift_loader.executors.group.steps import Steps


def batch_id(step: int) -> BatchId:
    return BatchId(7, 0, step)


def test_ranks_that_take_the_same_agree_whoever_is_first() -> None:
    steps = Steps([1])
    assert steps.take(batch_id(0)) is None
    assert steps.note(1, 1, batch_id(0)) is None
    assert steps.note(1, 2, batch_id(1)) is None
    assert steps.take(batch_id(1)) is None
    assert steps.slowest() == (1, 0)


def test_another_batch_is_found_whoever_is_first() -> None:
    steps = Steps([1, 2])
    assert steps.note(2, 1, batch_id(5)) is None
    assert steps.take(batch_id(0)) == (2, batch_id(5))
    assert steps.note(1, 1, batch_id(6)) == batch_id(0)


def test_a_rank_that_waits_for_another_batch_is_found() -> None:
    steps = Steps([1])
    steps.take(batch_id(0))
    steps.note(1, 1, batch_id(0))
    assert steps.expect(1, 1, batch_id(9)) is None
    assert steps.take(batch_id(1)) == (1, batch_id(9))
    assert steps.expect(1, 1, batch_id(9)) == batch_id(1)


def test_the_slowest_rank_is_known_until_it_is_gone() -> None:
    steps = Steps([1, 2])
    for step in range(5):
        steps.take(batch_id(step))
    steps.note(1, 4, batch_id(3))
    assert steps.slowest() == (2, 5)
    steps.forget(2)
    assert steps.slowest() == (1, 1)
    assert steps.note(2, 1, batch_id(9)) is None
    steps.forget(1)
    assert steps.slowest() is None


@given(moves=st.lists(st.sampled_from([0, 1, 2]), max_size=60))
def test_no_order_of_equal_steps_is_a_mismatch_and_little_is_kept(moves: list[int]) -> None:
    steps, taken = Steps([1, 2]), [0, 0, 0]
    for rank in moves:
        now = batch_id(taken[rank])
        taken[rank] += 1
        assert (steps.note(rank, taken[rank], now) if rank else steps.take(now)) is None
    assert len(steps._taken) <= max(0, taken[0] - min(taken[1:]))
