"""The thread that runs calls lives until it is ended."""

from __future__ import annotations

import threading

import pytest

from swift_loader.executors.process.event_loop_thread import EventLoopThread


def test_a_thread_that_has_failed_ends_last_even_if_a_call_is_stopped() -> None:
    failures, is_waiting = list[BaseException](), threading.Event()

    def fail() -> None:
        raise ValueError("look after")

    thread = EventLoopThread(lambda: None, failures.append)
    thread.call(lambda: None).result(20)
    thread.submit(fail)
    while not failures:
        is_waiting.wait(0.01)

    def wait() -> None:
        is_waiting.set()
        thread.run_until(lambda: False)

    thread.submit(wait)
    assert is_waiting.wait(20)
    with thread.lock:
        thread.stop()
    assert thread._thread is not None
    thread._thread.join(0.2)
    assert thread._thread.is_alive(), "the kernel kills the processes that this thread has started"
    with pytest.raises(ValueError, match="look after"):
        thread.call(lambda: None)
    thread.end()
    assert not thread._thread.is_alive()
    thread.loop.close()
