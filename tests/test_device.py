"""Loaders that deliver to a device: a fake one whose copies are late, and the CPU."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from swift_loader import SwiftLoader, SwiftLoaderWarning, batch_key
from swift_loader.delivery import receivers
from swift_loader.delivery.dispatcher import Dispatcher
from swift_loader.device.destination import Destination
from swift_loader.device.pinning import PageLock
from swift_loader.device.transfer import Transfer
from swift_loader.executors.process import lease
from swift_loader.executors.process.executor import ProcessExecutor
from swift_loader.executors.process.worker import WorkerHandle
from swift_loader.transport.board import NUM_BEGUN
from tests.datasets import Blocks, Counting
from tests.device.fake import FakeDevice
from tests.device.test_pinning import Registry
from tests.helpers import make_loader, slow, wait_until

NBYTES, NUM_SAMPLES = Blocks.NBYTES, Blocks.NUM_SAMPLES
BATCH_SIZE = 4


Start = Callable[..., SwiftLoader]


@pytest.fixture
def start_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return what starts a loader whose batches go to a fake device."""
    started: list[SwiftLoader] = []

    def start(
        device: FakeDevice,
        *,
        move: Callable[[Any], Any] | None = None,
        registry: Registry | None = None,
        **options: Any,
    ) -> SwiftLoader:
        def page_lock(notify: Callable[[str], None]) -> PageLock:
            return PageLock(registry or Registry(), notify)

        def to_device(batch: Any, transfer: Transfer) -> Any:
            moved = (move or device.copy)(batch)
            transfer.parts.append(moved)
            return moved

        destination = Destination(to_device, lambda: device, page_lock)
        monkeypatch.setattr("swift_loader.lifecycle.find_destination", lambda *_, **__: destination)
        loader = make_loader(Blocks, batch_size=BATCH_SIZE, **{"shuffle": False, **options})
        started.append(loader)
        loader.start()
        return loader

    yield start
    for loader in started:
        loader.close()


def expected(step: int) -> Any:
    return np.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE, dtype=np.uint8)[:, None]


def check(batches: Iterable[Any]) -> None:
    """Look at the batches of a pass, when the device has made them."""
    for step, batch in enumerate(batches):
        assert batch.shape == (BATCH_SIZE, NBYTES)
        assert (batch == expected(step)).all(), f"batch {step} has the bytes of another one"


@pytest.mark.parametrize("lag", [slow(0), 1, 4])
@pytest.mark.parametrize("depth", [slow(1), 3])
def test_no_slot_is_written_again_before_its_copy_is_over(start_on: Start, lag: int, depth: int) -> None:
    device = FakeDevice(lag)
    loader = start_on(device, data_queue_size=2, max_nb_batch_on_device=depth)
    for _ in range(3):
        batches = list(loader)
        device.run()
        assert len(batches) == NUM_SAMPLES // BATCH_SIZE
        check(batches)


def test_each_batch_is_copied_once_and_handed_over_after_its_event_was_recorded(start_on: Start) -> None:
    device = FakeDevice(lag=2)
    loader = start_on(device)
    assert len(list(loader)) == 24
    for number in range(24):
        places = [device.log.index(f"{what} {number}") for what in ("copy", "event", "hand over")]
        assert places == sorted(places)
    assert len([entry for entry in device.log if entry.startswith("copy")]) == 24


def test_a_pass_that_is_left_loses_no_slot_and_harms_no_copy(start_on: Start) -> None:
    device = FakeDevice(lag=5)
    loader = start_on(device, data_queue_size=2, max_nb_batch_on_device=3)
    left = [list(itertools.islice(loader, 3)) for _ in range(12)]
    whole = list(loader)
    device.run()
    for batches in (*left, whole):
        check(batches)
    assert [len(batches) for batches in (*left, whole)] == [*[3] * 12, 24]


