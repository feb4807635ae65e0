"""Batches the user keeps are never overwritten, and their memory comes back when they are let go."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swift_loader import SwiftLoader
from swift_loader.engine import lease
from swift_loader.engine.processes import ProcessEngine
from tests import datasets
from tests.helpers import make_loader


def worker_handles(loader: SwiftLoader) -> list[Any]:
    """Return the trainer's handles on the workers."""
    assert loader._session is not None
    engine = loader._session.engine
    assert isinstance(engine, ProcessEngine)
    return list(engine._pool.workers.values())


def value_of(index: int) -> int:
    return index % 251


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), keep=st.floats(0.0, 1.0), drop=st.floats(0.0, 1.0))
def test_what_is_kept_stays_as_it_was(seed: int, keep: float, drop: float) -> None:
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
        held = sum(len(worker._leases._held) for worker in worker_handles(loader))
        assert held >= 100
        hoard.clear()
        for _ in range(3):
            for _ in loader:
                pass
        gc.collect()
        segments = [len(worker._segments) for worker in worker_handles(loader)]
        assert max(segments) <= 10 + 8, f"segments beyond the bound: {segments}"


def test_beyond_the_budget_batches_are_copied_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "MAX_HELD_SLOTS", 6)
    with make_loader(datasets.Images, kwargs={"num_samples": 400}, shuffle=False, batch_size=4) as loader:
        hoard = list(loader)
        assert all(len(worker._leases._held) <= 6 for worker in worker_handles(loader))
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
