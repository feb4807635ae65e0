"""Page-locking, and what is in page-locked memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swift_loader import SwiftLoaderWarning
from swift_loader.device.pinning import PageLock
from swift_loader.executors.process import memory
from tests.support.helpers import fork_once
from tests.system.device.cuda.images import (
    BATCH_SIZE,
    SIDE,
    Gpu,
    LateMove,
    check_all,
    image_loader,
    make_segment,
    on_one_gpu,
)


@on_one_gpu
def test_a_segment_is_page_locked_until_it_is_unmapped(gpu: Gpu) -> None:
    notices: list[str] = []
    page_lock = PageLock(gpu.registry(), notices)
    for _ in range(3):  # as a rule, at the same address
        segment = make_segment()
        page_lock.lock(segment)
        assert torch.from_numpy(segment.array()).is_pinned()
        assert torch.from_numpy(segment.array()[4096:8192]).is_pinned()
        del segment
    assert notices == []


@on_one_gpu
def test_a_ctrl_c_right_after_page_locking_leaves_nothing_page_locked_that_is_unmapped(gpu: Gpu) -> None:
    registry = gpu.registry()
    register = registry.register

    def interrupted(address: int, nbytes: int) -> str | None:
        assert register(address, nbytes) == ""
        raise KeyboardInterrupt

    registry.register = interrupted
    for number in range(3):  # as a rule, at the same address
        segment = make_segment()
        assert not torch.from_numpy(segment.array()).is_pinned(), "it was page-locked still"
        with pytest.raises(KeyboardInterrupt):
            PageLock(registry, []).lock(segment)
        segment.array()[:] = number
        assert torch.from_numpy(segment.array()).to(gpu.device, non_blocking=True).eq(number).all().item()
        del segment


@on_one_gpu
def test_large_batches_that_are_ready_stay_in_page_locked_memory(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_HELD_BYTES", 3 * BATCH_SIZE * 3 * SIDE * SIDE)
    move = LateMove(gpu, 0.1)
    with image_loader(300, data_queue_size=10) as loader:
        loader.start(device=gpu.device, to_device=move)
        check_all(gpu, loader, 300, 0.1)
    assert all(move.were_pinned)


@on_one_gpu
def test_forks_of_the_program_cost_no_slot_that_only_the_loader_uses(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, calls = type(gpu.registry()), list[int]()
    register = registry.register

    def noted(self: Any, address: int, nbytes: int) -> str | None:
        calls.append(nbytes)
        return str(register(self, address, nbytes))

    monkeypatch.setattr(registry, "register", noted)
    with image_loader(120) as loader:
        loader.start(device=gpu.device)
        for step, _ in enumerate(loader):
            if step % 6 == 0:
                fork_once()
    assert len(calls) <= 20, "20 forks retire no slots"


@on_one_gpu
def test_batches_arrive_also_if_their_memory_cannot_be_page_locked(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(gpu.registry()), "register", lambda self, address, nbytes: "no luck")
    with image_loader() as loader:
        loader.start(device=gpu.device)
        with pytest.warns(SwiftLoaderWarning, match="no luck"):
            check_all(gpu, loader, 12)


def test_pin_memory_without_a_device_gives_page_locked_tensors(gpu: Gpu) -> None:
    with image_loader(300, pin_memory=True) as loader:
        moved = []
        for batch in loader:
            assert batch.device.type == "cpu"
            assert batch.is_pinned()
            moved.append(batch.to(gpu.device, non_blocking=True))
            del batch
        check_all(gpu, moved, 300)
