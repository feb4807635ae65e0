"""Batches the user keeps are never overwritten, and their memory comes back when they are let go."""

from __future__ import annotations

import gc
import os
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swift_loader import SwiftLoader
from swift_loader.executors.process import memory
from tests.support import datasets
from tests.support.helpers import make_loader, wait_until
from tests.support.resizing import workers_of

IN_FLIGHT = 10


def value_of(index: int) -> int:
    return index % 251


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), keep=st.floats(0.0, 1.0), drop=st.floats(0.0, 1.0))
def test_whatever_is_kept_stays_as_it_was(seed: int, keep: float, drop: float) -> None:
    check_what_is_kept(seed, keep, drop)


@pytest.mark.parametrize(("keep", "drop"), [(1.0, 0.3), (0.3, 0.5)])
def test_what_is_kept_stays_as_it_was(keep: float, drop: float) -> None:
    check_what_is_kept(1, keep, drop)


def check_what_is_kept(seed: int, keep: float, drop: float) -> None:
    rng = random.Random(seed)
    kept: list[tuple[np.ndarray[Any, Any], int]] = []
    with make_loader(datasets.Images, kwargs={"num_samples": 120, "side": 24}, shuffle=False, batch_size=4) as loader:
        for _ in range(2):
            for number, batch in enumerate(loader):
                index = number * 4
                if rng.random() < keep:
                    row = rng.randrange(4)
                    view = rng.choice([batch[row], batch[row, 1:, ::3], batch[row].T, batch[row : row + 1].reshape(-1)])
                    kept.append((view, value_of(index + row)))
                if kept and rng.random() < drop:
                    kept.pop(rng.randrange(len(kept)))
                for view, value in kept:
                    assert (view == value).all()
                del batch
    for view, value in kept:
        assert (view == value).all()


def test_every_slot_comes_back() -> None:
    with make_loader(datasets.Images, kwargs={"num_samples": 400}, batch_size=4) as loader:
        hoard = list(loader)
        held = sum(len(worker.memory._leases._held) for worker in workers_of(loader))
        assert held >= 100
        hoard.clear()
        for _ in range(3):
            for _ in loader:
                pass
        gc.collect()
        segments = [len(worker.memory._segments) for worker in workers_of(loader)]
        # Slots that the loop holds don't count as surplus: here the last batch's.
        assert max(segments) <= 10 + 8 + 1, f"segments beyond the bound: {segments}"


def test_beyond_the_budget_batches_are_copied_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_HELD_SLOTS", 6)
    kwargs = {"num_samples": 400}
    with make_loader(datasets.Images, kwargs=kwargs, shuffle=False, batch_size=4, data_queue_size=IN_FLIGHT) as loader:
        hoard = list(loader)
        assert all(len(worker.memory._leases._held) <= 6 + IN_FLIGHT for worker in workers_of(loader))
        for number, batch in enumerate(hoard):
            assert [int(image[0, 0, 0]) for image in batch] == [value_of(number * 4 + row) for row in range(4)]
        hoard.clear()
        assert len(list(loader)) == 100


def test_tensors_keep_their_memory_too() -> None:
    import torch

    with make_loader(datasets.Images, kwargs={"num_samples": 200}, shuffle=False, batch_size=4) as loader:
        loader.start(0, "cpu")
        tensors = [batch[1, 0] for batch in loader]
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    for number, tensor in enumerate(tensors):
        assert (tensor == value_of(number * 4 + 1)).all()


class OfAllSizes:
    """Sample i is full of `i % 251`, and as large as the kind says."""

    def __init__(self, num_samples: int, kind: str) -> None:
        self.num_samples, self.kind = num_samples, kind

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        nbytes = {
            "mixed": 4 << 20 if index % 2 else 33,
            "growing": 20_000 * (index + 1),
            "shrinking": 4 << 20 if index < 60 else 20_000,
            "filling half": 1 << 20 if index % 8 == 0 else 300_000,
        }[self.kind]
        return np.full(nbytes, index % 251, np.uint8)


def loader_of(kind: str, num_samples: int) -> SwiftLoader:
    kwargs = {"num_samples": num_samples, "kind": kind}
    return make_loader(OfAllSizes, kwargs=kwargs, shuffle=False, batch_size=1, validate=False)


def num_mapped(pid: int) -> tuple[int, int]:
    """Return how many segments a process has mapped, and their bytes."""
    with open(f"/proc/{pid}/maps") as maps:
        extents = [line.split()[0].split("-") for line in maps if "memfd:swift_loader" in line]
    return len(extents), sum(int(end, 16) - int(start, 16) for start, end in extents)


def test_small_batches_that_are_kept_do_not_keep_the_slots_of_large_ones() -> None:
    gc.collect()
    _, before = num_mapped(os.getpid())
    with loader_of("mixed", 240) as loader:
        kept = [batch for batch in loader if batch.nbytes < 100]
        held = [len(worker.memory._leases._held) for worker in workers_of(loader)]
        assert max(held) < 20, f"slots that are in use: {held}"
        for process in (os.getpid(), *(worker.process.pid for worker in workers_of(loader))):
            assert num_mapped(process)[1] - before < 40 * (5 << 20)
    assert [int(batch[0, 32]) for batch in kept] == [value_of(index) for index in range(0, 240, 2)]


def test_beyond_a_limit_what_a_batch_needs_is_copied_and_not_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_WASTED_BYTES", 4 << 20)
    with loader_of("filling half", 240) as loader:
        kept = list(loader)
        assert sum(len(worker.memory._leases._held) for worker in workers_of(loader)) < 120
        bases = [_base_of(batch) for batch in kept]
        assert sum(base.nbytes for base in bases if type(base) is np.ndarray) < 1.1 * sum(
            batch.nbytes for batch in kept
        )
    for index, batch in enumerate(kept):
        assert (batch == value_of(index)).all()


def _base_of(array: Any) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_segments_that_batches_have_outgrown_are_given_up_on_both_sides() -> None:
    with loader_of("growing", 160) as loader:
        most = 0
        for index, batch in enumerate(loader):
            assert (batch == value_of(index)).all()
            most = max(most, *(len(worker.memory._segments) for worker in workers_of(loader)))
        assert most <= 40  # of 160: 10 in flight, 16 before an idle one is given up, and messages under way
        for worker in workers_of(loader):  # which may not have read its last task yet
            pid, segments = worker.process.pid, worker.memory._segments
            wait_until(lambda: num_mapped(pid)[0] <= len(segments) + 4, "only these, counters and payload are mapped")  # noqa: B023


def test_segments_that_are_far_too_large_are_given_up_on_both_sides() -> None:
    with loader_of("shrinking", 2000) as loader:
        for index, batch in enumerate(loader):
            assert (batch == value_of(index)).all()
            del batch
            if index == 1000:  # not at the end: workers go on, and the next epoch begins with large ones
                break
        for worker in workers_of(loader):
            assert sum(segment.nbytes for segment in worker.memory._segments.values()) < 4 << 20
        pids = [worker.process.pid for worker in workers_of(loader)]
        wait_until(
            lambda: all(num_mapped(pid)[1] < 4 << 20 for pid in pids), "the workers have given up the large ones"
        )
