"""A loader whose workers have failed leaves nothing, although the error's traceback refers to its loop."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from swift_loader.dataloader.dataloader import DataLoader
from tests.support.datasets import Counting
from tests.support.helpers import loader_processes


def fail(worker_id: int) -> None:
    raise ValueError(f"worker {worker_id} can't begin")


def _failed() -> weakref.ref[Any]:
    loader: DataLoader[Any] = DataLoader(
        Counting(9),  # type: ignore[arg-type]
        num_workers=2,
        worker_init_fn=fail,
        multiprocessing_context="fork",
    )
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(ValueError, match="can't begin"):
            next(iterator)
    return weakref.ref(iterator)


def test_an_error_of_all_workers_comes_again_and_ends_them() -> None:
    iterator = _failed()
    assert not loader_processes()
    gc.collect()
    assert iterator() is None
