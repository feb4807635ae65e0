from __future__ import annotations

import os
import threading

from swift_loader.device.pinning import PageLock
from swift_loader.transport.segments import Segment

PAGE_NBYTES = os.sysconf("SC_PAGESIZE")


class Registry:
    """Takes note instead of page-locking."""

    def __init__(self, *wrong: str | None) -> None:
        self._wrong = list(wrong)
        self.locked: dict[int, int] = {}
        self.log: list[str] = []
        self.is_stuck = False

    def register(self, address: int, nbytes: int) -> str | None:
        self.log.append("register")
        wrong = self._wrong.pop(0) if self._wrong else ""
        if wrong == "":
            self.locked[address] = nbytes
        return wrong

    def unregister(self, address: int) -> bool:
        self.log.append("unregister")
        assert address in self.locked
        assert "rw" in protection_of(address), "unlocked after it was unmapped"
        if self.is_stuck:
            return False
        del self.locked[address]
        return True


def protection_of(address: int) -> str:
    """Return the permissions of the mapping at an address; nothing if there is none."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if first <= address < last:
                return line.split()[1]
    return ""


def made(nbytes: int = PAGE_NBYTES) -> Segment:
    segment, descriptor = Segment.create(nbytes)
    os.close(descriptor)
    return segment


def test_a_segment_is_page_locked_while_it_is_mapped() -> None:
    registry, told = Registry(), list[str]()
    lock = PageLock(registry, told.append)
    segments = [made(), made(3 * PAGE_NBYTES)]
    for segment in segments:
        lock.lock(segment)
    assert registry.locked == {segment.address: segment.nbytes for segment in segments}
    assert all(segment.address % PAGE_NBYTES == 0 for segment in segments)
    del segment
    segments.pop()
    assert list(registry.locked.values()) == [PAGE_NBYTES]
    segments.clear()
    assert registry.locked == {}
    assert told == []


def test_the_last_reference_may_go_on_any_thread() -> None:
    registry = Registry()
    holder = [made()]
    PageLock(registry, print).lock(holder[0])
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    assert registry.log == ["register", "unregister"]


def test_the_first_failure_is_told_and_nothing_is_tried_after_it() -> None:
    registry, told = Registry("", "out of memory"), list[str]()
    lock = PageLock(registry, told.append)
    assert repr(lock) == "<PageLock works>"
    segments = [made() for _ in range(4)]
    for segment in segments:
        lock.lock(segment)
    assert registry.log == ["register", "register"]
    assert repr(lock) == "<PageLock failed>"
    (text,) = told
    assert "page-locking 4096 bytes of shared memory failed (out of memory)" in text
    assert "ulimit -l" in text
    del segment
    segments.clear()
    assert registry.log[2:] == ["unregister"], "what was locked is unlocked, and nothing else"


def test_what_cannot_be_page_locked_now_stays_as_it_is_and_the_next_one_is_tried() -> None:
    registry, told = Registry(None), list[str]()
    lock = PageLock(registry, told.append)
    segments = [made(), made()]
    for segment in segments:
        lock.lock(segment)
    assert list(registry.locked) == [segments[1].address]
    assert told == []
    del segment
    segments.clear()
    assert registry.log == ["register", "register", "unregister"]


def test_what_cannot_be_unlocked_stays_mapped() -> None:
    registry = Registry()
    holder = [made()]
    PageLock(registry, print).lock(holder[0])
    address = holder[0].address
    registry.is_stuck = True
    holder.clear()
    assert registry.log == ["register", "unregister"]
    assert "rw" in protection_of(address), "another mapping could get the address"


def test_a_fork_of_the_trainer_does_not_touch_the_device() -> None:
    registry = Registry()
    holder = [made()]
    PageLock(registry, print).lock(holder[0])
    pid = os.fork()
    if pid == 0:
        holder.clear()
        os._exit(registry.log.count("unregister"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    holder.clear()
    assert registry.log == ["register", "unregister"]
