"""Chains of stops of a pipeline: the parts together are exactly a run that isn't stopped."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from swift_loader import DataLoader, StateMismatch, SwiftLoaderWarning, TooManyErrors
from swift_loader.pipeline import Pipeline, StageLoader
from tests.support import stage_functions as functions
from tests.support.helpers import exhaustive
from tests.support.stage_functions import AsyncCounted, AsyncNumbers, Counted, Numbers, OwnEpochs

NUM_STOPS = 50
NUM_EPOCHS = 3

SOURCES: dict[str, Callable[[], Any]] = {
    "state": lambda: Counted(80),
    "counting": lambda: Numbers(80),
    "async": lambda: AsyncNumbers(80),
    "async state": lambda: AsyncCounted(80),
    "own epochs": lambda: OwnEpochs(81),
}

GRAPHS: dict[str, Callable[[Pipeline], Pipeline]] = {
    "threads": lambda source: source.map(functions.uneven, concurrency=3).batch(4).prefetch(2),
    "coroutines": lambda source: source.map(functions.async_plus_one, concurrency=3),
    "draws": lambda source: source.shuffle(9).map(functions.draw, concurrency=3).batch(3),
    "generator": lambda source: source.map(functions.some, concurrency=3).batch(5),
    "async generator": lambda source: source.map(functions.async_some, concurrency=3).prefetch(2),
    "lists": lambda source: source.batch(7).unbatch().shuffle(5).filter(lambda number: number % 3 > 0).batch(2),
    "two generators": lambda source: (
        source.map(functions.some, concurrency=2).map(lambda pair: pair[0]).map(functions.some, concurrency=2)
    ),
    "rank": lambda source: source.shard(1, 3).batch(2),
    "uneven rank": lambda source: source.shard(0, 3, equal=False),
    "merge": lambda source: source.merge(Pipeline(range(100, 120)).map(functions.some)).batch(3),
    "mix": lambda source: Pipeline.mix([source, Pipeline(range(100, 120)).shuffle(4)], [2, 1], seed=3).batch(3),
    "mix that stops": lambda source: Pipeline.mix(
        {"a": source.map(functions.uneven, concurrency=2), "b": Pipeline(range(100, 120)).map(functions.some)},
        {0: {"a": 2.0, "b": 1.0}, 15: {"a": 0.0, "b": 3.0}, 22: {"a": 0.7, "b": 0.3}},
        on_end="stop",
    ).prefetch(2),
    "mix that repeats": lambda source: (
        Pipeline.mix(
            [
                Pipeline(range(100, 107), continuous=True).shuffle(3).map(functions.draw, concurrency=2),
                Pipeline(Numbers(5), continuous=True).map(functions.some, concurrency=3),
                source,
            ],
            [3, 2, 1],
            on_end="stop",
        )
        .merge(Pipeline(range(200, 205)))
        .map(functions.draw, concurrency=2)
        .batch(3)
    ),
    "cache": lambda source: source.cache(20, stop_after=70).batch(4),
}


def run_in_parts(make: Callable[[], Any], num_stops: int, seed: int) -> list[list[Any]]:
    """Run some epochs with stops between random items. Each part has a pipeline of its own."""
    draws = random.Random(seed)
    epochs: list[list[Any]] = [[]]
    state: dict[str, Any] | None = None
    length = 0
    while len(epochs) <= NUM_EPOCHS:
        pipeline = make()
        if state is not None:
            pipeline.load_state_dict(state)
            pipeline.set_epoch(state["epoch"])  # nothing may be left of it
        limit = draws.randrange(length // (num_stops // NUM_EPOCHS + 1) * 2 + 2) if length else -1
        is_over = True
        for number, item in enumerate(pipeline):
            epochs[-1].append(item)
            if number == limit:
                is_over = False
                break
        state = json.loads(json.dumps(pipeline.state_dict()))
        length = max(length, len(epochs[-1]))
        if is_over:
            epochs.append([])
    return epochs[:NUM_EPOCHS]


def whole(make: Callable[[], Any]) -> list[list[Any]]:
    pipeline = make()
    return [list(pipeline) for _ in range(NUM_EPOCHS)]


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_pipeline_continues_after_many_stops(graph: str) -> None:
    def make() -> Pipeline:
        return GRAPHS[graph](Pipeline(range(80), seed=11))

    assert run_in_parts(make, NUM_STOPS, 1) == whole(make)


@pytest.mark.parametrize("source", ["state", "counting", "async", "async state", "own epochs"])
@pytest.mark.parametrize(
    "graph", ["lists", exhaustive("threads"), exhaustive("draws"), "generator", exhaustive("mix"), exhaustive("merge")]
)
def test_any_source_continues(source: str, graph: str) -> None:
    def make() -> Pipeline:
        return GRAPHS[graph](Pipeline(SOURCES[source](), seed=11))

    assert run_in_parts(make, NUM_STOPS, 2) == whole(make)


@pytest.mark.timeout(180)  # processes are started seven times
def test_processes_continue_with_the_draws_of_threads() -> None:
    def make(where: Any) -> Pipeline:
        return Pipeline(range(30), seed=2).map(functions.draw, concurrency=2, on=where).batch(4)

    assert run_in_parts(lambda: make("process"), 6, 3) == whole(lambda: make("thread"))


@pytest.mark.slow
def test_processes_draw_other_numbers_in_each_epoch_in_order_of_completion() -> None:
    pipeline = Pipeline(range(30), seed=2).map(functions.draw, concurrency=2, on="process", output_order="completion")
    first, second = sorted(pipeline), sorted(pipeline)
    assert [number for number, _ in first] == [number for number, _ in second] == list(range(30))
    assert {value for _, value in first}.isdisjoint(value for _, value in second)


def test_a_source_with_a_state_is_not_pulled_from_the_beginning() -> None:
    pipeline = Pipeline(Counted(1000)).map(functions.plus_one, concurrency=2)
    iterator = iter(pipeline)
    assert [next(iterator) for _ in range(700)] == list(range(1, 701))
    state = pipeline.state_dict()
    del iterator
    source = Counted(1000)
    other = Pipeline(source).map(functions.plus_one, concurrency=2)
    other.load_state_dict(state)
    assert list(other) == list(range(701, 1001))
    assert source.num_pulled < 350


class ForAnotherLoader(Numbers):
    """Its `state_dict` is for the loader of its own package, as that of MosaicML's and litData's streams."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        raise AssertionError((num_samples, from_beginning))

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError(state)


