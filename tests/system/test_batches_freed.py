"""A batch dies when the loop drops it, whatever the garbage collector does: large runs turn it off."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from swift_loader import DataLoader, DevicePrefetcher
from swift_loader.batch.tree import search
from swift_loader.pipeline import Pipeline
from tests.support.helpers import make_loader, wait_until

NUM_BATCHES, BATCH_SIZE = 12, 4


class Rows:
    def __len__(self) -> int:
        return NUM_BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> Any:
        return np.full(300, index, np.float32)


@dataclass
class Pair:
    x: Any
    rest: Any


def as_array(rows: list[Any]) -> Any:
    return np.stack(rows)


def as_dict(rows: list[Any]) -> Any:
    return {"x": torch.from_numpy(np.stack(rows)), "y": np.arange(len(rows)), "name": "text"}


def as_nest(rows: list[Any]) -> Any:
    return Pair([np.stack(rows), {"a": (torch.ones(2), "text")}], {"b": [1, 2], "c": [np.stack(rows)]})


def as_object(rows: list[Any]) -> Any:
    return pack_sequence([torch.from_numpy(row) for row in rows])


NESTINGS = [as_array, as_dict, as_nest, as_object]


def started(collate_fn: Any, device: Any = None, **options: Any) -> Iterator[Any]:
    with make_loader(Rows, batch_size=BATCH_SIZE, collate_fn=collate_fn, **options) as loader:
        loader.start(device=device)
        yield from loader


def prefetched(collate_fn: Any) -> Iterator[Any]:
    rows = Rows()
    batches = (collate_fn([rows[0]] * BATCH_SIZE) for _ in range(NUM_BATCHES))
    return iter(DevicePrefetcher(batches, "cpu", max_nb_batch_on_device=2))


DOORS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "SwiftLoader": started,
    "SwiftLoader to a device": lambda collate_fn: started(collate_fn, "cpu", max_nb_batch_on_device=3),
    "SwiftLoader, threads": lambda collate_fn: started(collate_fn, "cpu", worker_type="thread"),
    "SwiftLoader, no workers": lambda collate_fn: started(collate_fn, "cpu", workers=0),
    "DataLoader": lambda collate_fn: iter(DataLoader(Rows(), BATCH_SIZE, num_workers=2, collate_fn=collate_fn)),  # type: ignore[arg-type]
    "DataLoader, no workers": lambda collate_fn: iter(DataLoader(Rows(), BATCH_SIZE, collate_fn=collate_fn)),  # type: ignore[arg-type]
    "DevicePrefetcher": prefetched,
    "Pipeline": lambda collate_fn: iter(Pipeline(Rows()).batch(BATCH_SIZE).map(collate_fn)),
}


def memories(batch: Any) -> list[weakref.ref[Any]]:
    """Return references to a batch and to the arrays and tensors in it."""
    found = [batch.data] if isinstance(batch, PackedSequence) else [*search(batch, torch.is_tensor)]
    return [weakref.ref(one) for one in (*found, batch) if not isinstance(one, (dict, PackedSequence))]


def are_freed(references: list[weakref.ref[Any]]) -> bool:
    return not any(reference() is not None for reference in references)


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("door", DOORS)
def test_a_batch_dies_when_the_loop_drops_it(door: str, nesting: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        seen: list[weakref.ref[Any]] = []
        for batch in DOORS[door](nesting):
            # A receiver thread may have been suspended as it handed the batch over.
            wait_until(partial(are_freed, seen), "the batch before is freed")
            seen += memories(batch)
        del batch
        assert len(seen) >= NUM_BATCHES
        assert are_freed(seen)
    finally:
        gc.enable()
