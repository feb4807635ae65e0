from __future__ import annotations

from itertools import islice
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from swift_loader.dataloader.dealing import dealt_out
from swift_loader.dataloader.draws import DrawsState
from swift_loader.dataloader.state import LoaderPosition, WorkerSnapshot
from swift_loader.worker.stream_parts import PartsIterator, part_of, parts_in, state_of_parts

DRAWS = DrawsState(
    base_seed=1,
    epoch=0,
    num_drawn=0,
    sampler_state=None,
    generators=[],
    global_states={},
    present_states={},
    is_begun=True,
    draws_seed=True,
    begins_twice=False,
    sampler_epochs=[],
    dataset_epoch=None,
    is_over=False,
)


def position(num_workers: int, *workers: WorkerSnapshot, num_yielded: int = 3) -> LoaderPosition:
    return LoaderPosition(num_workers, True, num_yielded, DRAWS, workers=workers)


def parts_of(one: LoaderPosition) -> list[Any]:
    return [parts_in(worker.iterator_state) for worker in one.workers]


def test_each_worker_s_rest_is_a_part_and_workers_take_them_in_turn() -> None:
    saved = position(
        3,
        WorkerSnapshot(dataset_state={"at": 5}, num_since=1, num_batches=4),
        WorkerSnapshot(has_ended=True, num_batches=2),
        WorkerSnapshot(num_batches=3),
    )
    first, last = part_of(0, 3, {"at": 5}, 4), part_of(2, 3, None, 12)
    assert parts_of(dealt_out(saved, 1, 4)) == [[first, last]]
    assert parts_of(dealt_out(saved, 0, 4)) == [[first, last]]
    assert parts_of(dealt_out(saved, 4, 4)) == [[first], [last], [], []]
    assert parts_of(dealt_out(dealt_out(saved, 4, 4), 1, 4)) == [[first, last]]


def test_the_main_process_has_one_part() -> None:
    assert parts_of(dealt_out(position(0, WorkerSnapshot()), 2, 5)) == [[part_of(0, 0, None, 15)], []]
    saved = position(0, WorkerSnapshot(dataset_state={"at": 7}))
    assert parts_of(dealt_out(saved, 1, 5)) == [[part_of(0, 0, {"at": 7}, 0)]]


class Shares:
    """Gives each worker its share, by what `get_worker_info` says."""

    def __iter__(self) -> Any:
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        yield from range(20) if info is None else range(info.id, 20, info.num_workers)


@given(num_workers=st.integers(0, 4), data=st.data())
def test_parts_that_are_saved_at_any_time_give_each_sample_once(num_workers: int, data: st.DataObject) -> None:
    parts = [part_of(worker_id, num_workers, None, 0) for worker_id in range(max(1, num_workers))]
    state, found = state_of_parts(parts), []
    while True:
        iterator = PartsIterator(Shares(), [])
        iterator.load_state_dict(state)
        taken = list(islice(iterator, data.draw(st.integers(1, 9))))
        if not taken:
            break
        found += taken
        state = iterator.state_dict()
    assert sorted(found) == list(range(20))
