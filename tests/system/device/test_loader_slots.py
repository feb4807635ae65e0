"""The memory of the batches that a loader copies to a fake device: page-locked, kept, unmapped."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from swift_loader import SwiftLoaderWarning
from swift_loader.engine.engine import Engine
from swift_loader.executors.process import memory
from swift_loader.executors.process.memory import WorkerMemory
from tests.support.device_loaders import BATCH_SIZE, NBYTES, Start, check, engine_of, wait_for_ready
from tests.support.fake_device import FakeDevice, Registry
from tests.support.resizing import workers_of


def is_in(batch: Any, segments: dict[int, int]) -> bool:
    return any(first <= batch.ctypes.data < first + nbytes for first, nbytes in segments.items())


def checked_move(device: FakeDevice, registry: Registry) -> Callable[[Any], Any]:
    def move(batch: Any) -> Any:
        assert is_in(batch, registry.locked), "a batch was copied from memory that isn't page-locked"
        return device.copy(batch)

    return move


def test_segments_are_page_locked_before_a_batch_is_in_them(start_on: Start) -> None:
    device, registry = FakeDevice(lag=1), Registry()

    def move(batch: Any) -> Any:
        address = batch.ctypes.data
        assert any(first <= address < first + nbytes for first, nbytes in registry.locked.items())
        return device.copy(batch)

    loader = start_on(device, move=move, registry=registry)
    assert len(list(loader)) == 24
    loader.close()
    gc.collect()
    assert registry.locked == {}
    assert registry.log.count("register") == registry.log.count("unregister") > 0


def test_without_page_locking_there_is_one_warning_and_the_same_batches(start_on: Start) -> None:
    device = FakeDevice()
    loader = start_on(device, registry=Registry("operation not supported"))
    with pytest.warns(SwiftLoaderWarning, match="page-locking .* failed .operation not supported") as told:
        batches = list(loader)
    device.run()
    assert len(told) == 1
    check(batches)


def test_batches_that_are_ready_do_not_count_as_kept(start_on: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_HELD_BYTES", 3 * BATCH_SIZE * NBYTES)
    device, registry = FakeDevice(lag=1), Registry()
    loader = start_on(device, move=checked_move(device, registry), registry=registry, data_queue_size=10, workers=1)
    batches = iter(loader)
    next(batches)
    wait_for_ready(loader, 8)
    assert len(list(batches)) == 23


def test_batches_that_are_being_copied_do_not_count_as_kept(start_on: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_HELD_BYTES", 2 * BATCH_SIZE * NBYTES)
    device, registry = FakeDevice(lag=9), Registry()
    loader = start_on(
        device,
        move=checked_move(device, registry),
        registry=registry,
        data_queue_size=4,
        workers=1,
        max_nb_batch_on_device=9,
    )
    assert len(list(loader)) == 24


def test_what_a_move_keeps_of_the_host_s_memory_counts(start_on: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_HELD_SLOTS", 5)
    device, kept = FakeDevice(), list[Any]()

    def move(batch: Any) -> Any:
        kept.append(batch)
        return device.copy(batch)

    loader = start_on(device, move=move, data_queue_size=4, workers=1)
    assert len(list(loader)) == 24
    (worker,) = workers_of(loader)
    assert isinstance(worker.memory, WorkerMemory)
    assert 5 <= len(worker.memory._leases._held) <= 5 + 4 + 2
    check(kept)


def test_a_slot_that_could_not_be_page_locked_is_when_it_is_used_next(start_on: Start) -> None:
    registry = Registry(*[None] * 3)
    device, were_locked = FakeDevice(), list[bool]()

    def move(batch: Any) -> Any:
        were_locked.append(is_in(batch, registry.locked))
        return device.copy(batch)

    loader = start_on(device, move=move, registry=registry, data_queue_size=1, workers=1)
    for _ in range(2):
        list(loader)
    assert all(were_locked[24:]), "slots stay as they were at the first attempt"


class Watching(Registry):
    """Notes what the thread holds that takes the page-locking back."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None
        self.held: list[bool] = []

    def unregister(self, address: int) -> bool:
        if self.engine is not None:
            locks: list[Any] = [self.engine.dispatch_lock, self.engine.lock]
            self.held.append(any(lock._is_owned() for lock in locks))
        return super().unregister(address)


def test_a_dead_worker_s_memory_is_unlocked_and_unmapped_without_a_lock(start_on: Start) -> None:
    registry = Watching()
    loader = start_on(FakeDevice(), registry=registry, workers=1, data_queue_size=4)
    list(loader)
    registry.engine = engine_of(loader)
    (worker,) = workers_of(loader)
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.warns(SwiftLoaderWarning, match="SIGKILL"):
        assert len(list(loader)) == 24
    registry.engine = None
    assert registry.held
    assert not any(registry.held), "tasks can't be sent meanwhile"


def test_slots_that_are_too_many_are_unlocked_and_unmapped_without_a_lock(start_on: Start) -> None:
    device, registry, kept = FakeDevice(), Watching(), list[Any]()

    def move(batch: Any) -> Any:
        kept.append(batch)
        return device.copy(batch)

    loader = start_on(device, move=move, registry=registry, workers=1, data_queue_size=1)
    list(loader)
    registry.engine = engine_of(loader)
    kept.clear()
    for _ in loader:
        kept.clear()
    registry.engine = None
    assert registry.held
    assert not any(registry.held), "tasks can't be sent meanwhile"
