from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swift_loader.sampling.work import (
    PlannedWork,
    StreamRounds,
    StreamWork,
    Work,
    WorkSource,
)
from tests.support.work import planned


def test_shards_take_turns_after_the_last_worker() -> None:
    rounds = StreamRounds(0, 3, first_step=7, last_worker=0)
    works = [rounds.next() for _ in range(4)]
    assert works == [
        StreamWork(0, 7, 1, 0),
        StreamWork(0, 8, 2, 0),
        StreamWork(0, 9, 0, 0),
        StreamWork(0, 10, 1, 1),
    ]


@given(num_workers=st.integers(1, 4), first=st.integers(0, 9), length=st.integers(0, 20))
def test_the_batches_of_a_shared_stream_come_in_their_order(num_workers: int, first: int, length: int) -> None:
    rounds = StreamRounds(0, num_workers, first_batches=[first + number for number in range(num_workers)])
    found = []
    while (work := rounds.next()) is not None:
        if work.turn < length:
            found.append(work.turn)
        else:
            rounds.end_shard(work)
    assert found == list(range(first, length))


@given(num_workers=st.integers(1, 4), full=st.integers(0, 3), is_shared=st.booleans())
def test_what_is_taken_back_is_handed_out_later(num_workers: int, full: int, is_shared: bool) -> None:
    rounds = StreamRounds(0, num_workers, first_batches=list(range(num_workers)) if is_shared else None)
    found: list[StreamWork] = []
    for _ in range(3 * num_workers):
        work = rounds.next()
        assert work is not None
        if work.worker_id == full % num_workers and len(found) < num_workers:
            work = rounds.swap(work)
        found.append(work)
    assert [work.step for work in found] == list(range(3 * num_workers))
    for worker_id in range(num_workers):
        turns = [work.turn for work in found if work.worker_id == worker_id]
        first, distance = (worker_id, num_workers) if is_shared else (0, 1)
        assert turns == [first + distance * number for number in range(len(turns))]


def test_the_end_of_a_shard_is_its_first_missing_turn() -> None:
    rounds = StreamRounds(0, 2)
    works = [rounds.next() for _ in range(4)]
    assert rounds.end_of(0) is None
    for work in (works[0], works[2]):
        assert work is not None
        rounds.end_shard(work)
    assert (rounds.end_of(0), rounds.end_of(1)) == (0, None)


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
