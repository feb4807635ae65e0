"""Pipelines: what comes out, in which order, and what becomes of errors."""

from __future__ import annotations

import asyncio
import csv
import functools
import io
import itertools
import json
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from swift_loader import RemoteTraceback, SwiftLoaderWarning, TooManyErrors, WorkerStalled
from swift_loader.pipeline import ItemFailure, Pipeline
from swift_loader.report.report import Report
from tests.support import stage_functions as functions
from tests.support.helpers import set_environ
from tests.support.stage_functions import FUNCTIONS, AsyncNumbers, Numbers

NUM = 60


def flat(lists: Iterator[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_come_in_the_order_of_the_input(name: str, concurrency: int) -> None:
    function, where, expected = FUNCTIONS[name]
    pipeline = Pipeline(range(NUM)).map(function, concurrency=concurrency, on=where)
    for _ in range(2):
        assert list(pipeline) == flat(expected(number) for number in range(NUM))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_order_of_completion_all_results_come_once(name: str) -> None:
    function, where, expected = FUNCTIONS[name]
    pipeline = Pipeline(range(NUM)).map(function, concurrency=3, on=where, output_order="completion")
    assert sorted(pipeline) == sorted(flat(expected(number) for number in range(NUM)))


def test_a_slow_item_holds_nobody_up_in_order_of_completion() -> None:
    released = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            released.wait(10)
        return number

    got: list[int] = []
    for number in Pipeline(range(20)).map(work, concurrency=2, output_order="completion"):
        got.append(number)
        if len(got) == 10:
            released.set()
    assert sorted(got) == list(range(20))
    assert 0 not in got[:10]


@pytest.mark.parametrize(
    "source", [range(NUM), Numbers(NUM), AsyncNumbers(NUM), list(range(NUM))], ids=lambda source: type(source).__name__
)
def test_any_iterable_is_a_source(source: Any) -> None:
    pipeline = Pipeline(source).map(functions.plus_one, concurrency=2)
    for _ in range(2):
        assert list(pipeline) == list(range(1, NUM + 1))


def test_stages_follow_each_other() -> None:
    pipeline = (
        Pipeline(range(NUM))
        .map(functions.async_plus_one, concurrency=4)
        .filter(lambda number: number % 2 == 0)
        .map(functions.some, concurrency=2)
        .batch(4)
        .unbatch()
        .map(lambda pair: pair[0], concurrency=2)
        .batch(7, drop_last=True)
        .prefetch(2)
    )
    numbers = flat([number] * (number % 3) for number in range(2, NUM + 1, 2))
    assert list(pipeline) == [numbers[first : first + 7] for first in range(0, len(numbers) - 6, 7)]


def test_arrays_come_from_processes_whole_and_stay() -> None:
    kept = list(Pipeline(range(30)).map(functions.array_of, concurrency=2, on="process"))
    for number, sample in enumerate(kept):
        assert sample["id"] == number
        assert np.array_equal(sample["pixels"], np.full((50, 40), number, np.uint8))


def test_a_pipeline_is_not_changed_by_its_methods() -> None:
    first = Pipeline(range(4))
    second = first.map(functions.plus_one)
    assert (list(first), list(second)) == ([0, 1, 2, 3], [1, 2, 3, 4])


@pytest.mark.parametrize("output_order", ["input", "completion"])
def test_a_continuous_pipeline_ends_each_epoch_and_works_ahead(output_order: Any) -> None:
    pipeline = Pipeline(range(7), continuous=True).map(functions.uneven, concurrency=3, output_order=output_order)
    with pipeline.batch(3).prefetch(1) as batches:
        for _ in range(3):
            got = list(batches)
            assert [len(batch) for batch in got] == [3, 3, 1]
            assert sorted(flat(iter(got))) == list(range(7))
        for _ in batches:
            break
        assert sorted(flat(iter(batches))) == list(range(7))


def test_pipelines_are_merged_and_mixed() -> None:
    parts = [Pipeline([(size, number) for number in range(size)]) for size in (5, 2, 3)]
    expected = sorted((size, number) for size in (5, 2, 3) for number in range(size))
    merged = list(parts[0].merge(*parts[1:]))
    assert [size for size, _ in merged] == [5, 2, 3, 5, 2, 3, 5, 3, 5, 5]
    assert sorted(merged) == expected
    assert sorted(parts[0].merge(*parts[1:], output_order="completion")) == expected
    mixed = Pipeline.mix(parts, [1, 2, 3], seed=1)
    assert sorted(mixed) == expected
    assert len(mixed) == 10


@pytest.mark.parametrize("output_order", ["input", "completion"])
@pytest.mark.parametrize("function", [functions.plus_one, functions.some, functions.async_plus_one])
@pytest.mark.parametrize(("concurrency", "buffer_size"), [(1, 0), (2, 0), (1, 3)])
def test_a_stage_pulls_no_more_than_it_works_on_and_keeps(
    function: Any, concurrency: int, buffer_size: int, output_order: Any
) -> None:
    num_done, ahead = 0, list[int]()

    def source() -> Iterator[int]:
        for number in range(NUM):
            ahead.append(number + 1 - num_done)
            yield number

    options: dict[str, Any] = {"concurrency": concurrency, "buffer_size": buffer_size, "output_order": output_order}
    with Pipeline(source()).map(function, **options) as pipeline:
        for result in pipeline:
            # Every third item of the generator has no result, so it isn't known to be done.
            num_done = max(num_done, result[0] + 1 if function is functions.some else result)
    assert max(ahead) <= concurrency + buffer_size + 1 + 3 * (function is functions.some)


def test_prefetch_pulls_no_more_than_it_keeps() -> None:
    ahead, num_done = list[int](), 0

    def source() -> Iterator[int]:
        for number in range(NUM):
            ahead.append(number + 1 - num_done)
            yield number

    with Pipeline(source()).prefetch(1) as pipeline:
        for number in pipeline:
            num_done = number + 1
    assert max(ahead) <= 2


def test_a_cache_pulls_no_more_than_it_keeps() -> None:
    source = functions.Counted(100)
    assert list(Pipeline(source).cache(3, stop_after=8)) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert source.num_pulled == 3
    assert list(Pipeline([]).cache(3)) == []


@pytest.mark.parametrize("buffer_size", [1, 5, 80])
def test_a_shuffle_gives_each_item_once_none_too_early_and_another_order_in_each_epoch(buffer_size: int) -> None:
    pipeline = Pipeline(range(NUM), seed=1).shuffle(buffer_size)
    first, second = list(pipeline), list(pipeline)
    assert sorted(first) == sorted(second) == list(range(NUM))
    assert all(number <= place + buffer_size for place, number in enumerate(first))
    assert (first != second) == (buffer_size > 1)


@pytest.mark.parametrize("equal", [True, False])
def test_ranks_share_the_items(equal: bool) -> None:
    for num in (0, 2, 60, 61):
        parts = [list(Pipeline(Numbers(num)).shard(rank, 3, equal=equal)) for rank in range(3)]
        assert parts == [list(range(rank, num - num % 3 if equal else num, 3)) for rank in range(3)]


def test_ranks_that_shuffle_before_they_share_need_one_seed() -> None:
    parts = [list(Pipeline(Numbers(12), seed=3).shuffle(5).shard(rank, 3)) for rank in range(3)]
    assert sorted([*parts[0], *parts[1], *parts[2]]) == list(range(12))
    mixed = Pipeline.mix([Pipeline(Numbers(3)), Pipeline(Numbers(4))])
    assert sorted([*mixed.shard(0, 3), *mixed.shard(1, 3), *mixed.shard(2, 3)]) == sorted(mixed)[:-1]
    for pipeline in (Pipeline(Numbers(12)).shuffle(5), Pipeline.mix([mixed.shuffle(2)])):
        with pytest.raises(ValueError, match="needs a seed"):
            pipeline.shard(0, 3)
        assert sorted(pipeline.shard(0, 1)) == sorted(pipeline)
    assert len(list(Pipeline(Numbers(12)).shard(0, 3).shuffle(5))) == 4


def test_the_rank_is_asked_for_when_a_pass_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may make its pipelines before it initialises torch.distributed."""

    def be_rank(rank: int, world_size: int) -> None:
        set_environ(monkeypatch, "RANK", str(rank))
        set_environ(monkeypatch, "WORLD_SIZE", str(world_size))

    be_rank(0, 1)
    pipeline, shuffled = Pipeline(range(12)).shard().batch(2), Pipeline(range(12)).shuffle(4).shard()
    be_rank(1, 3)
    assert len(pipeline) == 2
    assert list(pipeline) == [[1, 4], [7, 10]]
    with pytest.raises(ValueError, match="to 3 ranks after shuffle"):
        list(shuffled)
    be_rank(0, 2)
    with pytest.raises(RuntimeError, match=r"had a pass as \['shard 1 of 3, equal'\].*shard 0 of 2"):
        list(pipeline)
    assert list(Pipeline(range(6)).shard(0, 3)) == [0, 3]


def test_the_length_is_known_where_the_source_has_one() -> None:
    pipeline: Pipeline[Any] = Pipeline(range(100), seed=1).map(functions.plus_one).shuffle(5)
    assert len(pipeline.batch(7)) == 15
    assert len(pipeline.batch(7, drop_last=True)) == 14
    assert len(pipeline.shard(0, 3).batch(10)) == 4
    for unknown in (Pipeline(Numbers(5)), pipeline.map(functions.some), pipeline.filter(bool), pipeline.unbatch()):
        with pytest.raises(TypeError, match="isn't known"):
            len(unknown)


def test_draws_are_keyed_by_the_item() -> None:
    def draws(where: Any, concurrency: int) -> list[Any]:
        return list(Pipeline(range(20), seed=4).map(functions.draw, concurrency=concurrency, on=where))

    threads = draws("thread", 3)
    assert threads == draws("thread", 1) == draws("process", 2)
    assert len({value for _, value in threads}) == 20

    def twice(number: int) -> Iterator[Any]:
        yield functions.draw(number)
        yield functions.draw(number)

    for output_order in ("input", "completion"):
        runs = [
            sorted(Pipeline(range(20), seed=4).map(twice, concurrency=3, output_order=output_order)) for _ in range(2)
        ]
        assert runs[0] == runs[1]
        assert len({value for _, value in runs[0]}) == 40


@pytest.mark.parametrize("on", ["thread", "process"])
def test_a_generator_behind_a_decorator_is_known_by_what_it_returns(on: Any) -> None:
    def decorated(number: int) -> Any:
        return functions.some(number)

    def collected(number: int) -> list[Any]:
        return list(functions.some(number))

    lists = [list(functions.some(number)) for number in range(9)]
    for function, expected in ((decorated, flat(iter(lists))), (collected, lists)):
        pipeline = Pipeline(range(9)).map(functools.wraps(functions.some)(function), on=on)
        assert list(pipeline) == expected
        assert "map some" in repr(pipeline)


@pytest.mark.parametrize("output_order", ["input", "completion"])
def test_any_executor_makes_the_calls(output_order: Any) -> None:
    local = threading.local()

    def add(number: int) -> int:
        return number + int(local.value)

    with ThreadPoolExecutor(2, initializer=lambda value: setattr(local, "value", value), initargs=(5,)) as pool:
        pipeline = Pipeline(range(9)).map(add, executor=pool, concurrency=3, output_order=output_order)
        assert sorted(pipeline) == sorted(pipeline) == list(range(5, 14))
        assert "map add, 3 executor calls, in order" in repr(pipeline)
        for wrong in ({"executor": 3}, {"executor": pool, "on": "thread"}):
            with pytest.raises(ValueError, match=r"must be one of concurrent\.futures, for a plain function"):
                Pipeline(range(9)).map(add, **wrong)


def test_what_waits_in_an_executor_is_cancelled(released: threading.Event) -> None:
    begun = []

    def hang(number: int) -> int:
        begun.append(number)
        released.wait(20)
        return number

    with ThreadPoolExecutor(1) as pool:
        pipeline = Pipeline(range(9)).map(hang, executor=pool, concurrency=8, timeout=0.2, on_error="skip")
        with pytest.warns(SwiftLoaderWarning, match="9 of 9 items failed(.|\n)*item 0(.|\n)*WorkerStalled"):
            assert list(pipeline) == []
        with pytest.raises(WorkerStalled):
            list(Pipeline(range(9)).map(hang, executor=pool, concurrency=8).prefetch(1, timeout=0.2))
        released.set()
    assert len(begun) == 1


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["thread", "process", "loop"])
def test_an_error_comes_at_its_item_and_stays(where: Any) -> None:
    function = functions.async_fails_at_five if where == "loop" else functions.fails_at_five
    iterator = iter(Pipeline(range(NUM)).map(function, concurrency=3, on=where).batch(1))
    assert [next(iterator) for _ in range(5)] == [[number] for number in range(5)]
    for _ in range(2):
        with pytest.raises(LookupError, match="number five") as caught:
            next(iterator)
    last: BaseException = caught.value
    while last.__cause__ is not None:
        last = last.__cause__
    assert isinstance(last, RemoteTraceback)
    assert "stage" in str(last)
    assert "item 5" in str(last)
    assert getattr(caught.value, "__notes__", None) in (None, [f"swift_loader: stage '{function.__name__}', at item 5"])


@pytest.mark.parametrize("where", ["thread", "process", "loop"])
def test_items_that_fail_are_left_out_and_reported(where: Any) -> None:
    function = functions.async_fails_at_five if where == "loop" else functions.fails_at_five
    pipeline = Pipeline(range(10)).map(function, concurrency=2, on=where, on_error="skip", name="decode")
    with pytest.warns(
        SwiftLoaderWarning, match=r"1 of 10 items failed in stage 'decode' in epoch 0, and were left out.*item 5"
    ):
        assert list(pipeline) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    report = pipeline.report()
    (failure,) = report["failures"]
    assert failure.exception.__traceback__ is None, "its frames would keep the items"
    assert isinstance(failure, ItemFailure)
    assert (failure.stage, failure.item, type(failure.exception)) == ("decode", 5, LookupError)
    assert report["num_failures"] == 1
    assert isinstance(report, Report)
    assert str(report).splitlines()[1].split(" ", 3)[2] == "decode", "a line for each stage"
    assert json.loads(report.to_json())["failures"] == [repr(failure)]
    with pytest.raises(ValueError, match="a pipeline's report has no batches"):
        _ = report.verdict
    with pytest.warns(SwiftLoaderWarning, match=r"in epoch 1"):
        list(pipeline)
    assert [one.item for one in pipeline.failures] == [5, 5], "those of all passes, as a SwiftLoader's"
    assert pipeline.failures[0] is failure


@pytest.mark.parametrize("output_order", ["input", "completion"])
def test_a_generator_that_fails_keeps_what_it_gave(output_order: Any) -> None:
    pipeline = Pipeline(range(8)).map(
        functions.yields_then_fails, concurrency=2, on_error="skip", output_order=output_order
    )
    with pytest.warns(SwiftLoaderWarning, match="1 of 8 items failed"):
        assert sorted(pipeline) == list(range(8))
    assert pipeline.report()["num_failures"] == 1
    with pytest.raises(LookupError, match="number five"):
        list(Pipeline(range(8)).map(functions.yields_then_fails, concurrency=2, output_order=output_order))


def test_a_function_that_fails_for_all_items_is_told_at_once() -> None:
    takes_two: Any = lambda number, other: number + other  # noqa: E731

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = Pipeline(range(1200)).map(takes_two, on_error="skip", name="add")
        assert list(pipeline) == []
    report = pipeline.report()
    assert (len(report["failures"]), report["num_failures"]) == (1000, 1200)
    early, summary = (str(one.message) for one in caught)
    assert early.startswith("51 of 51 items failed in stage 'add'. The first:")
    assert "missing 1 required positional argument: 'other'" in early
    assert summary.startswith("1200 of 1200 items failed in stage 'add' in epoch 0, and were left out. The first")


def test_each_pass_warns_of_what_it_left_out() -> None:
    pipeline = Pipeline(range(9)).map(functions.fails_at_five, on_error="skip")
    for epoch in range(2):
        with pytest.warns(SwiftLoaderWarning, match=f"1 of 9 items failed .* in epoch {epoch}, "):
            list(pipeline)


def test_one_error_for_many_items_keeps_one_place_and_its_context() -> None:
    error = LookupError("always the same")

    def fail(number: int) -> int:
        try:
            raise KeyError("first")
        except KeyError:
            raise error  # noqa: B904 - its context is to be shown

    with pytest.warns(SwiftLoaderWarning), pytest.raises(TooManyErrors):
        list(Pipeline(range(100)).map(fail, on_error="skip", max_errors=60))
    place = error.__cause__
    assert isinstance(place, RemoteTraceback)
    assert "item 60" in str(place)
    assert getattr(error, "__notes__", None) in (None, ["swift_loader: stage 'fail', at item 60"])
    assert isinstance(place.__cause__, KeyError)


def fails_at(digit: int) -> Callable[[int], int]:
    def fail(number: int) -> int:
        if number % 10 == digit:
            raise LookupError(str(number))
        return number

    return fail


@pytest.mark.filterwarnings("ignore:.*were left out:swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize(
    ("num", "of_stage", "of_all", "told"),
    [
        (300, 2, None, r"3 items failed in stage 'fail', more than max_errors=2; the last one is item 20"),
        (
            300,
            0.09,
            None,
            r"10 of 100 items failed in stage 'fail', more than max_errors=0.09; the last one is item 90",
        ),
        (20, 0.05, None, r"2 of 20 items failed in stage 'fail', more than max_errors=0.05"),
        (300, None, 40, "41 items failed in all stages, more than max_errors=40"),
        (300, 0.3, 0.15, "items failed in all stages, more than max_errors=0.15"),
        (300, 30, 0.3, None),
    ],
)
def test_too_many_failures_end_the_iteration(num: int, of_stage: Any, of_all: Any, told: str | None) -> None:
    pipeline = Pipeline(range(num), max_errors=of_all)
    for digit in range(2):
        pipeline = pipeline.map(fails_at(digit), on_error="skip", max_errors=of_stage)
    if told is None:
        assert len(list(pipeline)) == num * 8 // 10
        return
    with pytest.raises(TooManyErrors, match=told) as caught:
        list(pipeline)
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.filterwarnings("ignore:.*were left out:swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize(("of_stage", "of_all"), [(0.03, None), (None, 0.03)])
def test_a_share_is_one_of_the_items_so_far_in_any_order_and_stage(of_stage: Any, of_all: Any) -> None:
    others_done = threading.Event()

    def late(number: int) -> int:
        if number < 5:
            others_done.wait(20)
            raise LookupError(number)
        if number == 399:
            others_done.set()
        return number

    pipeline = Pipeline(range(400), max_errors=of_all)
    late_ones = pipeline.map(late, concurrency=6, output_order="completion", on_error="skip", max_errors=of_stage)
    assert len(list(late_ones.batch(79))) == 5


@pytest.mark.filterwarnings("ignore:.*were left out:swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("limits", [(1, None), (0.12, None), (None, 2)])
def test_failures_are_counted_anew_in_each_epoch_of_a_continuous_pipeline(limits: Any) -> None:
    pipeline = Pipeline(range(10), continuous=True, max_errors=limits[1])
    for digit in range(2):
        pipeline = pipeline.map(fails_at(digit), on_error="skip", max_errors=limits[0], concurrency=2)
    with pipeline:
        assert [list(pipeline) for _ in range(3)] == [list(range(2, 10))] * 3
    strict = Pipeline(range(10), continuous=True).map(fails_at(3), on_error="skip", max_errors=0.05)
    with pytest.raises(TooManyErrors, match=r"1 of 10 items failed in stage 'fail', more than max_errors=0\.05"):
        list(strict)


def test_an_error_of_the_source_comes_after_its_items() -> None:
    def source() -> Iterator[int]:
        yield from range(5)
        raise LookupError("source")

    got: list[int] = []
    with pytest.raises(LookupError, match="source"):
        got.extend(Pipeline(source()).map(functions.plus_one, concurrency=2).prefetch(2))
    assert got == [1, 2, 3, 4, 5]


def test_a_cancellation_by_the_users_code_is_an_error() -> None:
    async def cancel(number: int) -> int:
        if number == 3:
            raise asyncio.CancelledError
        return number

    async def source() -> AsyncIterator[int]:
        for number in range(9):
            yield await cancel(number)

    class Source:
        def __aiter__(self) -> AsyncIterator[int]:
            return source()

    async def yields(number: int) -> AsyncIterator[int]:
        yield await cancel(number)

    for pipeline in (Pipeline(range(9)).map(cancel, concurrency=2), Pipeline(Source()), Pipeline(range(9)).map(yields)):
        got: list[int] = []
        with pytest.raises(asyncio.CancelledError):
            got.extend(pipeline)
        assert got == [0, 1, 2]


def test_a_function_that_returns_a_coroutine_is_told_so() -> None:
    with pytest.raises(TypeError, match="returned a coroutine, async_plus_one"):
        list(Pipeline(range(3)).map(lambda number: functions.async_plus_one(number + 1)))


class Once:
    """It has one iterator, which doesn't begin anew."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return self.items


def lines(num: int = 20) -> list[str]:
    return [f"{number}\n" for number in range(num)]


def items_of(num: int = 20) -> Iterator[int]:
    yield from range(num)


async def items_later() -> AsyncIterator[int]:
    for number in range(20):
        yield number


ONCE: dict[str, Callable[[], Pipeline]] = {
    "iterator": lambda: Pipeline(iter(range(20))),
    "generator": lambda: Pipeline(items_of()),
    "zip": lambda: Pipeline(zip(range(20), range(20), strict=True)),
    "async generator": lambda: Pipeline(items_later()),
    "file": lambda: Pipeline(io.StringIO("".join(lines()))),
    "reader": lambda: Pipeline(Once(csv.reader(lines()))),
    "same generator": lambda: Pipeline(Once(items_of())),
    "merge": lambda: Pipeline(range(20)).merge(Pipeline(map(str, range(20)))),
    "merge of readers": lambda: Pipeline(range(20)).merge(
        Pipeline(Once(csv.reader(lines()))), output_order="completion"
    ),
    "mix": lambda: Pipeline.mix([Pipeline(items_of()), Pipeline(range(20))]),
    "stages": lambda: Pipeline(Once(map(str, range(20)))).map(str).prefetch(2),
    "continuous": lambda: Pipeline(Once(map(str, range(20))), continuous=True),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_source_that_gives_its_items_once_is_told_at_its_second_epoch(name: str) -> None:
    with ONCE[name]() as pipeline:
        first = list(pipeline)
        with pytest.warns(SwiftLoaderWarning, match="gives its items only once"):
            assert len(list(pipeline)) < len(first)


def test_a_generator_that_is_left_is_told_with_its_rest() -> None:
    pipeline = Pipeline(Once(items_of()))
    next(iter(pipeline))
    with pytest.warns(SwiftLoaderWarning, match="a Once, gives its items only once"):
        assert len(list(pipeline)) == 19


def test_what_begins_anew_is_not_told() -> None:
    class Resetting(Numbers):
        """As loaders whose workers stay, it has one iterator."""

        def __iter__(self) -> Any:
            self.left = super().__iter__()
            return self.reader

        @functools.cached_property
        def reader(self) -> Iterator[int]:
            return Reader(self)

    class Reader(Iterator[int]):
        def __init__(self, numbers: Resetting) -> None:
            self.numbers = numbers

        def __next__(self) -> int:
            return next(self.numbers.left)

    emptied = [1]
    pipeline = Pipeline(emptied).merge(Pipeline(Resetting(4)))
    for number in range(2):
        assert len(list(pipeline)) == 5 - number
        emptied.clear()


def test_a_stop_iteration_of_a_function_is_an_error() -> None:
    def stop(number: int) -> int:
        raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(Pipeline(range(3)).map(stop))


# Ends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_leaving_the_loop_at_any_position_leaves_nothing_behind(name: str, position: int) -> None:
    function, where, _ = FUNCTIONS[name]
    if where == "process" and position % 3:
        return  # a start takes a while
    pipeline = Pipeline(range(NUM)).map(function, concurrency=2, on=where).batch(2).prefetch(2)
    for number, _ in enumerate(pipeline):
        if number == position:
            break


@pytest.mark.parametrize("has_stage", [False, True])
@pytest.mark.parametrize("closes", [False, True])
def test_a_generator_as_a_source_is_closed(closes: bool, has_stage: bool) -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.set()

    given = source()
    pipeline = Pipeline(given).map(functions.plus_one) if has_stage else Pipeline(given)
    iterator = iter(pipeline)
    next(iterator)
    if closes:
        pipeline.close()
    else:
        del iterator
    assert closed.wait(20)


@pytest.mark.parametrize("where", ["source", "thread", "coroutine"])
def test_a_hanging_stage_ends_the_wait_and_close_returns(where: str, released: threading.Event) -> None:
    hang = functions.hanging_at(3, released)
    pipeline = {
        "source": lambda: Pipeline(map(hang, range(10))).map(functions.plus_one),
        "thread": lambda: Pipeline(range(10)).map(hang, concurrency=2),
        "coroutine": lambda: Pipeline(range(10)).map(functions.async_hangs_at_three, concurrency=2),
    }[where]()
    with pytest.raises(WorkerStalled, match=r"no item came within timeout=0.2 s:(.|\n)*waiting for input"):
        list(pipeline.prefetch(2, timeout=0.2))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_takes_too_long_is_named_with_its_stack(is_async: bool, released: threading.Event) -> None:
    function: Any = functions.async_hangs_at_three if is_async else functions.hanging_at(3, released)
    pipeline = Pipeline(range(10)).map(function, concurrency=2, timeout=0.5, name="decode")
    with pytest.raises(WorkerStalled, match=rf"'decode', item 3, has taken(.|\n)*in {function.__name__}"):
        list(pipeline)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_generator_that_takes_too_long_ends_the_wait(is_async: bool, released: threading.Event) -> None:
    def hang(number: int) -> Iterator[int]:
        yield number
        released.wait(60)

    async def async_hang(number: int) -> AsyncIterator[int]:
        yield number
        await asyncio.sleep(60)

    function: Any = async_hang if is_async else hang
    with pytest.raises(WorkerStalled, match=r"hang': a generator gave no result within timeout=0.2 s"):
        list(Pipeline(range(3)).map(function, timeout=0.2))


def test_sessions_and_threads_of_the_event_loop_serve_the_next_epoch_until_the_pipeline_is_closed() -> None:
    states: list[str] = []

    async def open_session() -> AsyncIterator[None]:
        states.append("open")
        try:
            while True:
                yield
        finally:
            states.append("closed")

    sessions: dict[asyncio.AbstractEventLoop, AsyncIterator[None]] = {}

    async def read(number: int) -> int:
        await anext(sessions.setdefault(asyncio.get_running_loop(), open_session()))
        return await asyncio.to_thread(functions.plus_one, number)

    pipeline = Pipeline(range(5)).map(read, concurrency=2)
    for _ in range(2):
        assert list(pipeline) == [1, 2, 3, 4, 5]
    next(iter(pipeline))
    assert states == ["open"]
    pipeline.close()
    assert states == ["open", "closed"]


def test_it_works_inside_a_running_event_loop() -> None:
    async def main() -> list[int]:
        got = list(Pipeline(range(5)).map(functions.async_plus_one))
        for _ in Pipeline(range(5)).map(functions.async_plus_one).prefetch(1):
            break
        return got

    assert asyncio.run(main()) == [1, 2, 3, 4, 5]


def test_a_stage_that_is_left_while_another_one_works_leaves_no_thread() -> None:
    def slow(number: int) -> int:
        time.sleep(0.3)
        return number

    def many(number: int) -> Iterator[int]:
        yield from range(9)

    iterator = iter(Pipeline(range(40)).map(slow, concurrency=2).map(many, buffer_size=6))
    next(iterator)
    del iterator


@pytest.mark.parametrize("name", ["function", "generator"])
def test_the_report_says_which_stage_to_widen(name: str) -> None:
    def function(number: int) -> int:
        time.sleep(0.02)
        return number

    def generator(number: int) -> Iterator[int]:
        yield function(number)

    slow: Any = generator if name == "generator" else function
    pipeline = Pipeline(range(40)).map(functions.plus_one).map(slow, concurrency=2).map(functions.plus_one)
    list(pipeline)
    _, before, widen, after = pipeline.report()["stages"]
    assert widen["busy"] > max(before["busy"], after["busy"])
    assert widen["call_s_p99"] >= widen["call_s_p50"] >= 0.02
    assert widen["queue_in_front"] > after["queue_in_front"]
    assert "waiting_for_output" not in widen


@pytest.mark.filterwarnings("ignore:.* items failed in stage:swift_loader.SwiftLoaderWarning")
@pytest.mark.parametrize("kind", ["thread", "process", "loop", "generator"])
def test_the_report_counts_calls_that_fail(kind: str) -> None:
    async def on_loop(number: int) -> None:
        await asyncio.sleep(0.02)
        raise LookupError(number)

    def generator(number: int) -> Iterator[int]:
        yield fails_late(number)

    function: Any = {"loop": on_loop, "generator": generator}.get(kind, fails_late)
    pipeline = Pipeline(range(9)).map(function, on="process" if kind == "process" else None, on_error="skip")
    assert list(pipeline) == []
    (stage,) = pipeline.report()["stages"][1:]
    assert stage["call_s_p50"] >= 0.02
    assert stage["busy"] > 0


def fails_late(number: int) -> int:
    time.sleep(0.02)
    raise LookupError(number)


def test_the_graph_is_shown_and_what_it_does() -> None:
    pipeline = Pipeline(range(9)).map(functions.plus_one, concurrency=2).shuffle(4).batch(2).prefetch(1)
    assert repr(pipeline).split("\n") == [
        "Pipeline: 5 results, not started",
        "  source range",
        "  map plus_one, 2 threads, in order of input",
        "  shuffle, buffer of 4",
        "  batch 2",
        "  prefetch 1",
    ]
    iterator = iter(pipeline)
    next(iterator)
    assert "plus_one" in repr(pipeline)
    assert "out, " in repr(pipeline)
    assert repr(pipeline).startswith("Pipeline: 5 results, running, epoch 0\n")
    assert repr(iterator) == "<PipelineIterator: running, epoch 0>"
    list(iterator)
    assert [stage["items_out"] for stage in pipeline.report()["stages"]] == [9, 9, 9, 5, 5]


class NotAsked:
    def __len__(self) -> int:
        raise AssertionError("it may take long, or start processes")

    def __getitem__(self, index: int) -> int:
        return index


def test_repr_asks_no_class_of_the_user_for_its_length() -> None:
    known = Pipeline([0] * 1200).merge(Pipeline((1, 2)), Pipeline(range(3)))
    assert repr(known).startswith("Pipeline: 1,205 results, not started\n")
    assert repr(known.merge(Pipeline(NotAsked()))).startswith("Pipeline: not started\n")


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"concurrency": 0}, ValueError, "concurrency=0 is too small"),
        ({"on": "gpu"}, ValueError, "on='gpu'"),
        ({"on": "loop"}, ValueError, "can't run a function"),
        ({"output_order": "any"}, ValueError, "output_order='any'"),
        ({"on_error": "ignore"}, ValueError, "on_error='ignore'"),
        ({"max_errors": 3}, ValueError, "no effect with on_error='raise'"),
        ({"timeout": -1}, ValueError, "timeout=-1"),
        ({"buffer_size": -1}, ValueError, "buffer_size=-1"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        Pipeline(range(3)).map(functions.plus_one, **arguments)


def test_wrong_sources_and_sizes_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="max_errors=3 has no effect without a stage with on_error='skip'"):
        list(Pipeline(range(3), max_errors=3).map(functions.plus_one))
    with pytest.raises(TypeError, match="the source is a int"):
        Pipeline(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size=0"):
        Pipeline([]).batch(0)
    with pytest.raises(ValueError, match="rank=2 is too large; it must be at most 1"):
        Pipeline([]).shard(2, 2)
    with pytest.raises(ValueError, match="can't run a coroutine"):
        Pipeline([]).map(functions.async_plus_one, on="process")
    with pytest.raises(ValueError, match="continuous, but an epoch of it has no items"):
        list(Pipeline([], continuous=True).merge(Pipeline([])))
