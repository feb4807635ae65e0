"""A dispatcher that is closed at a bad moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from swift_loader.delivery.dispatcher import Dispatcher
from swift_loader.errors import LoaderClosed
from swift_loader.executors.process.inbox import Inboxes
from swift_loader.metrics.metrics import Metrics
from swift_loader.sampling.plan import Plan, PlanSettings, Uneven
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.scheduler.events import Event, Ready
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.scheduler import Scheduler, SchedulerSettings

ORDER = OrderSettings.of(seed=0, shuffle=False, window=None, batch_size=2)
PLAN = PlanSettings(order=ORDER, batch_size=2, world_size=1, rank=0, uneven=Uneven.PAD, drop_last=False)


class FakeExecutor:
    """Has inboxes, but no workers."""

    owner = None
    grace_s = 0.0
    largest_batch_nbytes = 0

    def __init__(self, on_start: Callable[[], None]) -> None:
        unused: Any = None
        self.real = Inboxes(1, unused)
        self.inboxes: list[Any] = list(self.real.all)
        self.plan = Plan.of(10, PLAN)
        self.stopped, self.closed = threading.Event(), threading.Event()
        self._on_start = on_start

    def start(self) -> None:
        self._on_start()

    def stop(self) -> None:
        self.stopped.set()
        self.inboxes[0].wake()

    def close(self) -> list[Any]:
        self.closed.set()
        self.real.close()
        return []


class DecodingInbox:
    """The first `wait` decodes a batch, until after somebody has begun to close the executor."""

    interrupt: Exception | None = None
    is_taking_in = False

    def __init__(self, executor: FakeExecutor, close: Callable[[], None]) -> None:
        self.was_closed_meanwhile = False
        self.closing = threading.Thread(target=close)
        self._executor = executor

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        self.closing.start()
        assert self._executor.stopped.wait(20)
        self.was_closed_meanwhile = self._executor.closed.wait(0.3)
        return []

    def wake(self) -> None:
        """Do nothing."""

    def sleep(self) -> None:
        """Do nothing."""


def dispatcher_of(executor: Any) -> Dispatcher:
    scheduler = Scheduler(SchedulerSettings(Limits(4, 4, 10, in_order=True)))
    return Dispatcher(executor, scheduler, metrics=Metrics(enabled=False), on_restart=lambda _: None)


def in_another_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_a_dispatcher_that_was_closed_before_it_receives_says_so() -> None:
    executor = FakeExecutor(lambda: in_another_thread(dispatcher.close))
    dispatcher = dispatcher_of(executor)
    with pytest.raises(LoaderClosed):
        dispatcher.start(tries_out=True, keeps_trial=True)
    assert executor.closed.is_set()


def test_nothing_is_closed_while_the_trial_batch_is_decoded() -> None:
    executor = FakeExecutor(lambda: None)
    dispatcher = dispatcher_of(executor)
    inbox = executor.inboxes[0] = DecodingInbox(executor, dispatcher.close)
    with pytest.raises(LoaderClosed):
        dispatcher.start(tries_out=True, keeps_trial=True)
    assert not inbox.was_closed_meanwhile
    assert executor.closed.wait(20)
    inbox.closing.join(20)


def test_a_signal_handler_may_close_while_its_thread_carries_out_actions() -> None:
    executor = FakeExecutor(lambda: None)
    dispatcher = dispatcher_of(executor)
    dispatcher.start(tries_out=False, keeps_trial=False)

    def close() -> None:
        with dispatcher._driver.dispatch_lock:
            executor.real.posted.post(Ready(0, 0))  # the receiver thread now waits for the lock
            time.sleep(0.1)
            dispatcher.close()

    in_another_thread(close)
    assert dispatcher._receivers is not None
    for receiver in dispatcher._receivers._threads:  # it ends once it gets the lock
        receiver._thread.join(20)


def test_a_signal_handler_may_close_while_its_thread_takes_a_batch() -> None:
    executor = FakeExecutor(lambda: None)
    dispatcher = dispatcher_of(executor)
    dispatcher.start(tries_out=False, keeps_trial=False)
    acting = threading.Thread(target=dispatcher._driver.act, daemon=True)

    def close() -> None:
        with dispatcher._driver.lock:
            acting.start()  # holds the dispatch lock, and waits for the other one
            time.sleep(0.1)
            dispatcher.close()

    in_another_thread(close)
    acting.join(20)
    assert not acting.is_alive()
