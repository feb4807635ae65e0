"""Compares what two observations saw."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from tests.support.like_torch.observing import Cell, observe


def differences(loader_class: Any, cells: list[Cell]) -> str:
    """Return the first things that differ, for each cell where something does."""
    found = []
    for cell in cells:
        told = difference(loader_class, cell)
        if told:
            found.append(f"{dict(cell)}\n{told}")
    return "\n\n".join([f"{len(found)} of {len(cells)} cells differ", *found[:20]]) if found else ""


def difference(loader_class: Any, cell: Cell) -> str:
    """Return the first thing that differs from torch's class; an empty text if nothing does."""
    expected = observe(TorchDataLoader, cell).events
    _end_workers(cell)
    seen = observe(loader_class, cell).events
    _end_workers(cell)
    for (wanted_what, wanted), (what, value) in zip(expected, seen, strict=False):
        if wanted_what != what or not _agree(wanted, value):
            return f"  torch: {wanted_what}: {wanted}\n  this:  {what}: {value}"
    return "" if len(expected) == len(seen) else f"  torch saw {expected[len(seen) :]}, this {seen[len(expected) :]}"


def _end_workers(cell: Cell) -> None:
    """Free what errors refer to: no iterator may live on when processes are forked for the next one."""
    if cell.get("num_workers"):
        gc.collect()


def _agree(wanted: Any, seen: Any) -> bool:
    """Return whether two things are equal, apart from the texts of some errors."""
    if wanted == seen:
        return True
    if not isinstance(wanted, tuple | list) or type(wanted) is not type(seen) or len(wanted) != len(seen):
        return False
    if wanted[:1] == seen[:1] == ("error",):
        return _is_same_error(wanted, seen)
    return all(_agree(one, other) for one, other in zip(wanted, seen, strict=True))


def _is_same_error(wanted: Sequence[str], seen: Sequence[str]) -> bool:
    """Return whether an error in a worker has the original type and text, or one without workers torch's type.

    torch can't rebuild an error whose class wants more than a text: it raises a RuntimeError.
    """
    if "Caught" not in wanted[2]:
        return wanted[1] == seen[1] == "AssertionError"
    type_name, _, text = wanted[2].rstrip().rsplit("\n", 1)[-1].partition(": ")
    types = {wanted[1], type_name.rsplit(".", 1)[-1], *(["WorkerError"] if wanted[1] == "RuntimeError" else [])}
    return seen[1] in types and text in seen[2]
