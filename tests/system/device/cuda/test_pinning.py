"""What only a GPU can tell about page-locking."""

from __future__ import annotations

import mmap
import resource
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch

from swift_loader import SwiftLoaderWarning
from swift_loader.device.pinning import CudaRegistry, PageLock
from swift_loader.executors.process import memory
from tests.system.device.cuda.images import (
    BATCH_SIZE,
    CUDA,
    MILLISECOND,
    NEEDS_GPU,
    SIDE,
    LateMove,
    check_all,
    cuda,
    image_loader,
    make_segment,
)

pytestmark = NEEDS_GPU


def test_a_segment_is_page_locked_until_it_is_unmapped() -> None:
    notices: list[str] = []
    page_lock = PageLock(CudaRegistry(CUDA), notices)
    for _ in range(3):  # as a rule, at the same address
        segment = make_segment()
        page_lock.lock(segment)
        assert torch.from_numpy(segment.array()).is_pinned()
        assert torch.from_numpy(segment.array()[4096:8192]).is_pinned()
        del segment
    assert notices == []


def test_page_locking_that_fails_says_why_and_does_not_poison_the_next_operation() -> None:
    assert CudaRegistry(CUDA).register(mmap.PAGESIZE, mmap.PAGESIZE)
    assert torch.ones(2, device=CUDA).sum().item() == 2


def test_memory_that_is_page_locked_already_is_page_locked_anew() -> None:
    registry, segment = CudaRegistry(CUDA), make_segment()
    assert registry.register(segment.address, mmap.PAGESIZE) == ""
    assert registry.register(segment.address, segment.nbytes) == ""
    assert torch.ones(2, device=CUDA).sum().item() == 2
    assert torch.from_numpy(segment.array()[-mmap.PAGESIZE :]).is_pinned()
    assert registry.unregister(segment.address)
    assert registry.unregister(segment.address), "it isn't page-locked, as was wanted"
    assert torch.ones(2, device=CUDA).sum().item() == 2


def test_a_ctrl_c_right_after_page_locking_leaves_nothing_page_locked_that_is_unmapped() -> None:
    class Interrupted(CudaRegistry):
        def register(self, address: int, nbytes: int) -> str | None:
            assert super().register(address, nbytes) == ""
            raise KeyboardInterrupt

    for number in range(3):  # as a rule, at the same address
        segment = make_segment()
        with pytest.raises(KeyboardInterrupt):
            PageLock(Interrupted(CUDA), []).lock(segment)
        segment.array()[:] = number
        assert torch.from_numpy(segment.array()).to(CUDA, non_blocking=True).eq(number).all().item()
        address = segment.address
        del segment
        assert int(CudaRegistry(CUDA)._cudart.cudaHostUnregister(address)), "it was page-locked still"
        with suppress(RuntimeError):
            torch.ones(2, device=CUDA)  # is told of that error


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_page_locking_does_not_end_the_capture_of_another_thread(mode: str) -> None:
    registry, segment, told = CudaRegistry(CUDA), make_segment(), list[Any]()
    values, graph = torch.zeros(8, device=CUDA), cuda.CUDAGraph()

    def lock_and_unlock() -> None:
        told.append(registry.register(segment.address, segment.nbytes))
        told.append(registry.unregister(segment.address))
        told.append(registry.register(segment.address, segment.nbytes))

    thread = threading.Thread(target=lock_and_unlock)
    torch.cuda.synchronize()
    with cuda.graph(graph, capture_error_mode=mode):
        values.add_(1)
        thread.start()
        thread.join()
        values.add_(1)
    assert told == ["", True, ""]
    assert torch.from_numpy(segment.array()).is_pinned()
    graph.replay()
    assert values.tolist() == [2] * 8
    assert registry.unregister(segment.address)


def test_the_limit_of_locked_memory_does_not_hold_for_the_driver() -> None:
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, limits[1]))
    try:
        registry, segment = CudaRegistry(CUDA), make_segment(1 << 26)
        assert registry.register(segment.address, segment.nbytes) == ""
        assert registry.unregister(segment.address)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


def test_large_batches_that_are_ready_stay_in_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_HELD_BYTES", 3 * BATCH_SIZE * 3 * SIDE * SIDE)
    move = LateMove(MILLISECOND // 5)
    with image_loader(300, data_queue_size=10) as loader:
        loader.start(device=CUDA, to_device=move)
        check_all(loader, 300, MILLISECOND // 5)
    assert all(move.were_pinned)


def test_batches_arrive_also_if_their_memory_cannot_be_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaRegistry, "register", lambda self, address, nbytes: "no luck")
    with image_loader() as loader:
        loader.start(device=CUDA)
        with pytest.warns(SwiftLoaderWarning, match="no luck"):
            check_all(loader, 12)


def test_pin_memory_without_a_device_gives_page_locked_tensors() -> None:
    with image_loader(300, pin_memory=True) as loader:
        moved = []
        for batch in loader:
            assert batch.device.type == "cpu"
            assert batch.is_pinned()
            moved.append(batch.to(CUDA, non_blocking=True))
            del batch
        check_all(moved, 300)
