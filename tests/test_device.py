"""Loaders that deliver to a device: a fake one whose copies are late, and the CPU."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader import SwiftLoader, SwiftLoaderWarning, batch_key
from swift_loader.device.destination import Destination
from swift_loader.device.pinning import PageLock
from tests.datasets import Blocks
from tests.device.fake import FakeDevice
from tests.device.test_pinning import Registry
from tests.helpers import make_loader

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

        destination = Destination(move or device.copy, lambda: device, page_lock)
        monkeypatch.setattr("swift_loader.loader.find_destination", lambda *_, **__: destination)
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


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("depth", [1, 3])
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
        def advance(self) -> None:
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
        ({"device": "cpu", "dtype": torch.int8}, "no floating-point dtype"),
        ({"device": "cpu", "dtype": "half"}, "no floating-point dtype"),
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
        with pytest.warns(SwiftLoaderWarning, match="pin_memory=True makes tensors of arrays, but page-locks nothing"):
            loader.start()
        batches = list(loader)
    assert all(isinstance(batch, torch.Tensor) for batch in batches)
    assert all(np.array_equal(batch, array) for batch, array in zip(batches, plain, strict=True))