def test_closing_waits_for_the_copies_that_read_what_it_gives_back(start_on: Start) -> None:
    device, registry = FakeDevice(lag=99), Registry()
    moved: list[Any] = []

    def move(batch: Any) -> Any:
        moved.append(device.copy(batch))
        return moved[-1]

    loader = start_on(device, move=move, registry=registry, max_nb_batch_on_device=4)
    batches = iter(loader)
    next(batches)
    num_moved = len(moved)
    assert device.num_passed < num_moved or num_moved == 1
    loader.close()
    assert device.num_passed == num_moved
    check(moved)
    del batches
    gc.collect()
    assert registry.locked == {}, "still page-locked, though nobody has it any more"


def test_a_device_that_fails_while_it_is_closed_keeps_no_step_of_closing_from_being_taken(
    start_on: Start, tmp_path: Path
) -> None:
    class Broken(FakeDevice):
        def _advance_side(self) -> None:
            raise RuntimeError("the device is gone")

    report = tmp_path / "report.json"
    loader = start_on(Broken(lag=99), benchmark_file=report)
    next(iter(loader))
    loader.close()
    assert "batches" in report.read_text()


def test_an_error_of_the_move_comes_where_its_batch_would_have_come(start_on: Start) -> None:
    device, calls = FakeDevice(lag=2), []

    def move(batch: Any) -> Any:
        calls.append(1)
        moved = device.copy(batch)
        if len(calls) == 6:
            raise ValueError("no room on the device")
        return moved

    loader = start_on(device, move=move, data_queue_size=2, max_nb_batch_on_device=3)
    batches = iter(loader)
    before = [next(batches) for _ in range(5)]
    for _ in range(2):
        with pytest.raises(ValueError, match="no room"):
            next(batches)
    after = list(loader)
    device.run()
    assert len(after) == 24
    check(before)
    check(after)


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


def dispatcher_of(loader: SwiftLoader) -> Dispatcher:
    assert loader._session is not None
    return loader._session.dispatcher


def workers_of(loader: SwiftLoader) -> list[WorkerHandle]:
    executor = dispatcher_of(loader)._executor
    assert isinstance(executor, ProcessExecutor)
    return list(executor._supervisor.workers.all.values())


def wait_for_ready(loader: SwiftLoader, count: int) -> None:
    """Wait until so many batches are ready; receiver threads are to be on duty, as after the first batch."""
    dispatcher = dispatcher_of(loader)
    wait_until(lambda: dispatcher._scheduler.ledger.num_ready >= count, f"{count} batches are ready")


@pytest.mark.parametrize("depth", [1, 4])
def test_a_loop_that_never_waits_for_the_device_needs_no_more_of_its_memory_with_time(
    start_on: Start, depth: int
) -> None:
    device, seen = FakeDevice(lag=1), list[set[int]]()
    loader = start_on(device, max_nb_batch_on_device=depth)
    for _ in range(42):
        for batch in loader:
            device.use(batch, seen)
    device.run()
    assert len(seen) == 42 * 24 >= 1000
    assert seen == 42 * [{*range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)} for step in range(24)]
    steps = max(2, depth)
    assert device.num_blocks <= depth + steps + 3, "one in use, one that is asked for, and one that is being freed"


def test_a_loop_that_waits_for_each_step_needs_memory_for_what_is_ahead_only(start_on: Start) -> None:
    device, seen = FakeDevice(), list[set[int]]()
    loader = start_on(device, max_nb_batch_on_device=1)
    for batch in loader:
        device.use(batch, seen)
        device.run()
        del batch
    assert len(seen) == 24
    assert device.num_blocks <= 3


def is_in(batch: Any, segments: dict[int, int]) -> bool:
    return any(first <= batch.ctypes.data < first + nbytes for first, nbytes in segments.items())


def checked_move(device: FakeDevice, registry: Registry) -> Callable[[Any], Any]:
    def move(batch: Any) -> Any:
        assert is_in(batch, registry.locked), "a batch was copied from memory that isn't page-locked"
        return device.copy(batch)

    return move


