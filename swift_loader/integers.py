"""Integers as users give them: of Python, NumPy or torch, of any size. Pure."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

__all__ = ["MAX_BITS", "as_integer", "shown"]

MAX_BITS = 4096
"""Of any number that is taken. Python refuses to print integers of more than 4,300 digits, and a state may be JSON."""


def as_integer(value: Any) -> int | None:
    """Return a value as an integer; None if it isn't one: a bool, a float, an array of several numbers."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return int(operator.index(value))
    except TypeError:  # an array or a tensor that isn't a single integer
        return None


def shown(value: Any) -> str:
    """Return the `repr` of a value, for an error, also of an integer that Python refuses to print."""
    number = as_integer(value)
    if number is not None and number.bit_length() > MAX_BITS:
        return f"<an integer of {number.bit_length()} bits>"
    return repr(value)
