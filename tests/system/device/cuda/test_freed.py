"""What a loop that drops its batches leaves on the device, without the garbage collector; and what waits for copies."""

from __future__ import annotations

import gc
import os
import signal
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader import DataLoader, DevicePrefetcher, to_device
from swift_loader.batch.tree import search
from swift_loader.device.move import Parcel, Target
from swift_loader.device.streams import Transfer
from tests.support.helpers import make_loader, wait_until
from tests.system.device.cuda.images import Gpu
from tests.system.test_batches_freed import BATCH_SIZE, NESTINGS, NUM_BATCHES, Rows, as_array, as_object, memories


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


DOORS: dict[str, dict[str, Any]] = {
    "SwiftLoader": {},
    "threads": {"worker_type": "thread"},
    "no workers": {"workers": 0},
    "a function": {"move": to_device},
    "DevicePrefetcher": {},
}


def started(gpu: Gpu, collate_fn: Any, move: Any = None, **options: Any) -> Iterator[Any]:
    with make_loader(Rows, batch_size=BATCH_SIZE, collate_fn=collate_fn, **options) as loader:
        loader.start(device=gpu.device, to_device=move)
        yield from loader


def prefetched(gpu: Gpu, collate_fn: Any, depth: int) -> Iterator[Any]:
    batches = (collate_fn([Rows()[0]] * BATCH_SIZE) for _ in range(NUM_BATCHES))
    return iter(DevicePrefetcher(batches, gpu.device, max_nb_batch_on_device=depth))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("door", DOORS)
def test_so_many_batches_are_on_the_device(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, door: str, nesting: Any, depth: int
) -> None:
    moved: list[list[weakref.ref[Any]]] = []
    move = Target.move

    def noted(self: Target, batch: Any, transfer: Transfer) -> Any:
        there = move(self, batch, transfer)
        moved.append([weakref.ref(one) for one in search(there, torch.is_tensor) if one.device == gpu.device])
        return there

    monkeypatch.setattr(Target, "move", noted)
    options: dict[str, Any] = {"max_nb_batch_on_device": depth, **DOORS[door]}
    batches = prefetched(gpu, nesting, depth) if door == "DevicePrefetcher" else started(gpu, nesting, **options)
    handed: list[weakref.ref[Any]] = []
    for batch in batches:
        assert not any(reference() is not None for reference in handed)
        handed += memories(batch)
        num_there = sum(any(tensor() is not None for tensor in one) for one in moved)
        assert num_there <= depth + 1, "and one more while the next is moved"
    del batch
    assert len(moved) == NUM_BATCHES
    assert not any(reference() is not None for one in moved for reference in one)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_pinned_batches_of_a_data_loader_die_at_once(gpu: Gpu, num_workers: int, worker_type: Any) -> None:
    loader: DataLoader[Any] = DataLoader(
        Rows(),  # type: ignore[arg-type]
        BATCH_SIZE,
        num_workers=num_workers,
        pin_memory=True,
        worker_type=worker_type,
    )
    seen: list[weakref.ref[Any]] = []
    for step, batch in enumerate(loader):
        assert batch.is_pinned()
        assert batch[:, 0].tolist() == [*range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)]
        # A worker thread may not have returned yet from handing the batch over.
        wait_until(lambda: all(reference() is None for reference in seen), "the end of the batches before")
        seen.append(weakref.ref(batch))
    del batch
    assert len(seen) == NUM_BATCHES
    wait_until(lambda: all(reference() is None for reference in seen), "the end of all batches")


class Encoding:
    """As a tokenizer returns it."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def to(self, device: torch.device, non_blocking: bool = False) -> Encoding:
        return Encoding(self.ids.to(device, non_blocking=non_blocking))


class Forwarding(Encoding):
    def to(self, *args: Any, **kwargs: Any) -> Encoding:
        return super().to(*args, **kwargs)


class Changing(Encoding):
    """Moves itself in place, as Hugging Face's `BatchEncoding` does: nothing keeps what was on the host."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Encoding:
        self.ids = self.ids.to(device, non_blocking=non_blocking)
        return self


class Strict(Encoding):
    """Takes any option, but not this one."""

    def to(self, device: torch.device, **kwargs: Any) -> Encoding:  # type: ignore[override]
        if kwargs:
            raise TypeError(f"{sorted(kwargs)} aren't known")
        return Encoding(self.ids.to(device))


def moving_its_parts(batch: Any, device: torch.device) -> Any:
    batch.ids = batch.ids.to(device, non_blocking=True)
    return batch


@pytest.mark.parametrize("move", [None, moving_its_parts])
@pytest.mark.parametrize("kind", [Encoding, Forwarding, Changing, Strict])
def test_an_object_that_moves_itself_is_there_when_it_is_used(gpu: Gpu, kind: Any, move: Any) -> None:
    def encode(rows: list[Any]) -> Any:
        return kind(torch.from_numpy(np.stack(rows * 20)))

    simulated = sys.modules.get("tests.device.simulated")
    if simulated is not None:
        simulated.set_copy_delay(3)
    batches = [batch.ids for batch in started(gpu, encode, move, shuffle=False, workers=1, data_queue_size=1)]
    if simulated is not None:
        simulated.set_copy_delay(0)
    for step, ids in enumerate(batches):
        assert ids.device == gpu.device
        assert ids.cpu()[:4, 0].tolist() == [*range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)]


def test_text_beside_tensors_stays_as_it_was_for_a_child_of_a_fork(gpu: Gpu) -> None:
    def with_words(rows: list[Any]) -> Any:
        return {"x": np.stack(rows * 20), "words": np.array([f"{row[0]:09.1f}" for row in rows] * 200)}

    seen: list[Any] = []
    read, write = os.pipe()
    for step, batch in enumerate(started(gpu, with_words, shuffle=False, workers=1, data_queue_size=1)):
        seen.append((batch["words"], batch["words"].copy()))
        if step == 1 and (child := os.fork()) == 0:
            signal.alarm(30)
            os.read(read, 1)  # the parent's loop goes on meanwhile
            os._exit(int(any((now != then).any() for now, then in seen)))
        if step >= 1:
            seen.clear()
    os.write(write, b"x")
    status = os.waitpid(child, 0)[1]
    for descriptor in (read, write):
        os.close(descriptor)
    assert status == 0


def test_small_tensors_are_copied_together_and_large_ones_alone(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def many(rows: list[Any]) -> Any:
        return {**{f"x{number}": np.stack(rows) + number for number in range(30)}, "y": np.zeros(1 << 17)}

    spans: list[int] = []
    copied = Parcel.copied

    def noted(self: Parcel, *arguments: Any) -> Parcel:
        spans.append(len(self.spans))
        return copied(self, *arguments)

    monkeypatch.setattr(Parcel, "copied", noted)
    for step, batch in enumerate(started(gpu, many, shuffle=False)):
        for number in range(30):
            assert int(batch[f"x{number}"][0, 0].item()) == step * BATCH_SIZE + number
        assert batch["y"].untyped_storage().nbytes() == 1 << 20
    assert set(spans) == {2}


def test_a_packed_sequence_is_moved_with_its_lengths_on_the_host(gpu: Gpu) -> None:
    for packed in started(gpu, as_object):
        assert (packed.data.device, packed.batch_sizes.device.type) == (gpu.device, "cpu")
    for batch in started(gpu, as_array):
        assert batch.shape == (BATCH_SIZE, 300)
