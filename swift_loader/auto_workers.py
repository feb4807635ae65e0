"""The value `"auto"` of the options that give a number of workers."""

from __future__ import annotations

from typing import Any

from swift_loader.checks import check_integer

AUTO = "auto"


class AutoWorkers(int):
    """A number of workers that the loader chose, and that it may change."""

    __slots__ = ()


def check_num_workers(name: str, value: Any, at_least: int, at_most: int) -> int:
    """Return a number of workers within bounds. `"auto"` gives the first number of one that changes, 1."""
    if isinstance(value, AutoWorkers):
        return value
    return AutoWorkers(1) if isinstance(value, str) and value == AUTO else check_integer(name, value, at_least, at_most)
