"""Accepts integers of Python, NumPy and torch, of any size. Pure."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

MAX_BITS = 4096
"""Largest integer accepted. Python refuses to print more than 4,300 digits, and a state may be saved as JSON."""


def as_integer(value: Any) -> int | None:
    """Return the value as an integer. Return None for a bool, a float, an array of several numbers and the like."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return int(operator.index(value))
    except TypeError:  # an array or a tensor that isn't a single integer
        return None


def shown(value: Any) -> str:
    """Return the `repr` of a value for an error message, even for an integer that Python refuses to print."""
    number = as_integer(value)
    if number is not None and number.bit_length() > MAX_BITS:
        return f"<an integer of {number.bit_length()} bits>"
    return repr(value)