def test_a_state_that_needs_arguments_is_not_asked_for() -> None:
    pipeline = Pipeline(ForAnotherLoader(30), continuous=True)
    first = list(itertools.islice(pipeline, 20))
    with Pipeline(ForAnotherLoader(30), continuous=True) as resumed:
        resumed.load_state_dict(pipeline.state_dict())
        assert first + list(resumed) == list(resumed) == list(range(30))
    pipeline.close()


def test_a_sequence_is_not_pulled_from_the_beginning() -> None:
    pipeline = Pipeline(range(10**9)).map(functions.plus_one)
    pipeline.load_state_dict({**pipeline.state_dict(), "epoch": 4, "place": [10**9 - 2], "sources": [None]})
    assert list(pipeline) == [10**9 - 1, 10**9]
    assert pipeline.state_dict()["epoch"] == 5


def test_a_loader_is_a_source() -> None:
    pipeline = Pipeline(DataLoader(list(range(20)), batch_size=4)).map(lambda batch: batch.tolist())  # type: ignore[arg-type]
    assert list(pipeline) == [list(range(first, first + 4)) for first in range(0, 20, 4)]


def test_set_epoch_after_loading_keeps_the_place_of_the_saved_epoch_only() -> None:
    pipeline = Pipeline(range(10), seed=1).shuffle(4)
    epochs = [list(pipeline) for _ in range(3)]
    pipeline.set_epoch(1)
    iterator = iter(pipeline)
    assert [next(iterator) for _ in range(3)] == epochs[1][:3]
    state = pipeline.state_dict()
    pipeline.load_state_dict(state)
    pipeline.set_epoch(1)
    assert list(pipeline) == epochs[1][3:]
    pipeline.load_state_dict(state)
    pipeline.set_epoch(2)
    assert list(pipeline) == epochs[2]


@pytest.mark.parametrize("continuous", [False, True])
def test_at_the_end_of_an_epoch_a_resume_begins_the_next_one_unless_that_epoch_is_asked_for(continuous: bool) -> None:
    def make() -> Pipeline:
        return Pipeline(range(10), seed=1, continuous=continuous).shuffle(4)

    with make() as pipeline:
        epochs = [list(pipeline) for _ in range(3)]
    with make() as pipeline:
        iterator = iter(pipeline)
        for _ in range(10):  # as one does who knows the length
            next(iterator)
        state = pipeline.state_dict()
    with make() as resumed:
        resumed.load_state_dict(state)
        assert list(resumed) == epochs[1]
        assert list(resumed) == epochs[2]
    with make() as resumed:
        resumed.load_state_dict(state)
        resumed.set_epoch(0)
        assert list(resumed) == []
        assert list(resumed) == epochs[1]


