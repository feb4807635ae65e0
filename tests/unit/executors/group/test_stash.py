from __future__ import annotations

import pytest

from swift_loader.executors.group.messages import BatchId, Dropped
from swift_loader.executors.group.stash import Stash, Stashed


def stash_of(*entries: tuple[int, int, int]) -> Stash:
    """Return a stash of (generation, epoch, step); the content is the generation."""
    stash = Stash()
    for generation, epoch, step in entries:
        stash.add(Stashed(BatchId(7, epoch, step), generation, generation))
    return stash


def give(stash: Stash, epoch: int, step: int) -> int | None:
    given = stash.give(BatchId(7, epoch, step))
    return None if given is None else given.content


def test_a_batch_is_given_once() -> None:
    stash = stash_of((1, 0, 0), (1, 0, 1))
    assert stash.has(BatchId(7, 0, 1))
    assert give(stash, 0, 1) == 1
    assert not stash.has(BatchId(7, 0, 1))
    assert give(stash, 0, 1) is None
    assert give(stash, 0, 2) is None


def test_a_batch_of_another_plan_is_another_one() -> None:
    assert stash_of((1, 0, 0)).give(BatchId(8, 0, 0)) is None


def test_what_the_loop_has_not_taken_is_given_again_elsewhere() -> None:
    stash = stash_of((1, 0, 0), (1, 0, 1), (1, 0, 2))
    assert [give(stash, 0, step) for step in range(3)] == [1, 1, 1]
    stash.take(BatchId(7, 0, 0))
    stash.go_elsewhere()
    assert [give(stash, 0, step) for step in range(3)] == [None, 1, 1]


def test_what_is_before_a_batch_that_the_loop_takes_is_removed() -> None:
    stash = stash_of((1, 0, 4), (1, 0, 5), (2, 0, 0), (2, 0, 1), (2, 0, 2))
    assert [give(stash, 0, 0), give(stash, 0, 1)] == [2, 2]
    stash.take(BatchId(7, 0, 0))
    assert len(stash) == 2
    assert give(stash, 0, 4) is None
    assert give(stash, 0, 2) == 2


def test_a_task_sent_ahead_removes_nothing_that_the_loop_needs_when_it_goes_back() -> None:
    stash = stash_of((1, 0, 4), (2, 0, 1), (2, 0, 2), (2, 1, 0))
    assert give(stash, 0, 4) == 1
    stash.take(BatchId(7, 0, 4))
    assert give(stash, 1, 0) == 2  # before it hears that the loop goes back to (0, 1)
    stash.go_elsewhere()
    assert [give(stash, 0, 1), give(stash, 0, 2), give(stash, 1, 0)] == [2, 2, 2]


@pytest.mark.parametrize("is_given", [False, True])
def test_what_the_other_rank_does_not_take_is_dropped(*, is_given: bool) -> None:
    stash = stash_of((1, 0, 4), (1, 0, 5), (1, 0, 6))
    if is_given:
        give(stash, 0, 6)
    stash.drop(Dropped(2, 0, 5))
    stash.add(Stashed(BatchId(7, 1, 0), 2, 2))
    stash.go_elsewhere()
    assert [give(stash, 0, 5), give(stash, 0, 6), give(stash, 1, 0)] == [1, None, 2]
