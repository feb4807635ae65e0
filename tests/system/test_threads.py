"""Several threads ask one loader for batches: they take turns, and each batch goes to one of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from swift_loader import LoaderClosed
from tests.support import datasets
from tests.support.helpers import make_loader


def in_threads(count: int, task: Callable[[], Any]) -> list[BaseException]:
    """Run a task in so many threads; return what they raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_a_thread_that_begins_a_pass_ends_that_of_another_one_and_takes_nothing_from_it() -> None:
    with make_loader(datasets.Counting, kwargs={"num_samples": 400}, shuffle=False, batch_size=4) as loader:
        passes: list[list[int]] = []

        def go_through() -> None:
            passes.append([])
            mine = passes[-1]
            for batch in loader:
                mine.extend(batch["id"].tolist())

        errors = in_threads(6, go_through)
        assert all(isinstance(error, RuntimeError) and "superseded" in str(error) for error in errors), errors
        assert sum(len(got) == 400 for got in passes) >= 1
        for got in passes:
            assert got == list(range(len(got)))


def test_the_handler_of_a_signal_may_close_the_loader_but_takes_no_batch() -> None:
    class Request(Exception):
        pass

    seen: list[str] = []

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            next(iterator)
        except RuntimeError as error:
            seen.append(str(error))
        if len(seen) >= 3:
            signal.setitimer(signal.ITIMER_REAL, 0)
            loader.close()

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with make_loader(datasets.Slow, kwargs={"seconds": 3600}, validate=False) as loader:
            iterator = iter(loader)
            loader.start(0)
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
            with pytest.raises(LoaderClosed):
                next(iterator)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(seen) == 3
    assert all("within next() of the same loader" in text for text in seen)
