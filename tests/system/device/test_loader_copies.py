"""Loaders that copy to a fake device, which delays copies: when each copy runs, and what it keeps."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_loader.engine import engine
from swift_loader.transport.segments import NUM_BEGUN
from tests.support.device_loaders import BATCH_SIZE, NUM_SAMPLES, Start, check, engine_of
from tests.support.fake_device import FakeDevice, Registry
from tests.support.helpers import exhaustive, wait_until
from tests.support.resizing import workers_of


@pytest.mark.parametrize("lag", [exhaustive(0), 1, 4])
@pytest.mark.parametrize("depth", [exhaustive(1), 3])
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


@pytest.mark.slow
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


def test_a_quick_loop_finds_what_is_in_the_pipes_and_has_it_moved_ahead(
    start_on: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "SHORT_ABSENCE_NS", 10**15)  # the loop counts as quick, and goes on listening itself
    device, depth = FakeDevice(lag=99), 3
    loader = start_on(device, data_queue_size=10, workers=3, max_nb_batch_on_device=depth, validate=False)
    workers = workers_of(loader)
    ready = engine_of(loader)._scheduler.ledger.workers.by_serial
    wait_until(lambda: len(ready) == len(workers), "the workers are ready")
    engine_of(loader)._receivers.take()  # type: ignore[union-attr]
    batches = iter(loader)
    next(batches)
    wait_until(lambda: all(map(_is_through, workers)), "all that the workers were told to build is in the pipes")
    next(batches)
    num_moved = len([entry for entry in device.log if entry.startswith("copy")])
    assert num_moved == 2 + depth, "the batches in the pipes weren't looked at"


def _is_through(worker: Any) -> bool:
    """Return whether a worker has announced all that it was told to build, which nobody has taken in."""
    has_begun_all: bool = worker._count(NUM_BEGUN) - worker._num_answered == len(worker.tasks)
    return has_begun_all and psutil.Process(worker.process.pid).status() == psutil.STATUS_SLEEPING
