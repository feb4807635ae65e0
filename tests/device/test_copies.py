"""The protocol of copies, with a device that makes them late: copy issued, event, wait, release."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from swift_loader.device.copies import Copies
from swift_loader.device.streams import NoStream
from tests.device.fake import FakeDevice


class Host:
    """A batch on the host."""

    def __init__(self, device: FakeDevice, number: int) -> None:
        self.data = np.full(8, number)
        device.watch(self, number)


def issue(copies: Copies, device: FakeDevice, number: int) -> tuple[Any, Any]:
    return copies.issue(lambda host: device.copy(host.data), Host(device, number))


def test_a_batch_is_copied_recorded_handed_over_and_then_let_go() -> None:
    device = FakeDevice(lag=1)
    copies = Copies(device)
    moved, event = issue(copies, device, 0)
    assert (moved == -1).all(), "copied before its time"
    copies.hand_over(moved, event)
    assert (moved == -1).all(), "the loop's thread waited"
    device.run()
    assert (moved == 0).all()
    copies.let_go()
    assert device.log == ["copy 0", "event 0", "hand over 0", "release 0"]


def test_a_copy_under_way_keeps_its_host_batch_and_only_that() -> None:
    device = FakeDevice(lag=9)
    copies = Copies(device)
    for number in range(4):
        issue(copies, device, number)
    assert repr(copies) == "<Copies 4 under way>"
    device.advance()
    device.advance()
    assert not [entry for entry in device.log if entry.startswith("release")], "let go by nobody"
    copies.let_go()
    assert device.log[-2:] == ["release 0", "release 1"]
    assert repr(copies) == "<Copies 2 under way>"
    copies.close()


def test_closing_waits_for_the_last_copy_and_lets_all_go() -> None:
    device = FakeDevice(lag=9)
    copies = Copies(device)
    moved = [issue(copies, device, number)[0] for number in range(3)]
    copies.close()
    assert [int(array[0]) for array in moved] == [0, 1, 2]
    assert device.log[6:] == ["wait for 2", "release 0", "release 1", "release 2"]
    copies.close()
    assert len(device.log) == 10


def test_what_a_move_that_raises_has_issued_is_under_way_all_the_same() -> None:
    device = FakeDevice(lag=9)
    copies = Copies(device)

    def move(host: Host) -> None:
        device.copy(host.data)
        raise ValueError("the second array is too large")

    with pytest.raises(ValueError, match="too large"):
        copies.issue(move, Host(device, 0))
    assert device.log == ["copy 0", "event 0"], "its memory could be written while it is read"
    copies.close()
    assert device.log[-1] == "release 0"


def test_a_move_that_is_over_when_it_returns_keeps_nothing() -> None:
    device = FakeDevice()
    copies = Copies(NoStream())
    moved, event = copies.issue(lambda host: host.data.copy(), Host(device, 0))
    assert device.log == ["release 0"]
    assert event.query()
    event.synchronize()
    copies.hand_over(moved, event)
    assert (moved == 0).all()


def test_an_error_of_the_device_lets_the_batches_go() -> None:
    class Broken(FakeDevice):
        def advance(self) -> None:
            raise RuntimeError("the device is gone")

    device = Broken(lag=9)
    copies = Copies(device)
    issue(copies, device, 0)
    with pytest.raises(RuntimeError, match="is gone"):
        copies.close()
    assert device.log[-1] == "release 0"


def test_a_copy_issued_while_another_thread_closes_is_waited_for() -> None:
    device = FakeDevice(lag=9)
    copies = Copies(device)

    def move(host: Host) -> Any:
        copies.close()  # as another thread would, in the midst of this
        return device.copy(host.data)

    moved, _ = copies.issue(move, Host(device, 3))
    assert (moved == 3).all()
    assert device.log == ["copy 0", "event 0", "wait for 0", "release 3"]


def test_a_fork_of_the_trainer_does_not_wait_for_the_device() -> None:
    device = FakeDevice(lag=9)
    copies = Copies(device)
    issue(copies, device, 0)
    pid = os.fork()
    if pid == 0:
        copies.close()
        os._exit(any(entry.startswith("wait") for entry in device.log))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    copies.close()
    assert "wait for 0" in device.log
