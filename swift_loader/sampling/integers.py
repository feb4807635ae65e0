"""Accepts integers of Python, NumPy and torch, of any size, and checks those of a saved state. Pure."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex

from swift_loader.errors import StateMismatch

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


# What states of loaders and samplers have in common

_MAX_SHOWN_KEYS = 5
_MAX_SHOWN_CHARS = 100


def check_version(state: Any, version: int, whose: str) -> None:
    """Check that a state is a dict of this version. `whose` state it must be, for the messages."""
    if not isinstance(state, Mapping):
        raise TypeError(f"the state is a {type(state).__name__}; pass the dict that state_dict() returned")
    if "version" not in state:
        keys = ", ".join(sorted(map(repr, state))[:_MAX_SHOWN_KEYS])
        raise StateMismatch(
            f"the state has no version, but the keys {keys}; pass the dict that the state_dict() of a {whose} "
            f"returned, such as checkpoint['loader']"
        )
    if as_integer(state["version"]) != version:
        raise StateMismatch(
            f"the state's version is {shown(state['version'])[:_MAX_SHOWN_CHARS]}, but this {whose} can only resume "
            f"version {version}. The state is from another release of swift_loader, or from another program; resume "
            f"with the same release"
        )


def checked_fields(state: Mapping[str, Any], ranges: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return fields as Python integers. A checkpoint may have converted them to NumPy's or torch's.

    `ranges`: by name, the smallest and the largest value. Raises `StateMismatch` that names a field.
    """
    fields = {}
    for name, (smallest, largest) in ranges.items():
        if name not in state:
            raise StateMismatch(f"the state has no field {name!r}; pass the dict that state_dict() returned, unchanged")
        value = as_integer(state[name])
        if value is None or not smallest <= value <= largest:
            limit = f"at most {largest}" if largest.bit_length() < MAX_BITS else f"below 2**{MAX_BITS}"
            raise StateMismatch(
                f"the state's {name}={shown(state[name])} must be an integer of at least {smallest} and {limit}; pass "
                f"the dict that state_dict() returned, unchanged"
            )
        fields[name] = value
    return fields
