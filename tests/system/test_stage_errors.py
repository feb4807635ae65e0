"""What the errors and warnings of a pipeline's stages say: the stage, the item, and options that a pipeline has."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from swift_loader import EncodeError, RemoteTraceback, SwiftLoaderWarning, WorkerDied, WorkerStalled
from swift_loader.pipeline import Pipeline
from tests.support import stage_functions as functions
from tests.support.helpers import wait_until

LOADER_WORDS = ("dataset", "worker_restarts", "worker_per_consumer", "batch", "rank", "epoch")


def texts_of(error: BaseException) -> list[str]:
    """Return the messages of an error and of its causes."""
    found = []
    cause: BaseException | None = error
    while cause is not None:
        found.append(str(cause).partition("Traceback (most recent")[0].partition("Its Python stack")[0])
        cause = cause.__cause__
    return found


def error_of(pipeline: Pipeline, kind: type[BaseException]) -> BaseException:
    with pytest.raises(kind) as caught:
        list(pipeline)
    text = "\n".join(texts_of(caught.value))
    assert [word for word in LOADER_WORDS if word in text] == []
    assert "stage 'decode'" in text
    return caught.value


def exits_at_three(number: int) -> int:
    if number == 3:
        os._exit(7)
    return number


def hangs_at_three(number: int) -> int:
    if number == 3:
        time.sleep(60)
    return number


def gives_a_lock(number: int) -> Any:
    return threading.Lock()


class CannotBeRebuilt:
    """A function that fails as the processes load it."""

    def __call__(self, number: int) -> int:
        return number

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return functions.fails_at_five, (5,)


def decode_in_processes(function: Callable[[Any], Any], source: Any = range(6), **options: Any) -> Pipeline:
    return Pipeline(source).map(function, concurrency=2, on="process", name="decode", **options)


def test_an_exception_of_a_process_names_stage_and_item() -> None:
    error = error_of(decode_in_processes(functions.fails_at_five), LookupError)
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "of stage 'decode' (pid " in str(error.__cause__)
    assert "at item 5:" in str(error.__cause__)


def test_a_process_that_dies_twice_at_an_item_names_stage_and_item() -> None:
    with pytest.warns(SwiftLoaderWarning, match="of stage 'decode'(.|\n)*item 3. It is replaced [(]1 of 3 in a row"):
        error = error_of(decode_in_processes(exits_at_three), WorkerDied)
    for part in ("exited with code 7", "it was at item 3", "The item has ended two workers", "stage's function"):
        assert part in str(error)


def test_a_process_that_hangs_twice_at_an_item_names_stage_and_item() -> None:
    with pytest.warns(SwiftLoaderWarning, match="of stage 'decode'(.|\n)*has been at item 3 for"):
        error = error_of(decode_in_processes(hangs_at_three, timeout=0.3), WorkerStalled)
    assert "longer than timeout=0.3 s" in str(error)


@pytest.mark.parametrize("where", ["thread", "process", "loop"])
def test_an_item_that_takes_too_long_is_left_out(where: Any, released: threading.Event) -> None:
    threads, loop = functions.hanging_at(3, released), functions.async_hangs_at_three
    function: Any = {"thread": threads, "process": hangs_at_three, "loop": loop}[where]
    pipeline = Pipeline(range(9)).map(function, on=where, concurrency=2, timeout=2, on_error="skip")
    with pytest.warns(SwiftLoaderWarning, match="1 of 9 items failed in stage .*item 3: WorkerStalled"):
        assert list(pipeline) == [0, 1, 2, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("output_order", ["input", "completion"])
def test_items_that_hang_at_the_same_time_are_left_out_together_while_others_go_on(output_order: Any) -> None:
    ends: list[float] = []

    async def hang(number: int) -> None:
        try:
            await asyncio.sleep(60 if number < 8 else 0.02)
        except asyncio.CancelledError:
            ends.append(time.monotonic())
            raise

    pipeline = Pipeline(itertools.count())
    for _ in pipeline.map(hang, concurrency=9, timeout=1, on_error="skip", output_order=output_order):
        if len(ends) == 8:
            break
    assert ends[-1] - ends[0] < 4


def test_a_coroutine_that_blocks_its_loop_is_not_left_out(released: threading.Event) -> None:
    async def block(number: int) -> int:
        return functions.hanging_at(0, released)(number)

    error = error_of(Pipeline(range(9)).map(block, timeout=0.2, on_error="skip", name="decode"), WorkerStalled)
    assert "item 0, has taken" in str(error)


def test_the_item_of_a_stall_is_its_number_behind_a_stage_that_counts(released: threading.Event) -> None:
    hang: Any = functions.hanging_at((2, 1), released)  # type: ignore[arg-type]
    pipeline = Pipeline(range(9)).map(functions.some).map(hang, timeout=0.2, name="decode")
    assert "item 2, has taken" in str(error_of(pipeline, WorkerStalled))


def test_what_cannot_be_sent_is_told_with_what_a_pipeline_can_do() -> None:
    with open(__file__) as file:
        cases = {
            "the result is a ": decode_in_processes(gives_a_lock),
            "the item, a lock, can't be sent": decode_in_processes(functions.plus_one, [1, threading.Lock()]),
            "": decode_in_processes(lambda number: (number, file.name)),
        }
        for beginning, pipeline in cases.items():
            text = str(error_of(pipeline, EncodeError))
            assert text.startswith(beginning)
            assert "on='thread'" in text


def test_a_function_that_cannot_be_loaded_names_the_stage() -> None:
    assert "number five" in str(error_of(decode_in_processes(CannotBeRebuilt()), LookupError))


def test_errors_of_sources_filters_lists_and_joined_pipelines_name_stage_and_item() -> None:
    def source() -> Iterator[int]:
        yield from map(functions.fails_at_five, range(9))

    fails: Any = functions.fails_at_five
    cases = {
        "source generator', at item 5": Pipeline(source()).map(functions.plus_one, concurrency=2),
        "filter fails_at_five', at item 4": Pipeline(range(9)).filter(bool).filter(fails),
        "source map', at item 2": Pipeline(map(functions.fails_at_five, range(3, 9))).prefetch(2),
        "unbatch', at item 2": Pipeline([[1, 2], [3], map(functions.fails_at_five, [5])]).batch(1).unbatch().unbatch(),
        "merge, in turn, pipeline 1', at item 0": Pipeline([1]).merge(Pipeline([5]).map(functions.fails_at_five)),
    }
    for where, pipeline in cases.items():
        with pytest.raises(LookupError, match="number five") as caught:
            list(pipeline)
        assert texts_of(caught.value)[-1].endswith(where)


def test_what_cannot_be_unbatched_is_named() -> None:
    lists: Any = Pipeline([[1, 2], 3])
    with pytest.raises(TypeError, match=r"unbatch\(\) needs .* item 1 is a int") as caught:
        list(lists.unbatch().batch(2))
    assert texts_of(caught.value)[-1].endswith("unbatch', at item 1")


@pytest.mark.parametrize("stage", ["filter fails_at_five", "unbatch"])
def test_items_are_counted_on_in_the_next_epoch_of_a_continuous_pipeline(stage: str) -> None:
    class Source:
        numbers = itertools.count()

        def __iter__(self) -> Iterator[int]:
            return itertools.islice(self.numbers, 3)

    fails: Any = functions.fails_at_five
    pipeline = Pipeline(Source(), continuous=True)
    pipeline = (
        pipeline.map(lambda number: map(fails, [number])).unbatch() if stage == "unbatch" else pipeline.filter(fails)
    )
    list(pipeline)
    with pytest.raises(LookupError) as caught:
        list(pipeline)
    assert f"In stage {stage!r}, at item 5" in "\n".join(texts_of(caught.value))


def test_of_sources_that_are_merged_as_items_come_an_error_stays_the_end() -> None:
    """Another source ends after the one that failed, while the loop is busy."""
    may_end = threading.Event()

    def fails() -> Iterator[int]:
        yield 1
        raise ValueError("the source failed")

    def ends_later() -> Iterator[int]:
        assert may_end.wait(20)
        yield from ()

    pipeline = Pipeline(fails()).merge(Pipeline(ends_later()), output_order="completion")
    iterator = iter(pipeline)
    assert next(iterator) == 1
    wait_until(lambda: fillers() == 1, "the end of the source that fails")
    may_end.set()
    wait_until(lambda: fillers() == 0, "the end of the other one")
    with pytest.raises(ValueError, match="the source failed"):
        next(iterator)


def fillers() -> int:
    return sum(thread.name.startswith("swift_loader-fill") for thread in threading.enumerate())


def test_an_error_that_is_its_own_cause_is_told() -> None:
    def fail(number: int) -> int:
        error = ValueError(number)
        raise error from error

    error = error_of(Pipeline(range(3)).map(fail, name="decode"), ValueError)
    assert "In stage 'decode', at item 0" in str(error.__cause__)


async def is_even(number: int) -> bool:
    return number % 2 == 0


def evens(number: int) -> Iterator[bool]:
    yield number % 2 == 0


@pytest.mark.parametrize("predicate", [is_even, evens, functools.partial(is_even)])
def test_a_filter_whose_answer_is_always_true_is_refused(predicate: Any) -> None:
    with pytest.raises(TypeError, match=r"filter needs a plain function, but \w+ is a (coroutine|generator); use map"):
        Pipeline(range(3)).filter(predicate)


def test_a_filter_whose_function_returns_a_coroutine_is_an_error() -> None:
    with pytest.raises(TypeError, match="returned a coroutine, is_even"):
        list(Pipeline(range(3)).filter(lambda number: is_even(number + 1)))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("value", ["text", b"bytes", pd.DataFrame({"x": [1, 2]}), pa.table({"x": [1, 2]})], ids=type)
def test_what_gives_letters_or_columns_is_no_source_and_not_unbatched(value: Any) -> None:
    with pytest.raises(TypeError, match=r"unbatch\(\) needs .* item 0 is a"):
        list(Pipeline([value]).unbatch())
    with pytest.raises(TypeError, match=f"the source is a {type(value).__name__}"):
        Pipeline(value)


def test_a_dict_is_not_unbatched() -> None:
    with pytest.raises(TypeError, match=r"unbatch\(\) needs .* item 0 is a dict"):
        list(Pipeline([{"column": [1, 2]}]).unbatch())
