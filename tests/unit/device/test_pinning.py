from __future__ import annotations

import ctypes
import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_loader.device.pinning import CudaRegistry, PageLock
from swift_loader.transport.segments import Segment
from tests.support.fake_device import Registry, protection_of

pytestmark = pytest.mark.processes

PAGE_NBYTES = os.sysconf("SC_PAGESIZE")


class Cuda:
    """CUDA's runtime and driver, as far as page-locking goes: what is registered, and who may call what when."""

    GLOBAL, THREAD_LOCAL, RELAXED = range(3)

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.is_capturing = False
        """Whether another thread captures a graph in global mode."""
        self.capture_failed = False
        self.last_error = 0
        """What torch would raise after the next kernel."""
        self.modes = threading.local()
        """The capture mode of each thread."""

    @property
    def mode(self) -> int:
        mode: int = getattr(self.modes, "mode", self.GLOBAL)
        return mode

    def exchange(self, pointer: Any) -> int:
        """Do what cuThreadExchangeStreamCaptureMode does."""
        wanted = pointer._obj
        self.modes.mode, wanted.value = wanted.value, self.mode
        return 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if address in self.registered:
            return self._answer(712)
        return self._answer(0, lambda: self.registered.update({address: nbytes}))

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if address not in self.registered:
            return self._answer(713)
        return self._answer(0, lambda: self.registered.pop(address))

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return f"error {code}"

    def _answer(self, code: int, deed: Any = None) -> int:
        if self.is_capturing and self.mode != self.RELAXED:
            self.capture_failed, code = True, 900
        elif deed is not None:
            deed()
        self.last_error = code or self.last_error
        return code


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Put a fake in the place of CUDA."""
    fake = Cuda()

    def launch(*_: Any, **__: Any) -> None:
        failed, fake.last_error = fake.last_error, 0
        if failed:
            raise RuntimeError(f"CUDA error {failed}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch, "zeros", launch)
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=fake.exchange)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": driver}[name])
    return fake


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
    assert "`ulimit -l` doesn't matter for NVIDIA's driver" in text
    assert "Lower batch_size or data_queue_size" in text
    del segment
    segments.clear()
    assert registry.log[2:] == ["unregister"], "what was locked is unlocked, and nothing else"


def test_what_could_not_be_page_locked_is_tried_again_when_it_is_used_next_and_only_then() -> None:
    registry, told = Registry(None, None), list[str]()
    lock, segment = PageLock(registry, told.append), made()
    for _ in range(5):
        lock.lock(segment)
    assert registry.log == ["register"] * 3
    assert list(registry.locked) == [segment.address]
    del segment
    assert (registry.locked, told) == ({}, [])


def test_a_ctrl_c_right_after_page_locking_leaves_nothing_page_locked_that_is_unmapped() -> None:
    class Interrupted(Registry):
        def register(self, address: int, nbytes: int) -> str | None:
            super().register(address, nbytes)
            raise KeyboardInterrupt

    registry, holder = Interrupted(), [made()]
    with pytest.raises(KeyboardInterrupt):
        PageLock(registry, print).lock(holder[0])
    address = holder[0].address
    holder.clear()
    assert registry.locked == {}, "the device would read the old pages of whatever is mapped there next"
    assert protection_of(address) == ""


def test_a_ctrl_c_right_before_page_locking_leaves_nothing_mapped(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, holder = CudaRegistry(torch.device("cuda", 0)), [made()]

    def interrupt(address: int, nbytes: int) -> str | None:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "register", interrupt)
    with pytest.raises(KeyboardInterrupt):
        PageLock(registry, print).lock(holder[0])
    address = holder[0].address
    holder.clear()
    assert protection_of(address) == "", "that it isn't page-locked is what was wanted"
    assert cuda.last_error == 0, "the user's next kernel would be blamed"


def test_memory_that_counts_as_page_locked_from_before_is_page_locked_anew(cuda: Cuda) -> None:
    segment = made(2 * PAGE_NBYTES)
    cuda.registered[segment.address] = PAGE_NBYTES  # of a mapping that was here before
    assert CudaRegistry(torch.device("cuda", 0)).register(segment.address, segment.nbytes) == ""
    assert cuda.registered == {segment.address: segment.nbytes}
    assert cuda.last_error == 0


def test_page_locking_does_not_end_the_capture_of_another_thread(cuda: Cuda) -> None:
    registry, segment = CudaRegistry(torch.device("cuda", 0)), made()
    cuda.is_capturing = True
    assert registry.register(segment.address, segment.nbytes) == ""
    assert registry.unregister(segment.address)
    assert not cuda.capture_failed
    assert cuda.mode == cuda.GLOBAL, "the user's thread was left in another mode"


def test_without_the_drivers_call_page_locking_waits_for_the_end_of_the_capture(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    registry, segment, told = CudaRegistry(torch.device("cuda", 0)), made(), list[str]()
    lock = PageLock(registry, told.append)
    cuda.is_capturing = True
    lock.lock(segment)
    assert cuda.registered == {}
    cuda.is_capturing = False
    lock.lock(segment)
    assert cuda.registered == {segment.address: segment.nbytes}
    assert told == []


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