def test_an_iterator_begins_with_its_first_item() -> None:
    pipeline = Pipeline(range(10), seed=1).shuffle(4)
    epochs = [list(pipeline) for _ in range(3)]
    other = Pipeline(range(10), seed=1).shuffle(4)
    iter(other)  # frameworks do so to see whether it can be iterated over
    iterator = iter(other)
    assert [next(iterator) for _ in range(3)] == epochs[0][:3]
    iterator = iter(other)
    assert other.state_dict()["epoch"] == 0
    state = other.state_dict()
    other.set_epoch(2)
    assert list(iterator) == epochs[2]
    iterator = iter(other)
    other.load_state_dict(state)
    assert list(iterator) == epochs[0][3:]
    assert list(iterator) == []
    assert list(other) == epochs[1]


def test_an_error_of_the_beginning_comes_with_the_first_item_and_stays() -> None:
    class Refusing(Counted):
        def load_state_dict(self, state: dict[str, int]) -> None:
            raise LookupError("no such state")

    pipeline = Pipeline(Refusing(9)).batch(2)
    iterator = iter(pipeline)
    next(iterator)
    state = pipeline.state_dict()
    pipeline.load_state_dict(state)
    iterator = iter(pipeline)
    for _ in range(2):
        with pytest.raises(LookupError, match="no such state"):
            next(iterator)


def test_in_order_of_completion_a_state_is_had_between_epochs_only() -> None:
    pipeline = Pipeline(range(9)).map(functions.plus_one, concurrency=2, output_order="completion")
    assert pipeline.state_dict()["epoch"] == 0
    iterator = iter(pipeline)
    next(iterator)
    with pytest.raises(StateMismatch, match="output_order='completion'"):
        pipeline.state_dict()
    list(iterator)
    state = pipeline.state_dict()
    assert (state["epoch"], state["place"]) == (1, None)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"place": [3, 1]}, "0 stages that count"),
        ({"place": [-1]}, "must be a count"),
        ({"place": [3], "sources": [[3, {}]]}, "no load_state_dict"),
        ({"seed": 99}, "seed=99"),
    ],
)
def test_a_state_of_another_pipeline_is_refused(state: dict[str, Any], told: str) -> None:
    pipeline = Pipeline(range(9), seed=1)
    before = pipeline.state_dict()
    with pytest.raises(StateMismatch, match=told):
        pipeline.load_state_dict({**before, **state})
    assert pipeline.state_dict() == before


@pytest.mark.parametrize("shuffles", [False, True])
@pytest.mark.parametrize("num_taken", [1, 33, 60, 61])
def test_a_stream_of_hugging_face_continues_and_has_whole_epochs_after_that(shuffles: bool, num_taken: int) -> None:
    """Its state leaves out the shuffle buffer, and once it has loaded one, it begins there in each pass."""
    datasets = pytest.importorskip("datasets")

    def make() -> Pipeline:
        stream = datasets.Dataset.from_dict({"a": [*range(60)]}).to_iterable_dataset(num_shards=3)
        return Pipeline(stream.shuffle(seed=1, buffer_size=10) if shuffles else stream).map(itemgetter("a"))

    pipeline, whole = make(), list(make())
    taken = list(itertools.islice(pipeline, num_taken))
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(pipeline.state_dict())))
    assert (taken + list(resumed))[-60:] == list(resumed) == list(resumed) == whole


def fifths_fail(number: int) -> int:
    return number // bool(number % 5)


def no_fifths(number: int) -> Any:
    return number if number % 5 else None


Sharing = Callable[[int, int], Pipeline]

