"""Which cells there are."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from tests.support.like_torch.datasets import MAPS, STREAMS
from tests.support.like_torch.observing import Cell
from tests.support.like_torch.options import COLLATES, ORDERS

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
    "prefetch_factor": [None, 1, 3],
    "in_order": [True, True, False],
    "init": ["none", "quiet"],
    "loop": ["whole", "broken", "unmeasured"],
    "multiprocessing_context": ["fork"],
}

KEYED = {"drawn"}
"""Datasets that draw from the global generators: each sample has draws of its own, however many workers there are."""

DRAWN_LATER = {"drawing", "failing", "failing batches", "unusable", "bare"}
"""Samplers that draw from the global generators one by one, or fail. How far ahead of the loop that happens differs,
and batches drawn before a failure come first."""

FIXED = {"default", "in order", "list", "range", "set", "numpy", "tensors", "lists", "letters", "old", "batches"}
"""Orders without draws."""

ENDING = {"broken_stop"}
"""Datasets that raise StopIteration: with torch's workers the epoch ends early, here that is an error."""


def worker_maps(num_cells: int = 160) -> list[Cell]:
    """Return cells with datasets of indexed samples and workers."""
    datasets = [one for one in MAPS if one not in KEYED | ENDING]
    orders = [one for one in ORDERS if one not in DRAWN_LATER]
    cells = grid({"dataset": datasets, "order": orders} | WITH_WORKERS, len(datasets) * len(orders))
    return [*filter(_is_determined, cells)][:num_cells]


def worker_streams(num_cells: int = 80) -> list[Cell]:
    datasets = [one for one in STREAMS if one not in KEYED and one != "refusing"]
    cells = grid({"dataset": datasets} | WITH_WORKERS, 2 * num_cells)
    return [*filter(_is_determined, cells)][:num_cells]


def _is_determined(cell: Cell) -> bool:
    """Return whether torch gives the same twice, and in a way that doesn't depend on how far ahead the workers are.

    Not so: a loop is left and batches come as they are ready; a stream continues where prefetching left it. With
    torch's default of prefetch_factor, more batches are drawn from the sampler here, so that its generator is further.
    """
    if cell["prefetch_factor"] is None and cell.get("order", "default") not in FIXED:
        return False
    in_order = bool(cell["in_order"]) or cell["num_workers"] == 1
    return bool(cell["loop"] != "broken" or (in_order and cell["dataset"] != "single"))


def threads() -> list[Cell]:
    """Return those cells with workers that worker threads can do: no shards, and no functions for processes."""
    streams = [cell for cell in worker_streams() if cell["num_workers"] == 1 and cell["dataset"] != "sharded"]
    return [cell for cell in (*worker_maps(), *streams) if cell["init"] == "none"]


def worker_failures() -> list[Cell]:
    """Return cells whose workers fail when they start. Their later errors differ: those of torch are of its own."""
    own = {"num_samples": 7, "num_workers": 2, "loop": "first", "multiprocessing_context": "fork"}
    return [
        {"dataset": dataset, "init": init, "persistent_workers": persistent} | own
        for dataset, init in (("tensor", "bad"), ("plain", "bad"), ("refusing", "none"))
        for persistent in (False, True)
    ]


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
