"""Whoever works for a closed seat gets time to leave it, and is killed then. Nobody else is waited for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from swift_loader.executors.pool import leaving
from swift_loader.executors.pool.leaving import await_leaving


class FakeSeat:
    """A seat that is left at a signal. The end of `held` that the process would have is here, too."""

    def __init__(self, number: int, *, is_served: bool, leaves_at: signal.Signals | None = None) -> None:
        self.number, self.is_served, self._leaves_at = number, is_served, leaves_at
        self.held, self._theirs = os.pipe()
        self.pidfd = os.eventfd(0)
        self.got: list[signal.Signals] = []

    def send_signal(self, number: signal.Signals) -> None:
        self.got.append(number)
        if number is self._leaves_at:
            os.eventfd_write(self.pidfd, 1)
            self.leave()

    def leave(self) -> None:
        theirs, self._theirs = self._theirs, -1
        if theirs >= 0:
            os.close(theirs)

    def close(self) -> None:
        self.leave()
        os.close(self.held)
        os.close(self.pidfd)


@pytest.fixture(autouse=True)
def short_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "_STAGES", tuple((number, 0.02) for number, _ in leaving._STAGES))


@pytest.fixture
def seats() -> Iterator[list[Any]]:
    made: list[FakeSeat] = []
    yield made
    for seat in made:
        seat.close()


def test_a_seat_that_is_left_in_time_gets_no_signal(seats: list[Any]) -> None:
    seats += [FakeSeat(1, is_served=True), FakeSeat(2, is_served=True)]
    for seat in seats:
        seat.leave()
    await_leaving(seats)
    assert [seat.got for seat in seats] == [[], []]


def test_nobody_waits_for_a_process_that_works_for_another_seat(
    seats: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "_STAGES", ((None, 60.0),))
    seats.append(FakeSeat(1, is_served=False))
    began_s = time.monotonic()
    await_leaving(seats)
    assert time.monotonic() - began_s < 30
    assert not seats[0].got


@pytest.mark.parametrize("last", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_hangs_is_killed(seats: list[Any], last: signal.Signals) -> None:
    seats += [FakeSeat(1, is_served=True, leaves_at=last), FakeSeat(2, is_served=True)]
    seats[1].leave()
    await_leaving(seats)
    assert seats[0].got == [signal.SIGTERM, signal.SIGKILL][: 1 + (last is signal.SIGKILL)]
    assert not seats[1].got


def test_a_process_that_went_on_to_another_seat_isnt_killed(seats: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seats.append(FakeSeat(1, is_served=True))
    wait = leaving._wait

    def wait_and_go_on(remaining: Any, limit_s: float) -> Any:
        left = wait(remaining, limit_s)
        seats[0].is_served = False
        return left

    monkeypatch.setattr(leaving, "_wait", wait_and_go_on)
    await_leaving(seats)
    assert not seats[0].got
