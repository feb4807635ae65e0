from __future__ import annotations

import functools
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from swift_loader.interrupts import is_interrupt, run_finalizer


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
def test_what_a_handler_raises_is_told_from_other_errors(name: str) -> None:
    def interrupted() -> None:
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, HANDLERS[name])
    try:
        assert is_interrupt(raised_by(interrupted))
        assert not is_interrupt(raised_by(lambda: int("x")))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not is_interrupt(raised_by(fail))


def test_on_other_threads_there_are_no_handlers() -> None:
    before = signal.signal(signal.SIGUSR1, fail)
    found: list[bool] = []
    try:
        thread = threading.Thread(target=lambda: found.append(is_interrupt(raised_by(fail))))
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [False]


def test_a_finaliser_that_an_interrupt_ends_is_run_again() -> None:
    class Loader:
        pass

    calls: list[str] = []

    def close(name: str) -> None:
        calls.append(name)
        if len(calls) == 1:
            raise Alarm

    loader = Loader()
    finalizer = weakref.finalize(loader, close, "a loader")
    with pytest.raises(Alarm):
        run_finalizer(finalizer)
    assert calls == ["a loader"] * 2
    run_finalizer(finalizer)
    del loader
    assert len(calls) == 2
