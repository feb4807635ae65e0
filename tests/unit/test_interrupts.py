from __future__ import annotations

import functools
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from swift_loader.runtime import is_interrupt, run_finalizer


class Alarm(Exception):
    pass


def fail(*_: object) -> None:
    raise Alarm


class Handler:
    def method(self, *_: object) -> None:
        fail()

    def __call__(self, *_: object) -> None:
        raise Alarm


HANDLERS: dict[str, Callable[..., Any]] = {
    "function": fail,
    "lambda": lambda *_: fail(),
    "method": Handler().method,
    "callable": Handler(),
    "partial": functools.partial(functools.partial(lambda *_: fail()), 1),
}


def raised_by(code: Callable[[], object]) -> Exception:
    try:
        code()
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("name", HANDLERS)
def test_what_a_handler_raises_is_told_from_other_errors_on_the_main_thread(name: str) -> None:
    found: list[bool] = []
    before = signal.signal(signal.SIGUSR1, HANDLERS[name])
    try:
        assert is_interrupt(raised_by(lambda: signal.raise_signal(signal.SIGUSR1)))
        assert not is_interrupt(raised_by(lambda: int("x")))
        thread = threading.Thread(target=lambda: found.append(is_interrupt(raised_by(HANDLERS[name]))))
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not is_interrupt(raised_by(fail))
    assert found == [False]


def test_a_finaliser_that_an_interrupt_ends_is_run_again() -> None:
    calls: list[str] = []

    def close(name: str) -> None:
        calls.append(name)
        if len(calls) == 1:
            raise Alarm

    loader = Handler()
    finalizer = weakref.finalize(loader, close, "a loader")
    with pytest.raises(Alarm):
        run_finalizer(finalizer)
    run_finalizer(finalizer)
    assert calls == ["a loader"] * 2
