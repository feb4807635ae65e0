"""The scheduler's actions reach the executor, whatever interrupts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from swift_loader.delivery.driver import Driver
from swift_loader.errors import SwiftLoaderError
from swift_loader.scheduler.actions import Action, Kill, Send, Stall, Warn
from swift_loader.scheduler.events import Built, Disconnected, Event, Ready
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.scheduler import Scheduler, SchedulerSettings, SchedulerState
from swift_loader.scheduler.work import PlannedSource


class Alarm(Exception):
    """What a signal handler raises."""


class FakeExecutor:
    """Records what it has to do. The next call may be interrupted."""

    def __init__(self) -> None:
        self.done: list[Action | str] = []
        self.interrupt: Exception | None = None

    def carry_out(self, action: Action) -> list[Any]:
        self._be_interrupted()
        self.done.append(action)
        return []

    def error_of(self, cause: Any) -> BaseException:
        self._be_interrupted()
        return SwiftLoaderError("the executor's")

    def notice_of(self, about: Any) -> str:
        self._be_interrupted()
        self.done.append("notice")
        return "notice"

    def _be_interrupted(self) -> None:
        if self.interrupt is not None:
            interrupt, self.interrupt = self.interrupt, None
            raise interrupt


class FakeInbox:
    """Returns these events at the next `wait`, then nothing."""

    is_taking_in = False
    interrupt: Exception | None = None

    def __init__(self, *events: Event) -> None:
        self._events = list(events)

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """Do nothing: `wait` doesn't block."""

    def sleep(self) -> None:
        """Do nothing: `wait` doesn't block."""


def running_driver(**settings: Any) -> tuple[Driver, Any]:
    executor: Any = FakeExecutor()
    limits = Limits(4, 4, 10, in_order=True)
    driver = Driver(executor, Scheduler(SchedulerSettings(limits, **settings)), lambda notice: None)
    driver.scheduler.begin(PlannedSource(0, 0, lambda _: 10), keeps_meaning=True)
    driver.receive_and_act(FakeInbox(Ready(0, 0)))
    assert {type(action) for action in executor.done} == {Send}
    executor.done.clear()
    return driver, executor


def wait_in_vain(driver: Driver) -> None:
    driver.scheduler.watchdog.begin(-1e6, 0.0)  # a long time ago
    driver.receive_or_judge(FakeInbox())


def test_a_worker_that_hangs_is_killed_even_if_the_first_attempt_was_interrupted() -> None:
    driver, executor = running_driver(timeout_s=1e-9)
    executor.interrupt = Alarm()  # while the executor collects the worker's stacks
    with pytest.raises(Alarm):
        wait_in_vain(driver)
    driver.act()
    assert [type(action) for action in executor.done] == [Kill]


def test_what_was_decided_after_an_interrupted_action_is_still_done() -> None:
    driver, executor = running_driver()
    driver.scheduler._actions.append(Warn(Stall(0, None, 1.0, is_trial=False)))
    driver.receive(FakeInbox(Ready(1, 1)), None)  # gets tasks
    executor.interrupt = Alarm()
    with pytest.raises(Alarm):
        driver.act()
    driver.act()
    assert [type(action) for action in executor.done] == [Send, Send]


def test_there_is_an_error_for_the_loop_even_if_making_it_was_interrupted() -> None:
    driver, executor = running_driver()
    executor.interrupt = Alarm()
    with pytest.raises(Alarm):
        driver.fail(ValueError("the cause"))
    assert driver.error is not None
    driver.act()
    assert "the executor's" in str(driver.error)


def test_an_interrupt_that_hits_the_last_error_ends_the_loop() -> None:
    driver, executor = running_driver()
    driver.receive(FakeInbox(Disconnected(0, 0)), None)
    driver.scheduler.fail(ValueError("the cause"))
    executor.interrupt = Alarm()
    with pytest.raises(Alarm):
        driver.act()
    driver.fail(SwiftLoaderError("the loop was interrupted"))
    assert driver.error is not None


def test_a_signal_handler_may_close_the_loader_while_an_answer_is_handled() -> None:
    driver, _ = running_driver()
    close_after(driver, "complete")
    driver.receive_and_act(FakeInbox(Built(0, 1, 0, "batch", 0.1), Built(0, 1, 1, "batch", 0.1)))
    assert driver.scheduler.state is SchedulerState.CLOSED


def test_a_signal_handler_may_close_the_loader_while_tasks_are_assigned() -> None:
    driver, executor = running_driver()
    close_after(driver, "assign")
    driver.receive_and_act(FakeInbox(Built(0, 1, 0, "batch", 0.1)))
    assert driver.scheduler.state is SchedulerState.CLOSED
    assert len(executor.done) <= 1


def close_after(driver: Driver, name: str) -> None:
    """Close the scheduler, as a signal handler may, once the ledger has done this."""
    real: Callable[..., Any] = getattr(driver.scheduler.ledger, name)

    def call(*arguments: Any) -> Any:
        result = real(*arguments)
        driver.scheduler.close()
        return result

    setattr(driver.scheduler.ledger, name, call)
