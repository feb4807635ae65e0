"""The protocol of copies, with a device that makes them late: copy issued, event, wait, release."""

from __future__ import annotations

import gc
import os
from functools import partial
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swift_loader.device import streams
from swift_loader.device.streams import CopiesInFlight, Transfer
from swift_loader.errors import LoaderClosed
from swift_loader.runtime import LoaderThread
from swift_loader.scheduler.delivery import Delivery
from tests.support.fake_device import FakeDevice, Moving
from tests.support.helpers import wait_until

pytestmark = pytest.mark.processes


class Host:
    def __init__(self, device: FakeDevice, number: int) -> None:
        self.data = np.full(8, number)
        device.watch(self, number)


def issue(copies: CopiesInFlight, device: FakeDevice, number: int) -> Transfer:
    return copies.issue(
        Moving(lambda host, transfer: device.move(host.data, transfer)), Delivery(batch=Host(device, number))
    )


def test_what_a_move_that_raises_has_issued_is_under_way_all_the_same() -> None:
    device = FakeDevice(lag=9)
    copies = CopiesInFlight(device)

    def move(host: Host, transfer: Transfer) -> None:
        device.copy(host.data)
        raise ValueError("the second array is too large")

    moved = copies.issue(Moving(move), Delivery(batch=Host(device, 0)))
    assert str(moved.error) == "the second array is too large"
    assert device.log == ["copy 0", "event 0"], "its memory could be written while it is read"
    copies.close()
    del moved  # its error's traceback has the batch
    gc.collect()
    assert device.log[-1] == "release 0"


def test_a_copy_issued_while_another_thread_closes_is_waited_for() -> None:
    device = FakeDevice(lag=9)
    copies = CopiesInFlight(device)

    def move(host: Host, transfer: Transfer) -> Any:
        copies.close()  # as another thread would, in the midst of this
        return device.copy(host.data)

    moved = copies.issue(Moving(move), Delivery(batch=Host(device, 3))).batch
    assert (moved == 3).all()
    assert device.log == ["copy 0", "event 0", "wait for 0", "release 3"]


def test_a_fork_of_the_trainer_does_not_wait_for_the_device() -> None:
    device = FakeDevice(lag=9)
    copies = CopiesInFlight(device)
    issue(copies, device, 0)
    pid = os.fork()
    if pid == 0:
        copies.close()
        os._exit(any(entry.startswith("wait") for entry in device.log))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    copies.close()
    assert "wait for 0" in device.log


@pytest.mark.parametrize(("depth", "num_queued"), [(1, 2), (2, 2), (5, 5)])
def test_the_loop_is_never_more_than_some_steps_ahead_of_the_device(depth: int, num_queued: int) -> None:
    device, results = FakeDevice(lag=1), list[set[int]]()
    copies = CopiesInFlight(device, depth)
    for number in range(20):
        copies.begin_step()
        assert len(results) == max(0, number - num_queued), "steps that have run"
        issued = issue(copies, device, number)
        issued.hand_over()
        device.use(issued.batch, results)


def test_a_ctrl_c_while_the_device_is_waited_for_changes_nothing() -> None:
    class Interrupted(FakeDevice):
        num_waits = 0

        def _advance_loop(self) -> None:
            self.num_waits += 1
            if self.num_waits % 3 == 0:
                raise KeyboardInterrupt
            super()._advance_loop()

    device, results = Interrupted(), list[set[int]]()
    copies, num_interrupts = CopiesInFlight(device), 0
    for number in range(20):
        try:
            copies.begin_step()
        except KeyboardInterrupt:
            num_interrupts += 1
            continue
        issued = issue(copies, device, number)
        issued.hand_over()
        device.use(issued.batch, results)
    assert num_interrupts > 3
    assert device.num_blocks <= 1 + 2 + 2


def test_what_is_told_of_the_end_of_a_copy_is_told_once_and_not_before_it() -> None:
    device, ended = FakeDevice(lag=9), list[int]()
    copies = CopiesInFlight(device)

    for number in range(3):
        mover = Moving(lambda host, _: device.copy(host.data))
        lease: Any = SimpleNamespace(seen_since=object(), keep=partial(ended.append, number), memory=None)
        copies.issue(mover, Delivery(batch=Host(device, number), lease=lease))
    copies.drop_finished()
    assert ended == []
    device.advance()
    device.advance()
    copies.drop_finished()
    copies.drop_finished()
    assert ended == [0, 1]
    copies.close()


class Unlucky(LoaderThread):
    """Is interrupted while it starts, the first time."""

    num_left = 1

    def start(self) -> None:
        if Unlucky.num_left:
            Unlucky.num_left -= 1
            raise KeyboardInterrupt
        super().start()


def test_a_thread_that_did_not_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LoaderThread", Unlucky)
    monkeypatch.setattr(Unlucky, "num_left", 1)
    device = FakeDevice(lag=9)
    copies = CopiesInFlight(device)
    mover = Moving(lambda host, _: device.copy(host.data))
    with pytest.raises(KeyboardInterrupt):
        copies.issue(mover, Delivery(batch=Host(device, 0)), in_background=True)
    moved = copies.issue(mover, Delivery(batch=Host(device, 1)), in_background=True)
    moved.wait()
    assert moved.error is None
    copies.close()
    device.run()
    assert (moved.batch == 1).all()


class Fails(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError, Fails])
def test_whatever_a_move_in_the_background_raises_the_next_is_moved(error: Any) -> None:
    device = FakeDevice(lag=9)
    copies = CopiesInFlight(device)

    def fail(host: Host, transfer: Transfer) -> Any:
        raise error("no")

    moves = [
        copies.issue(Moving(move), Delivery(batch=Host(device, number)), in_background=True)
        for number, move in enumerate([fail, lambda host, _: device.copy(host.data)])
    ]
    for moved in moves:
        moved.wait()
    assert [type(moved.error) for moved in moves] == [error, type(None)]
    moves[0].error = None
    copies.close()


def test_what_is_left_when_it_is_closed_is_not_moved_any_more() -> None:
    device, begun, may_go = FakeDevice(lag=9), Event(), Event()
    copies = CopiesInFlight(device)

    def move(host: Host, transfer: Transfer) -> Any:
        begun.set()
        may_go.wait()
        return device.copy(host.data)

    first, second = (copies.issue(Moving(move), Delivery(batch=Host(device, n)), in_background=True) for n in (0, 1))
    begun.wait()
    closing = Thread(target=copies.close)
    closing.start()
    wait_until(lambda: copies._is_closed, "it is closing")
    may_go.set()
    closing.join()
    assert (first.error, first.batch is None) == (None, False)
    assert isinstance(second.error, LoaderClosed)
    assert device.log.count("copy 0") == 1
    assert not any(entry.startswith("copy") for entry in device.log[1:])
