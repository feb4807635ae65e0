"""A loader is freed with its last reference, as torch's is: its workers don't wait for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from swift_loader.dataloader.dataloader import DataLoader


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("num_steps", [0, 1, 9])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_is_no_part_of_a_cycle(num_steps: int, shuffle: bool) -> None:
    loader: DataLoader[Any] = DataLoader([1, 2, 3], shuffle=shuffle)  # type: ignore[arg-type]
    iterator = iter(loader)
    for _ in range(num_steps):
        next(iterator, None)
    loader.state_dict()
    is_freed = weakref.ref(loader)
    del loader, iterator
    assert is_freed() is None
