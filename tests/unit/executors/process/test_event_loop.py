from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from swift_loader.executors.process.event_loop import EventLoop

LIMIT_S = 20


@contextmanager
def pipes(num_pipes: int) -> Iterator[list[tuple[int, int]]]:
    """Yield (read, write) descriptors; close those that are still open."""
    found = [os.pipe() for _ in range(num_pipes)]
    try:
        yield found
    finally:
        for read, write in found:
            os.close(read)
            os.close(write)


def test_the_function_of_each_readable_descriptor_is_called_and_no_other() -> None:
    with closing(EventLoop()) as loop, pipes(3) as ends:
        calls: list[int] = []
        for number, (read, _) in enumerate(ends):
            loop.watch(read, lambda number=number: calls.append(number))  # type: ignore[misc]
        for number in (2, 0):
            os.write(ends[number][1], b"x")
        loop.run_once(LIMIT_S)
        assert sorted(calls) == [0, 2]


def test_the_end_of_a_pipe_calls_its_function() -> None:
    with closing(EventLoop()) as loop:
        read, write = os.pipe()
        calls: list[bytes] = []
        loop.watch(read, lambda: calls.append(os.read(read, 1)))
        os.close(write)
        loop.run_once(LIMIT_S)
        loop.unwatch(read)
        os.close(read)
        assert calls == [b""]


def test_a_function_is_not_called_after_another_one_has_unwatched_its_descriptor() -> None:
    with closing(EventLoop()) as loop, pipes(2) as ends:
        calls: list[int] = []

        def take(number: int) -> None:
            calls.append(number)
            for read, _ in ends:
                loop.unwatch(read)

        loop.watch(ends[0][0], lambda: take(0))
        loop.watch(ends[1][0], lambda: take(1))
        assert repr(loop) == "<EventLoop of 3 descriptors>"
        for _, write in ends:
            os.write(write, b"x")
        loop.run_once(LIMIT_S)
        loop.run_once(0)
        assert len(calls) == 1
        assert repr(loop) == "<EventLoop of 1 descriptors>"


def test_running_until_a_condition_ends_at_the_limit_or_with_what_is_there_by_then() -> None:
    with closing(EventLoop()) as loop, pipes(1) as [(read, write)]:
        calls: list[bytes] = []
        loop.watch(read, lambda: calls.append(os.read(read, 1)))
        assert not loop.run_until(lambda: bool(calls), 0.01)
        os.write(write, b"xy")
        assert loop.run_until(lambda: bool(calls), 0)
        assert loop.run_until(lambda: len(calls) == 2)
        assert calls == [b"x", b"y"]


def test_another_thread_wakes_the_loop_to_look_at_its_condition() -> None:
    with closing(EventLoop()) as loop:
        is_done, has_looked = threading.Event(), threading.Event()

        def look() -> bool:
            has_looked.set()
            return is_done.is_set()

        thread = threading.Thread(target=loop.run_until, args=(look,))
        thread.start()
        assert has_looked.wait(LIMIT_S)
        is_done.set()
        loop.wake()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_a_closed_loop_can_be_woken_and_closed_again() -> None:
    loop = EventLoop()
    assert not loop.is_closed
    loop.close()
    loop.wake()
    loop.close()
    assert loop.is_closed


def test_what_a_function_raises_is_raised() -> None:
    with closing(EventLoop()) as loop, pipes(1) as [(read, write)]:
        loop.watch(read, lambda: 1 // 0)  # type: ignore[arg-type]
        os.write(write, b"x")
        with pytest.raises(ZeroDivisionError):
            loop.run_once(LIMIT_S)
