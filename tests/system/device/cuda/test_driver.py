"""What only NVIDIA's driver can tell: its codes, its last error, captures, limits. The simulated GPU has none of it."""

from __future__ import annotations

import mmap
import resource
import threading
from typing import Any

import pytest
import torch

from swift_loader.device.pinning import CudaRegistry
from tests.system.device.cuda.images import CUDA, NEEDS_GPU, make_segment

pytestmark = NEEDS_GPU


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


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_page_locking_does_not_end_the_capture_of_another_thread(mode: str) -> None:
    registry, segment, told = CudaRegistry(CUDA), make_segment(), list[Any]()
    values, graph = torch.zeros(8, device=CUDA), torch.cuda.CUDAGraph()

    def lock_and_unlock() -> None:
        told.append(registry.register(segment.address, segment.nbytes))
        told.append(registry.unregister(segment.address))
        told.append(registry.register(segment.address, segment.nbytes))

    thread = threading.Thread(target=lock_and_unlock)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode=mode):
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
