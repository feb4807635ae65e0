"""set_epoch of a pipeline reaches its sources, wherever they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from swift_loader.pipeline import Pipeline
from tests.support.helpers import exhaustive
from tests.support.interrupting import NEVER, Interrupt, Points, call


class OfEpochs:
    """A source whose items say the epoch that it was told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[str, int]]:
        yield self.name, self.epoch


JOINED: dict[str, Callable[[Pipeline, Pipeline], Pipeline]] = {
    "in turn": lambda one, other: one.merge(other),
    "as ready": lambda one, other: one.merge(other, output_order="completion"),
    "mixed": lambda one, other: Pipeline.mix([one, other], [1, 3]),
    "mixed, of merged ones": lambda one, other: Pipeline.mix([one.merge(other)]),
}


@pytest.mark.parametrize("join", JOINED)
def test_set_epoch_reaches_the_sources_inside_joined_pipelines(join: str) -> None:
    one, other = Pipeline(OfEpochs("one")), Pipeline(OfEpochs("other")).map(lambda item: item)
    pipeline = JOINED[join](one.shuffle(2), other).prefetch(2)
    for epoch in (5, 2):
        pipeline.set_epoch(epoch)
        assert sorted(pipeline) == [("one", epoch), ("other", epoch)]


def test_a_source_without_set_epoch_needs_none() -> None:
    pipeline = Pipeline(range(3)).merge(Pipeline(OfEpochs("one")))
    pipeline.set_epoch(4)
    assert list(pipeline) == [0, ("one", 4), 1, 2]


@pytest.mark.parametrize("wrong", [range(3), None])
def test_what_is_no_pipeline_cannot_be_joined(wrong: object) -> None:
    for join in (Pipeline(range(2)).merge, lambda other: Pipeline.mix([other])):
        with pytest.raises(TypeError, match="can't be merged or mixed; make a Pipeline of it"):
            join(wrong)  # type: ignore[arg-type]


def sampler_of_one_rank() -> Any:
    dataset: Any = range(20)
    return DistributedSampler(dataset, 1, 0, seed=0)


def orders_of(num_epochs: int) -> list[list[int]]:
    sampler = sampler_of_one_rank()
    found = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


def continuous() -> Pipeline:
    return Pipeline(sampler_of_one_rank(), continuous=True).map(lambda number: number, concurrency=2).prefetch(3)


def test_a_continuous_source_is_told_the_epochs_that_it_goes_on_with() -> None:
    expected = orders_of(6)
    with continuous() as pipeline:
        assert list(pipeline) == expected[0]
        pipeline.set_epoch(1)  # it has gone on without being told
        assert list(pipeline) == expected[1]
        for epoch in (2, 3, 3, 5, 0):
            pipeline.set_epoch(epoch)
            assert list(pipeline) == expected[epoch]


def test_a_loop_that_is_left_goes_on_with_the_epoch_that_is_set() -> None:
    expected = orders_of(4)
    with continuous() as pipeline:
        for epoch in (1, 2, 3):
            pipeline.set_epoch(epoch)
            assert next(iter(pipeline)) == expected[epoch][0]


def test_of_two_loops_at_the_same_time_each_is_an_epoch_and_the_next_one_follows() -> None:
    def make() -> Pipeline:
        return Pipeline(range(6), continuous=True, seed=1).shuffle(6)

    with make() as whole:
        expected = [list(whole) for _ in range(4)]
    with make() as pipeline:
        one, other = iter(pipeline), iter(pipeline)
        first, second = [next(one)], [next(other)]
        second += other
        first += one
        assert [first, second, list(pipeline), list(pipeline)] == expected


@pytest.mark.parametrize("on", ["thread", "coroutine", exhaustive("process")])
def test_in_order_of_completion_the_results_of_generators_stay_in_their_epoch(on: str) -> None:
    def some(number: int) -> Iterator[tuple[int, int]]:
        for index in range(number % 4):
            time.sleep(0.001 * (number % 3))
            yield number, index

    async def some_later(number: int) -> AsyncIterator[tuple[int, int]]:
        for index in range(number % 4):
            await asyncio.sleep(0.001 * (number % 3))
            yield number, index

    function: Any = some_later if on == "coroutine" else some
    options: dict[str, Any] = {"on": None if on == "coroutine" else on}
    expected = sorted((number, index) for number in range(30) for index in range(number % 4))
    source = Pipeline(range(30), continuous=True)
    with source.map(function, concurrency=5, output_order="completion", **options).batch(4).unbatch() as pipeline:
        for _ in range(5):
            assert sorted(pipeline) == expected


@pytest.mark.parametrize("join", JOINED)
def test_joined_sources_may_go_through_generators_in_order_of_completion(join: str) -> None:
    def twice(number: int) -> Iterator[int]:
        yield number
        yield number

    joined = JOINED[join](Pipeline(range(5)), Pipeline(range(5, 9)))
    pipeline = joined.map(twice, concurrency=3, output_order="completion")
    for _ in range(2):
        assert sorted(pipeline) == sorted([*range(9), *range(9)])


def test_an_interrupt_at_the_end_of_an_epoch_leaves_the_next_one_whole() -> None:
    with Pipeline(range(3), continuous=True) as pipeline:
        assert list(pipeline) == [0, 1, 2]
        iterator, points = iter(pipeline), Points(NEVER)
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(StopIteration):
            call(iterator.__next__, points, Interrupt)
        for at in range(points.count):
            iterator = iter(pipeline)
            assert [next(iterator) for _ in range(3)] == [0, 1, 2]
            with suppress(Interrupt, StopIteration):
                call(iterator.__next__, Points(at), Interrupt)
            assert list(iterator) == [], f"interrupted at point {at}"
        assert list(pipeline) == [0, 1, 2]


@pytest.mark.parametrize("is_left", [False, True])
def test_an_epoch_that_is_named_while_it_runs_is_repeated_only_if_the_loop_leaves_it(is_left: bool) -> None:
    pipeline = Pipeline(range(64), seed=0).shuffle(64)
    items = iter(pipeline)
    first = next(items)
    pipeline.set_epoch(0)
    assert is_left or sorted([first, *items]) == [*range(64)]
    assert pipeline.state_dict()["epoch"] == 1 - is_left
    assert (next(iter(pipeline)) == first) is is_left
    assert pipeline.state_dict()["epoch"] == 1 - is_left


def test_the_saved_epoch_continues_at_its_place_though_another_one_was_set_before() -> None:
    pipeline, resumed = Pipeline(range(4)), Pipeline(range(4))
    assert next(iter(pipeline)) == 0
    resumed.load_state_dict(pipeline.state_dict())
    for epoch in (9, 0):
        resumed.set_epoch(epoch)
    assert [*resumed] == [1, 2, 3]