def test_batches_that_are_ready_do_not_count_as_kept(start_on: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "MAX_HELD_BYTES", 3 * BATCH_SIZE * NBYTES)
    device, registry = FakeDevice(lag=1), Registry()
    loader = start_on(device, move=checked_move(device, registry), registry=registry, data_queue_size=10, workers=1)
    batches = iter(loader)
    next(batches)
    wait_for_ready(loader, 8)
    assert len(list(batches)) == 23


def test_batches_that_are_being_copied_do_not_count_as_kept(start_on: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "MAX_HELD_BYTES", 2 * BATCH_SIZE * NBYTES)
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
    monkeypatch.setattr(lease, "MAX_HELD_SLOTS", 5)
    device, kept = FakeDevice(), list[Any]()

    def move(batch: Any) -> Any:
        kept.append(batch)
        return device.copy(batch)

    loader = start_on(device, move=move, data_queue_size=4, workers=1)
    assert len(list(loader)) == 24
    (worker,) = workers_of(loader)
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
        self.engine: Dispatcher | None = None
        self.held: list[bool] = []

    def unregister(self, address: int) -> bool:
        if self.engine is not None:
            locks: list[Any] = [self.engine._dispatch_lock, self.engine._lock]
            self.held.append(any(lock._is_owned() for lock in locks))
        return super().unregister(address)


def test_a_dead_worker_s_memory_is_unlocked_and_unmapped_without_a_lock(start_on: Start) -> None:
    registry = Watching()
    loader = start_on(FakeDevice(), registry=registry, workers=1, data_queue_size=4)
    list(loader)
    registry.engine = dispatcher_of(loader)
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
    registry.engine = dispatcher_of(loader)
    kept.clear()
    for _ in loader:
        kept.clear()
    registry.engine = None
    assert registry.held
    assert not any(registry.held), "tasks can't be sent meanwhile"


def test_a_quick_loop_finds_what_is_in_the_pipes_and_has_it_moved_ahead(
    start_on: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receivers, "SHORT_ABSENCE_NS", 10**15)  # the loop counts as quick, and goes on listening itself
    device, depth = FakeDevice(lag=99), 3
    loader = start_on(device, data_queue_size=10, workers=3, max_nb_batch_on_device=depth, validate=False)
    workers = workers_of(loader)
    ready = dispatcher_of(loader)._scheduler.ledger.queues._queues
    wait_until(lambda: len(ready) == len(workers), "the workers are ready")
    dispatcher_of(loader)._receivers.take()  # type: ignore[union-attr]
    batches = iter(loader)
    next(batches)
    wait_until(lambda: all(map(_is_through, workers)), "all that the workers were told to build is in the pipes")
    next(batches)
    num_moved = len([entry for entry in device.log if entry.startswith("copy")])
    assert num_moved == 2 + depth, "the batches in the pipes weren't looked at"


def _is_through(worker: Any) -> bool:
    """Return whether a worker has announced all that it was told to build, which nobody has taken in."""
    has_begun_all: bool = worker._board.words[NUM_BEGUN] - worker._num_answered == len(worker.tasks)
    return has_begun_all and psutil.Process(worker.process.pid).status() == psutil.STATUS_SLEEPING


class Tensors:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


@pytest.mark.parametrize(("workers", "device"), [(2, None), (0, None), (2, "cpu")])
def test_a_batch_that_arrives_in_inference_mode_is_one_that_autograd_takes(workers: int, device: str | None) -> None:
    weight = torch.ones(1, requires_grad=True)
    with make_loader(Tensors, workers=workers) as loader:
        loader.start(0, device)
        batches = iter(loader)
        with torch.inference_mode():
            early = [next(batches) for _ in range(3)]
        for batch in [*early, *batches]:
            assert not batch.is_inference()
            (batch * weight).sum().backward()


