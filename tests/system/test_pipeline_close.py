"""Closing a pipeline whose stages hang: it waits for none of them."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_loader import LoaderClosed
from swift_loader.executors.calls import CoroutineLoop
from swift_loader.pipeline import Pipeline
from swift_loader.pipeline.run import close_together
from tests.support.helpers import wait_until
from tests.support.stage_functions import AsyncNumbers, hanging_at, plus_one

NUM = 40


class HangsInProcess:
    """Ignores SIGTERM, and hangs at one item."""

    def __init__(self, at: int, folder: Path) -> None:
        self._at = at
        self._begun = folder / str(at)

    def __call__(self, number: int) -> int:
        if number == self._at:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._begun.touch()
            signal.pause()
        return number


def close_once(pipeline: Pipeline, hang_all: Callable[[], bool]) -> None:
    """Close a pipeline once all its stages hang."""
    iterator, errors = iter(pipeline), []

    def pull() -> None:
        try:
            next(iterator)
        except BaseException as error:
            errors.append(error)

    loop = threading.Thread(target=pull)
    loop.start()
    wait_until(hang_all, "all stages hang")
    pipeline.close()
    loop.join()
    assert [type(error) for error in errors] == [LoaderClosed]


def test_stages_that_hang_in_threads_close_together(released: threading.Event) -> None:
    begun: list[int] = []
    pipeline = Pipeline(range(NUM))
    for position in reversed(range(6)):  # the last stage hangs at the first item
        pipeline = pipeline.map(hanging_at(position, released, begun))
    close_once(pipeline, lambda: len(begun) == 6)


def test_a_coroutine_that_blocks_its_loop_and_stages_in_threads_close_together(released: threading.Event) -> None:
    begun: list[int] = []
    block = hanging_at(1, released, begun)

    async def blocks(number: int) -> int:
        return block(number)

    first, last = hanging_at(2, released, begun), hanging_at(0, released, begun)
    pipeline = Pipeline(range(NUM)).map(first).map(blocks).map(last)
    close_once(pipeline, lambda: len(begun) == 3)


def test_stages_that_hang_in_processes_close_together(tmp_path: Path) -> None:
    pipeline = Pipeline(range(NUM))
    for position in reversed(range(3)):
        pipeline = pipeline.map(HangsInProcess(position, tmp_path), on="process")
    close_once(pipeline, lambda: len(list(tmp_path.iterdir())) == 3)


@pytest.mark.parametrize("is_ending", [False, True])
def test_all_are_closed_even_if_one_fails(is_ending: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the end of the interpreter, which starts no thread."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    if is_ending:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    closed: list[int] = []
    closes = [lambda _: closed.index(9), lambda _: closed.append(1), lambda _: closed.append(2)]
    parts: list[Any] = [SimpleNamespace(close=close) for close in closes]
    with pytest.raises(ValueError, match="9 is not in list"):
        close_together(parts, time.monotonic() + 5.0)
    assert sorted(closed) == [1, 2]


@pytest.mark.parametrize("what", ["merged", "async"])
def test_what_is_pulled_first_after_the_pipeline_was_closed_leaves_no_thread(
    what: str, released: threading.Event
) -> None:
    begun = threading.Event()

    def nothing() -> Iterator[int]:
        begun.set()
        released.wait(60)
        yield from ()

    numbers = Pipeline(range(NUM))
    late = numbers.merge(numbers, output_order="completion") if what == "merged" else Pipeline(AsyncNumbers(NUM))
    pipeline = Pipeline(nothing()).merge(late).map(plus_one)
    closing = threading.Timer(0.5, released.set)

    def hangs() -> bool:
        if begun.is_set():
            closing.start()
        return begun.is_set()

    close_once(pipeline, hangs)
    closing.join()


def test_a_source_on_the_event_loop_may_begin_an_epoch_while_the_pipeline_closes() -> None:
    for _ in range(100):
        with Pipeline(AsyncNumbers(2), continuous=True).map(plus_one) as pipeline:
            assert [*itertools.islice(pipeline, 2)] == [1, 2]
    wait_until(lambda: not [thread for thread in threading.enumerate() if "fill-plus_one" in thread.name], "all end")


def test_a_user_of_an_event_loop_may_repeat_what_was_interrupted() -> None:
    async def answer() -> int:
        return 42

    event_loop, one, other = CoroutineLoop(), object(), object()
    loop = event_loop.enter(one)
    assert event_loop.enter(one) is event_loop.enter(other) is loop
    for _ in range(2):
        event_loop.leave(one, 5)
    assert asyncio.run_coroutine_threadsafe(answer(), loop).result(30) == 42
    for _ in range(2):
        event_loop.leave(other, 5)
    event_loop.close()
    assert loop.is_closed()