ANY_RANKS: dict[str, Sharing] = {
    "batch": lambda *ranks: Pipeline(range(96)).shard(*ranks).batch(4),
    "threads": lambda *ranks: Pipeline(range(96)).shard(*ranks).map(functions.uneven, concurrency=2).prefetch(2),
    "uneven": lambda *ranks: Pipeline(range(96)).shard(*ranks, equal=False).batch(2),
    "shuffled before": lambda *ranks: Pipeline(range(97), seed=1).shuffle(9).filter(bool).shard(*ranks),
    "unbatched before": lambda *ranks: Pipeline(range(96)).batch(5).unbatch().shard(*ranks).batch(2),
    "twice": lambda rank, num: Pipeline(range(96)).shard(0, 1).shard(rank, num).batch(3),
    "merge": lambda *ranks: Pipeline(range(48)).shard(*ranks).merge(Pipeline(range(48, 96)).shard(*ranks)).batch(2),
}
SAME_NUMBER: dict[str, Sharing] = {
    "shuffle": lambda *ranks: Pipeline(range(96), seed=1).shard(*ranks).shuffle(9).batch(4),
    "inner": lambda *ranks: Pipeline(Pipeline(range(96)).shard(*ranks)).batch(4),
    "cache": lambda *ranks: Pipeline(range(96)).shard(*ranks).cache(48, stop_after=48),
    "joined and shuffled": lambda *ranks: Pipeline.mix(
        [Pipeline(range(48)).shard(*ranks), Pipeline(range(48, 96)).shard(*ranks)], seed=1
    ).shuffle(3),
}
SAME_RANK: dict[str, Sharing] = {
    "filter": lambda *ranks: Pipeline(range(96)).shard(*ranks).filter(no_fifths).batch(4),
    "none": lambda *ranks: Pipeline(range(96)).shard(*ranks).map(no_fifths).drop_none(),
    "skip": lambda *ranks: Pipeline(range(96)).shard(*ranks).map(fifths_fail, on_error="skip").batch(4),
    "unbatch": lambda *ranks: Pipeline(range(96)).shard(*ranks).map(lambda number: [number] * (number % 5)).unbatch(),
    "generator": lambda *ranks: Pipeline(range(96)).shard(*ranks).map(functions.some, concurrency=2).batch(3),
    "inner filter": lambda *ranks: Pipeline(Pipeline(range(96)).shard(*ranks)).filter(no_fifths),
    "uneven merge": lambda *ranks: Pipeline([0]).shard(*ranks, equal=False).merge(Pipeline(range(96)).shard(*ranks)),
}


def continued(make: Sharing, num_before: int, num_after: int, *, gives_own: bool) -> tuple[list[str], list[str]]:
    """Return all items, and those of ranks that are stopped and continue with rank 0's state or with their own."""
    whole, taken, states = list[str](), list[str](), list[Any]()
    for rank in range(num_before):
        pipeline = make(rank, num_before)
        whole += map(str, pipeline)
        pipeline.set_epoch(0)
        taken += map(str, itertools.islice(pipeline, 3))
        states.append(json.loads(json.dumps(pipeline.state_dict())))
    for rank in range(num_after):
        pipeline = make(rank, num_after)
        pipeline.load_state_dict(states[rank if gives_own else 0])
        taken += map(str, pipeline)
    return sorted(re.findall(r"\d+", str(whole))), sorted(re.findall(r"\d+", str(taken)))


SHARING = ANY_RANKS | SAME_NUMBER | SAME_RANK


