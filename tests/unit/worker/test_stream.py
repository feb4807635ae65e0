from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader.transport.task import Task
from swift_loader.worker.failure import BuildError
from swift_loader.worker.stream import StreamEnd, StreamSamples
from swift_loader.worker.stream_shard import StreamShard
from swift_loader.worker.torch_mode import Resume
from tests.support.torch_mode import plan_of, worker_spec


class Plain:
    """Can only be iterated from its beginning."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class Position:
    def __init__(self, size: int) -> None:
        self.size, self.position = size, 0

    def __next__(self) -> int:
        if self.position == self.size:
            raise StopIteration
        self.position += 1
        return self.position - 1

    def __iter__(self) -> Any:
        return self

    def state_dict(self) -> int:
        return self.position

    def load_state_dict(self, state: int) -> None:
        self.position = state


class OfIterator(Plain):
    """Its iterator has a state."""

    def __iter__(self) -> Iterator[int]:
        return Position(self.size)


class OfDataset(Plain):
    """Has the state itself."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < self.size:
            self.position += 1
            yield self.position - 1
        self.position = 0

    state_dict = Position.state_dict
    load_state_dict = Position.load_state_dict


def samples_of(dataset: Any, **mode: Any) -> StreamSamples:
    options = worker_spec(dataset, is_stream=True, **mode).options
    assert options.torch is not None
    return StreamSamples(dataset, options.torch, 7, None)


def fetch(samples: StreamSamples, turn: int) -> Any:
    try:
        return samples.fetch(Task(1, turn, 0, turn, turn=turn)).samples
    finally:
        assert not samples.seeding.needs_rebuild()


def rest_of(samples: StreamSamples, turn: int = 0) -> list[tuple[Any, bytes | None]]:
    """Return the batches from this turn on, each with the state that came with it."""
    found: list[tuple[Any, bytes | None]] = []
    while True:
        try:
            found.append((fetch(samples, turn + len(found)), samples.state))
        except StreamEnd:
            break
    with pytest.raises(StreamEnd):
        fetch(samples, turn + len(found) + 1)
    return found


def batches(size: int, batch_size: int, *, drop_last: bool = False) -> list[list[int]]:
    cut = [list(range(first, min(size, first + batch_size))) for first in range(0, size, batch_size)]
    return [batch for batch in cut if len(batch) == batch_size or not drop_last]


@given(size=st.integers(0, 20), batch_size=st.integers(1, 6), drop_last=st.booleans())
@settings(deadline=None)
def test_a_shard_is_cut_into_batches(size: int, batch_size: int, drop_last: bool) -> None:
    samples = samples_of(Plain(size), batch_size=batch_size, drop_last=drop_last)
    for _ in range(2):
        expected = batches(size, batch_size, drop_last=drop_last)
        assert [batch for batch, _ in rest_of(samples)] == expected
        samples.use_plan(plan_of(7), None, 0)


@given(
    stream=st.sampled_from([Plain, OfIterator, OfDataset]),
    size=st.integers(0, 20),
    every=st.integers(1, 4),
    stop=st.integers(0, 8),
    lead=st.integers(0, 3),
)
@settings(deadline=None)
def test_a_shard_continues_from_its_last_snapshot(
    stream: type[Plain], size: int, every: int, stop: int, lead: int
) -> None:
    mode = {"batch_size": 3, "snapshot_every": every}
    whole = rest_of(samples_of(stream(size), **mode))
    stop = min(stop, len(whole))
    saved = max((number for number in range(stop) if whole[number][1] is not None), default=-1)
    snapshot = whole[saved][1] if saved >= 0 else None
    resumed = samples_of(stream(size), **mode)
    resumed.use_plan(plan_of(7), Resume(snapshot, stop - saved - 1).pack(), 0)
    assert rest_of(resumed) == whole[stop:]
    # A replacement gets the number of the first turn after the snapshot instead, and a later task.
    lead = min(lead, len(whole) - stop)
    resumed.use_plan(plan_of(7), Resume(snapshot).pack(), 5)
    assert rest_of(resumed, 5 + stop - saved - 1 + lead) == whole[stop + lead :]


class Failing:
    """Fails twice, and goes on."""

    def __iter__(self) -> Any:
        self.number = -1
        return self

    def __next__(self) -> int:
        self.number += 1
        if self.number in (2, 3):
            raise LookupError(self.number)
        if self.number == 7:
            raise StopIteration
        return self.number


def test_a_batch_that_fails_counts_as_a_batch_when_it_is_skipped() -> None:
    def outcomes(samples: StreamSamples, first: int) -> list[Any]:
        found: list[Any] = []
        for turn in range(first, 5):
            try:
                found.append(fetch(samples, turn))
            except BuildError as error:
                found.append(repr(error.__cause__))
        return found

    whole = outcomes(samples_of(Failing()), 0)
    assert whole == [[0, 1], "LookupError(2)", "LookupError(3)", [4, 5], [6]]
    for first in range(5):
        assert outcomes(samples_of(Failing()), first) == whole[first:]


@given(
    stream=st.sampled_from([Plain, OfIterator, OfDataset]),
    size=st.integers(0, 40),
    world_size=st.integers(1, 3),
    num_workers=st.integers(1, 3),
    drop_last=st.booleans(),
    is_even=st.booleans(),
    stop=st.integers(0, 8),
)
@settings(deadline=None)
def test_workers_and_ranks_share_a_stream(
    stream: type[Plain], size: int, world_size: int, num_workers: int, drop_last: bool, is_even: bool, stop: int
) -> None:
    used = size - size % world_size if is_even else size
    for rank in range(world_size):
        shard = StreamShard(rank, world_size, is_even)
        mode = {"num_workers": num_workers, "batch_size": 3, "drop_last": drop_last, "shard": shard}
        part = list(range(rank, used, world_size))
        expected = [[part[number] for number in batch] for batch in batches(len(part), 3, drop_last=drop_last)]
        first = min(stop, len(expected))
        for worker_id in range(num_workers):
            samples = samples_of(stream(size), snapshot_every=1, **mode)
            turns = range(worker_id, len(expected), num_workers)
            found, states = [], []
            for turn in turns:
                found.append(fetch(samples, turn))
                states.append(samples.state)
            assert found == expected[worker_id::num_workers]
            with pytest.raises(StreamEnd):
                fetch(samples, turns.start + num_workers * len(turns))
            # Any worker continues with the state of any other, whichever batch it is asked for.
            for turn, state in zip(turns, states, strict=True):
                if turn < first < len(expected):
                    resumed = samples_of(stream(size), **mode)
                    resumed.use_plan(plan_of(7), Resume(state).pack(), 0)
                    assert fetch(resumed, first) == expected[first]