def test_a_batch_that_is_moved_ahead_in_inference_mode_is_one_that_autograd_takes() -> None:
    weight = torch.ones(1, requires_grad=True)
    with make_loader(Counting, workers=1, max_nb_batch_on_device=3) as loader:
        loader.start(0, "cpu")
        batches = iter(loader)
        with torch.inference_mode():
            next(batches)
            wait_for_ready(loader, 3)
            next(batches)
        for batch in itertools.islice(batches, 4):
            (batch["x"] * weight).sum().backward()
    assert weight.grad is not None


def keys_of(loader: SwiftLoader, device: str = "cpu") -> list[list[int]]:
    """Return the keys of the batches, for two epochs."""
    keys: list[int] = []

    def move(batch: Any, device: torch.device) -> int:
        keys.append(batch_key())
        assert batch_key() == keys[-1]
        return keys[-1]

    loader.start(0, device, move)
    with loader:
        return [list(loader), list(loader)]


def test_keys_on_the_device_depend_on_the_batch_alone() -> None:
    once = keys_of(make_loader(Blocks, workers=0))
    assert len({key for epoch in once for key in epoch}) == 24
    assert keys_of(make_loader(Blocks, workers=2, max_nb_batch_on_device=5)) == once
    assert keys_of(make_loader(Blocks, workers=0, seed=8)) != once
    first = make_loader(Blocks, workers=0)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    state = first.state_dict()
    first.close()
    second = make_loader(Blocks, workers=0)
    second.load_state_dict(state)
    assert keys_of(second) == [once[0][5:], once[1]]


def test_ranks_have_keys_of_their_own() -> None:
    found = []
    for rank in (0, 1):
        loader = make_loader(Blocks, workers=0, nb_consumer=2)
        keys: list[int] = []
        loader.start(rank, "cpu", lambda batch, device, keys=keys: keys.append(batch_key()))
        with loader:
            list(loader)
        found.append(keys)
    assert len({*found[0], *found[1]}) == 12


def test_floating_point_tensors_are_converted_and_others_are_not() -> None:
    class Mixed(Blocks):
        def __getitem__(self, index: int) -> Any:
            return {"image": np.full(4, index, np.float32), "label": index}

    with make_loader(Mixed, workers=0) as loader:
        loader.start(0, "cpu", dtype=torch.bfloat16)
        batch = next(iter(loader))
    assert (batch["image"].dtype, batch["label"].dtype) == (torch.bfloat16, torch.int64)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dtype": torch.float16}, "dtype was given without a device"),
        ({"to_device": print}, "to_device was given without a device"),
        ({"device": "cpu", "to_device": 3}, "to_device is a int, which can't be called"),
        ({"device": "cpu", "dtype": torch.int8}, "isn't a floating-point dtype"),
        ({"device": "cpu", "dtype": "half"}, "isn't a floating-point dtype"),
        ({"device": "cpu", "dtype": torch.half, "to_device": print}, "both given"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_starts(arguments: dict[str, Any], text: str) -> None:
    with make_loader(Blocks, workers=1) as loader, pytest.raises(TypeError, match=text):
        loader.start(0, **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
@pytest.mark.parametrize("workers", [0, 1])
def test_pin_memory_without_a_gpu_is_a_warning_and_tensors_all_the_same(workers: int) -> None:
    with make_loader(Blocks, workers=workers) as loader:
        plain = list(loader)
    assert isinstance(plain[0], np.ndarray)
    with make_loader(Blocks, workers=workers, pin_memory=True) as loader:
        with pytest.warns(SwiftLoaderWarning, match="pin_memory=True has no effect except that arrays become tensors"):
            loader.start()
        batches = list(loader)
    assert all(isinstance(batch, torch.Tensor) for batch in batches)
    assert all(np.array_equal(batch, array) for batch, array in zip(batches, plain, strict=True))
