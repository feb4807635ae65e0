"""Which cells there are."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from tests.support.like_torch.datasets import MAPS, STREAMS
from tests.support.like_torch.observing import Cell
from tests.support.like_torch.options import COLLATES, ORDERS

__all__ = ["arguments", "grid", "inline_maps", "inline_streams", "worker_maps", "worker_streams"]

SIZES = [(size, drop_last) for size in (None, 1, 2, 3, 100) for drop_last in (False, True)]
LENGTHS = [7, 32, 0, 1]


def grid(dimensions: Mapping[str, Iterable[Any]], num_cells: int) -> list[Cell]:
    """Return different cells, the same ones each time.

    The first two dimensions are taken whole, each value with each value; the others are random.
    """
    names, values = list(dimensions), [list(one) for one in dimensions.values()]
    rng = random.Random(2)
    cells: dict[str, Cell] = {}
    whole = list(product(*values[:2]))
    while len(cells) < num_cells:
        row = [*whole[len(cells) % len(whole)], *map(rng.choice, values[2:])]
        cells.setdefault(repr(row), dict(zip(names, row, strict=True)))
    found = list(cells.values())
    rng.shuffle(found)
    return found


def inline_maps(num_cells: int = 1_800) -> list[Cell]:
    """Return cells with datasets of indexed samples and no workers."""
    return grid(
        {
            "dataset": MAPS,
            "order": ORDERS,
            "size": SIZES,
            "collate": ["none", "none", *COLLATES],
            "num_samples": LENGTHS,
            "generator": [False, True],
            "loop": ["whole", "broken", "interleaved", "unmeasured"],
        },
        num_cells,
    )


def inline_streams(num_cells: int = 600) -> list[Cell]:
    """Return cells with streams and no workers."""
    return grid(
        {
            "dataset": STREAMS,
            "size": SIZES,
            "order": ["default", "default", "in order", "shuffled"],
            "collate": ["none", "none", *COLLATES],
            "num_samples": LENGTHS,
            "generator": [False, True],
            "loop": ["whole", "broken", "interleaved", "unmeasured"],
        },
        num_cells,
    )


def _mostly(usual: Any, *others: Any) -> list[Any]:
    """Return values of which most are the first one, so that other arguments are looked at as well."""
    return [usual] * (4 * len(others)) + list(others)


WITH_WORKERS: dict[str, Iterable[Any]] = {
    "num_workers": [1, 2, 3],
    "size": SIZES,
    "collate": ["none", "none", "none", *COLLATES],
    "num_samples": _mostly(7, 0, 1, 32),
    "generator": [False, True],
    "persistent_workers": [False, True],
    "prefetch_factor": [None, None, 1, 3],
    "in_order": [True, True, False],
    "init": ["none", "quiet"],
    "loop": ["whole", "broken", "unmeasured"],
    "multiprocessing_context": ["fork"],
}

KEYED = {"drawn"}
"""Datasets that draw from the global generators: each sample has draws of its own, however many workers there are."""

DRAWN_LATER = {"drawing", "failing", "failing batches", "unusable"}
"""Samplers that draw from the global generators or fail late: how far ahead of the loop they're drawn from differs."""


def worker_maps(num_cells: int = 150) -> list[Cell]:
    """Return cells with datasets of indexed samples and workers."""
    orders, datasets = [one for one in ORDERS if one not in DRAWN_LATER], [one for one in MAPS if one not in KEYED]
    chosen = {"dataset": datasets, "order": orders} | WITH_WORKERS
    return grid(chosen, len(datasets) * len(orders))[:num_cells]


def worker_streams(num_cells: int = 60) -> list[Cell]:
    """Return cells with streams and workers."""
    datasets = [one for one in STREAMS if one not in KEYED and "pipe" not in one]
    return grid({"dataset": datasets} | WITH_WORKERS, num_cells)


def arguments() -> list[Cell]:
    """Return cells with arguments that don't go together, or aren't right."""
    cells = grid(
        {
            "dataset": ["int", "unmeasured", "plain", "measured"],
            "num_samples": [5, 0],
            "batch_size": _mostly(1, 2, None, 0, -1, 2.0, True, "2"),
            "drop_last": _mostly(False, True, 1),
            "shuffle": _mostly(None, False, True, 1),
            "sampler": _mostly(None, [2, 0], []),
            "batch_sampler": _mostly(None, [[2, 0]]),
            "num_workers": _mostly(0, -1),
            "prefetch_factor": _mostly(None, 2, -1, 0),
            "persistent_workers": _mostly(False, True),
            "timeout": _mostly(0, -1, 3),
            "multiprocessing_context": _mostly(None, "fork", "nope", 3),
            "pin_memory": [False, True],
            "pin_memory_device": ["", "cuda"],
            "in_order": [True, False],
        },
        600,
    )
    few = ("batch_size", "drop_last", "shuffle", "sampler", "batch_sampler")
    values = ([1, 2, None, 0, -1], [False, True], [None, False, True], [None, [2, 0]], [None, [[2, 0]]])
    return cells + [
        {"dataset": dataset, "num_samples": 3, **dict(zip(few, row, strict=True))}
        for dataset in ("int", "plain")
        for row in product(*values)
    ]