@pytest.mark.filterwarnings("ignore:.*were left out:swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("ranks", [(2, 2, True), (2, 2, False), (2, 3, False), (4, 1, False)])
@pytest.mark.parametrize("name", SHARING)
def test_on_other_ranks_a_pipeline_continues_exactly_or_refuses(name: str, ranks: tuple[int, int, bool]) -> None:
    num_before, num_after, gives_own = ranks
    is_same = num_before == num_after
    is_exact = name in ANY_RANKS or (is_same and (name in SAME_NUMBER or gives_own))
    with nullcontext() if is_exact else pytest.raises(StateMismatch, match=r"was saved on rank \d of \d, but this is"):
        make = SHARING[name]
        whole, taken = continued(make, num_before, num_after, gives_own=gives_own)
        assert taken == whole


@pytest.mark.filterwarnings("ignore:.*were left out:swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("name", ["filter", "none", "skip", "generator", "shuffle"])
def test_one_rank_continues_on_several_unless_a_stage_counts(name: str) -> None:
    is_exact = name not in ("generator", "shuffle")
    with nullcontext() if is_exact else pytest.raises(StateMismatch, match="rank 0 of 1"):
        whole, taken = continued(SHARING[name], 1, 2, gives_own=False)
        assert taken == whole


@pytest.mark.parametrize(
    ("make", "ranks", "num_taken", "rests"),
    [
        (lambda *ranks: Pipeline(range(10)).shard(*ranks, equal=False), (1, 2), 9, [[9], []]),
        (lambda *ranks: Pipeline(range(7)).shard(*ranks, equal=False).batch(2), (2, 2), 2, [[], []]),
        (lambda *ranks: Pipeline(range(10)).shard(*ranks).filter(lambda number: number != 9), (2, 2), 4, [[8], []]),
        (lambda *ranks: Pipeline(range(10)).shard(*ranks, equal=False), (2, 1), 5, None),
        (lambda *ranks: Pipeline(range(10)).shard(*ranks), (2, 3), 5, None),
        (lambda *ranks: Pipeline(range(10)).shard(*ranks).shuffle(3), (2, 2), 5, None),
    ],
    ids=["uneven", "partial batch", "filter", "one rank", "other ranks", "shuffle"],
)
def test_ranks_begin_the_next_epoch_together(
    make: Sharing, ranks: tuple[int, int], num_taken: int, rests: list[list[int]] | None
) -> None:
    """`rests`: of each rank. None: nothing is left for all, so they begin it at once."""
    num_before, num_after = ranks
    states = []
    for rank in range(num_before):
        pipeline = make(rank, num_before)
        list(itertools.islice(pipeline, num_taken))
        states.append(pipeline.state_dict())
    for rank in range(num_after):
        pipeline = make(rank, num_after)
        pipeline.load_state_dict(states[rank if num_before == num_after else 0])
        if rests is not None:
            assert list(pipeline) == rests[rank]
        assert pipeline.state_dict()["epoch"] == (rests is not None)
        whole = make(rank, num_after)
        whole.set_epoch(1)
        assert list(pipeline) == list(whole)
        assert pipeline.state_dict()["epoch"] == 2


@pytest.mark.parametrize("name", ["shuffle", "filter"])
def test_ranks_that_are_added_or_taken_away_and_states_of_earlier_versions(name: str) -> None:
    make: Sharing = SHARING[name]
    pipeline, alone = make(0, 2), Pipeline(range(96), seed=1).shuffle(9).batch(4)
    next(iter(pipeline))
    state = pipeline.state_dict()
    if name == "shuffle":
        alone.load_state_dict(state)
        with pytest.raises(StateMismatch, match="saved on rank 0 of 2"):
            next(iter(alone))
        next(iter(begun := Pipeline(range(96), seed=1).shuffle(9).batch(4)))
        other = make(0, 2)
        other.load_state_dict(begun.state_dict())
        with pytest.raises(StateMismatch, match="saved on rank 0 of 1"):
            next(iter(other))
    del state["shards"]
    other = make(1, 2)
    other.load_state_dict(state)
    next(iter(other))


def test_a_source_of_epochs_continues_between_epochs() -> None:
    """The source's own state says which epoch is next."""

    class Epochs(Counted):
        epoch = 0

        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                yield 100 * self.epoch + number
            self.epoch += 1

        def state_dict(self) -> dict[str, int]:
            return {**super().state_dict(), "epoch": self.epoch}

        def load_state_dict(self, state: dict[str, int]) -> None:
            super().load_state_dict(state)
            self.epoch = state["epoch"]

    for continuous in (False, True):
        pipeline = Pipeline(Epochs(5), continuous=continuous).map(functions.plus_one)
        assert [list(pipeline), list(pipeline)] == [[1, 2, 3, 4, 5], [101, 102, 103, 104, 105]]
        resumed = Pipeline(Epochs(5), continuous=continuous).map(functions.plus_one)
        resumed.load_state_dict(pipeline.state_dict())
        iterator = iter(resumed)
        assert [next(iterator) for _ in range(2)] == [201, 202]
        state = resumed.state_dict()
        again = Pipeline(Epochs(5), continuous=continuous).map(functions.plus_one)
        again.load_state_dict(state)
        assert list(again) == [203, 204, 205]
        pipeline.close()
        resumed.close()
        again.close()


def test_a_source_that_was_told_its_epoch_is_told_it_again() -> None:
    dataset: Any = range(8)

    def make(*, continuous: bool) -> Pipeline:
        return Pipeline(DistributedSampler(dataset, 1, 0, seed=0), continuous=continuous).batch(2)

    for continuous in (False, True):
        pipeline = make(continuous=continuous)
        pipeline.set_epoch(2)
        expected = list(pipeline)
        pipeline.set_epoch(2)
        iterator = iter(pipeline)
        first = [next(iterator)]
        resumed = make(continuous=continuous)
        resumed.load_state_dict(json.loads(json.dumps(pipeline.state_dict())))
        assert first + list(resumed) == expected
        for one in (pipeline, resumed):
            one.close()


@pytest.mark.parametrize("is_over", [False, True])
def test_what_is_told_after_loading_counts_more_than_what_the_state_says(is_over: bool) -> None:
    def make() -> Pipeline:
        return Pipeline(DistributedSampler(dataset, 1, 0, seed=0))

    dataset: Any = range(8)
    pipeline = make()
    pipeline.set_epoch(1)
    expected = list(pipeline)
    pipeline.set_epoch(0)
    iterator = iter(pipeline)
    for _ in range(8):
        next(iterator)
    assert next(iterator, None) is None or not is_over
    resumed = make()
    resumed.load_state_dict(pipeline.state_dict())
    resumed.set_epoch(1)
    assert list(resumed) == expected
    resumed.set_epoch(5)
    state = resumed.state_dict()
    assert state["epoch"] == 5
    again = make()
    again.load_state_dict(state)
    assert list(again) == list(resumed)


def test_a_state_that_the_source_goes_on_changing_is_kept_as_it_was() -> None:
    class Live(Counted):
        def __init__(self, num: int) -> None:
            super().__init__(num)
            self.state: dict[str, int] = {}

        def state_dict(self) -> dict[str, int]:
            self.state.update(super().state_dict())
            return self.state

    pipeline = Pipeline(Live(100)).map(functions.plus_one, concurrency=4, buffer_size=30)
    iterator = iter(pipeline)
    first = [next(iterator) for _ in range(20)]
    resumed = Pipeline(Live(100)).map(functions.plus_one)
    resumed.load_state_dict(pipeline.state_dict())
    del iterator
    assert first + list(resumed) == list(range(1, 101))


def test_in_the_midst_of_an_item_a_pipeline_continues_twice() -> None:
    def make() -> Pipeline:
        return Pipeline(OwnEpochs(9)).map(functions.some)

    expected, pipeline = whole(make)[1], make()
    list(pipeline)
    got: list[Any] = []
    for _ in range(len(expected)):
        iterator = iter(pipeline)
        got.append(next(iterator))
        state = pipeline.state_dict()
        del iterator
        pipeline = make()
        pipeline.load_state_dict(state)
        pipeline.set_epoch(state["epoch"])  # nothing may be left of it
    assert got == expected


def test_few_states_of_a_source_are_kept_where_only_the_beginning_counts() -> None:
    pipeline = Pipeline(Counted(40_000)).shuffle(10)
    for number, _ in enumerate(pipeline):
        if number % 1000 == 0:
            assert pipeline._epochs.position is not None
            assert all(len(states._states) <= 1024 for states in pipeline._epochs.position.sources)
    assert pipeline._epochs.state().sources


def test_a_source_without_order_has_no_state_in_the_middle() -> None:
    """A pipeline as the source of another one."""
    inner = StageLoader(range(50), preprocessor=functions.uneven, num_threads=2)
    outer = Pipeline(inner).map(functions.plus_one)
    assert sorted(outer) == list(range(1, 51))
    iterator = iter(outer)
    next(iterator)
    with pytest.raises(StateMismatch, match="output_order='completion'"):
        outer.state_dict()
    assert len(list(iterator)) == 49
    resumed = Pipeline(StageLoader(range(50), preprocessor=functions.uneven)).map(functions.plus_one)
    resumed.load_state_dict(outer.state_dict())
    assert len(list(resumed)) == 50


@pytest.mark.filterwarnings("ignore:.*were left out:swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("limits", [(7, None), (None, 7), (6, None), (None, 6)])
def test_what_was_left_out_counts_after_a_resume(limits: tuple[int | None, int | None]) -> None:
    def odd(number: int) -> int:
        return number // (number % 2)

    def make() -> Pipeline:
        source = Pipeline(range(14), max_errors=limits[1])
        left = source.map(odd, concurrency=3, on_error="skip", max_errors=limits[0])
        return left.map(functions.some).prefetch(2)

    got, state = list[Any](), make().state_dict()
    with nullcontext() if 7 in limits else pytest.raises(TooManyErrors, match="7 items"):
        for _ in range(7):
            pipeline = make()
            pipeline.load_state_dict(json.loads(json.dumps(state)))
            got += itertools.islice(pipeline, 1)
            state = pipeline.state_dict()
    assert got == [pair for number in range(1, 14, 2) for pair in functions.some(number)][: len(got)]


@pytest.mark.filterwarnings("ignore:.*were left out:swift_loader.SwiftLoaderWarning")
def test_what_was_left_out_counts_after_a_joined_pipeline_has_ended() -> None:
    def odd(number: int) -> int:
        return number // (number % 2)

    def make() -> Pipeline:
        left, ended = (Pipeline(range(num)).map(functions.plus_one, on_error="skip") for num in (30, 2))
        return left.merge(ended.merge(ended)).map(odd, on_error="skip", max_errors=20)

    state = make().state_dict()
    for num, count in ((4, 1), (2, 5), (2, 7), (2, 9)):
        pipeline = make()
        pipeline.load_state_dict(state)
        list(itertools.islice(pipeline, num))
        state = pipeline.state_dict()
        assert state["failures"] == [0, 0, 0, count]


def test_a_pipeline_is_pickled_with_its_place() -> None:
    pipelines = (
        Pipeline(range(30)).shuffle(9).map(functions.plus_one).batch(4),
        StageLoader(range(30), preprocessor=functions.plus_one, batch_size=4, output_order="input"),
    )
    for pipeline in pipelines:
        again = pickle.loads(pickle.dumps(pipeline))
        assert type(again) is type(pipeline)
        assert list(again) == list(pipeline)
        next(iter(pipeline))
        assert list(pickle.loads(pickle.dumps(pipeline))) == list(again)[1:]


class Named(Pipeline):
    """It gets attributes of its own."""


def test_a_pickle_has_the_attributes_of_a_subclass_and_no_executor() -> None:
    named = Named(range(3))
    given = {letter: letter * 2 for letter in "nameorder"}
    vars(named).update(given)
    assert [pair for pair in vars(pickle.loads(pickle.dumps(named))).items() if pair in given.items()] == [
        *given.items()
    ]
    pipeline = Pipeline(range(3)).map(abs, executor=ThreadPoolExecutor(1))
    with pytest.raises(TypeError, match=r"stage 'abs' has executor=.*, which can't be pickled or copied"):
        pickle.dumps(pipeline)
    assert list(copy.copy(pipeline)) == [0, 1, 2]


def test_other_parameters_are_refused() -> None:
    pipeline = Pipeline(range(30), seed=1).shuffle(5)
    next(iter(pipeline))
    state = pipeline.state_dict()
    with pytest.raises(StateMismatch, match=r"buffer of 5.*this one has 'shuffle, buffer of 20'"):
        Pipeline(range(30), seed=1).shuffle(20).load_state_dict(state)


class Indexed:
    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> int:
        return index


class Both(Indexed):
    """It is iterated over as well, as a dataset of Hugging Face."""

    def __iter__(self) -> Iterator[int]:
        return (self[number] for number in range(self.num))


class Stating(Indexed):
    """It has a state, too, for its own loader."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


class Hinted:
    """It is only iterated over, so its length is a hint."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[int]:
        return iter(range(30))


class Unready(Hinted, Indexed):
    def __len__(self) -> int:
        raise RuntimeError("no shard is open")


class Growing(Indexed):
    """It has another length in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num + 2 * self.epoch

    def __getitem__(self, index: int) -> int:
        return 1000 * self.epoch + index


@pytest.mark.parametrize("num_taken", [0, 7, 30, 31])
@pytest.mark.parametrize(
    "make_source", [range, Indexed, Both, Stating, np.arange, torch.arange, Growing, Hinted, Unready]
)
def test_a_source_of_another_length_is_refused_if_its_index_is_the_place(
    make_source: Callable[[int], Any], num_taken: int
) -> None:
    def make(num: int) -> Pipeline:
        return Pipeline(Numbers(5)).merge(Pipeline(make_source(num), seed=1).shuffle(9)).map(functions.plus_one)

    pipeline, is_place = make(25), make_source not in (Hinted, Unready)
    taken = list(itertools.islice(pipeline, num_taken))
    state = json.loads(json.dumps(pipeline.state_dict()))
    for num in (20, 30):
        other = make(num)
        other.load_state_dict(state)
        in_middle = is_place and len(taken) == num_taken > 0
        words = f"a source with 25 items, but this {type(make_source(num)).__name__} has {num},"
        for _ in range(2):
            with pytest.raises(StateMismatch, match=words) if in_middle else nullcontext():
                next(iter(other), None)
    del state["lengths"]  # as in states of earlier versions
    other.load_state_dict(state)
    assert next(iter(other)) < 40


class Reading(Both):
    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(index)


class Names(Reading):
    """Its index isn't one of positions."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index.removeprefix("name"))

    def __iter__(self) -> Iterator[Any]:
        return (f"name{number}" for number in range(self.num))


class Backwards(Reading):
    def __iter__(self) -> Iterator[Any]:
        return reversed([self[number] for number in range(self.num)])  # type: ignore[call-overload]


class Parts(Reading):
    """It is iterated over in lists of two."""

    def __iter__(self) -> Iterator[Any]:
        return ([self[number]] * 2 for number in range(self.num))


class Shared(IterableDataset[int], Reading):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        return (number for number in range(self.num) if number % 5 < 4)


SEEKING: dict[str, tuple[Callable[[], Any], bool]] = {
    "both": (lambda: Reading(100), True),
    "names": (lambda: Names(100), False),
    "backwards": (lambda: Backwards(100), False),
    "parts": (lambda: Parts(100), False),
    "stream": (lambda: Shared(100), False),
    "dict": (lambda: dict.fromkeys(range(1, 101)), False),
    "series": (lambda: pytest.importorskip("pandas").Series(range(1, 101), index=range(100, 0, -1)), False),
    "array": (lambda: np.arange(200).reshape(100, 2), True),
    "tensor": (lambda: torch.arange(100), True),
    "datasets": (lambda: pytest.importorskip("datasets").Dataset.from_dict({"a": [*range(100)]}), True),
    "columns": (lambda: pytest.importorskip("datasets").Dataset.from_dict({"a": [*range(100)]})["a"], True),
}


@pytest.mark.parametrize("name", SEEKING)
@pytest.mark.parametrize("num_taken", [1, 70])
def test_what_has_an_index_and_is_iterated_over_continues_by_the_index_if_they_agree(name: str, num_taken: int) -> None:
    make, seeks = SEEKING[name]
    expected = [str(item) for item in make()]
    pipeline = Pipeline(make())
    list(itertools.islice(pipeline, num_taken))
    source = make()
    resumed = Pipeline(source)
    resumed.load_state_dict(json.loads(json.dumps(pipeline.state_dict())))
    assert [str(item) for item in resumed] == expected[num_taken:]
    if isinstance(source, Reading) and seeks:
        assert source.num_read == 100 - num_taken + 4
    assert [str(item) for item in resumed] == expected


@pytest.mark.parametrize("continuous", [False, True])
def test_a_source_whose_length_depends_on_the_epoch_resumes(continuous: bool) -> None:
    def make() -> Pipeline:
        return Pipeline(Growing(5), continuous=continuous, seed=1).map(functions.plus_one, concurrency=2)

    pipeline = make()
    pipeline.set_epoch(1)
    for epoch in (1, 2):
        if not continuous:
            pipeline.set_epoch(epoch)
        iterator = iter(pipeline)
        begun = [next(iterator) for _ in range(4)]
        resumed = make()
        resumed.load_state_dict(pipeline.state_dict())
        whole = begun + list(iterator)
        assert begun + list(resumed) == whole == [1000 * epoch + number for number in range(1, 6 + 2 * epoch)]


@pytest.mark.parametrize("again", ["state", "pickle", "copy"])
def test_a_list_may_grow_between_two_epochs(again: str) -> None:
    items = [*range(5)]
    pipeline = Pipeline(items)
    assert list(pipeline) == [*range(5)]
    items.append(5)
    if again == "state":
        pipeline.load_state_dict(pipeline.state_dict())
    else:
        pipeline = pickle.loads(pickle.dumps(pipeline)) if again == "pickle" else copy.deepcopy(pipeline)
    assert list(pipeline) == [*range(6)]


def test_a_state_of_an_epochs_end_continues_with_other_parameters_which_the_next_state_has() -> None:
    before, after = (Pipeline(range(30), seed=1).shuffle(num) for num in (5, 20))
    list(before)
    after.load_state_dict(before.state_dict())
    iterator = iter(after)
    begun = [next(iterator) for _ in range(7)]
    state = after.state_dict()
    whole = begun + list(iterator)
    with pytest.raises(StateMismatch, match=r"buffer of 20"):
        Pipeline(range(30), seed=1).shuffle(5).load_state_dict(state)
    resumed = Pipeline(range(30), seed=1).shuffle(20)
    resumed.load_state_dict(state)
    assert begun + list(resumed) == whole


@pytest.mark.parametrize("graph", ["merge", "inside"])
def test_a_join_in_order_of_completion_has_no_state_in_the_middle(graph: str) -> None:
    unordered = Pipeline(range(9)).map(functions.plus_one, output_order="completion")
    joined = {
        "merge": lambda: Pipeline(range(9)).merge(Pipeline(range(9)), output_order="completion"),
        "inside": lambda: Pipeline(range(9)).merge(unordered),
    }[graph]()
    next(iter(joined))
    with pytest.raises(StateMismatch, match="output_order='completion'"):
        joined.state_dict()


def test_branches_draw_apart_and_by_their_own_seeds() -> None:
    def merged(seed: int) -> list[int]:
        return list(Pipeline(range(20), seed=1).shuffle(9).merge(Pipeline(range(20), seed=seed).shuffle(9)))

    both = merged(2)
    assert both[::2] != both[1::2]
    assert merged(3)[1::2] != both[1::2]
    assert merged(3)[::2] == both[::2]


def test_an_iterator_that_has_given_items_takes_no_state() -> None:
    pipeline = Pipeline(iter(range(20)))
    iterator = iter(pipeline)
    assert [next(iterator) for _ in range(5)] == list(range(5))
    pipeline.load_state_dict(pipeline.state_dict())
    with (
        pytest.warns(SwiftLoaderWarning, match="only once"),
        pytest.raises(StateMismatch, match=r"is an iterator .* can't go back to a state"),
    ):
        list(pipeline)
