"""The content of a sampler's `state_dict()`, checked when it is loaded. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from swift_loader.errors import StateMismatch
from swift_loader.integers import MAX_BITS, as_integer, shown
from swift_loader.sampling.plan import MAX_EPOCH

__all__ = ["VERSION", "check_same", "saved_fields"]

VERSION = 1
"""Version of the fields and of the orders. With another version, the order would be another one."""


def saved_fields(state: Mapping[str, Any], sampler: str, names: Iterable[str]) -> dict[str, int]:
    """Return the integer fields of a state.

    Args:
        state: What the user loads.
        sampler: Name of the class that must have saved it.
        names: The fields that it must have besides `version` and `sampler`.

    Raises:
        TypeError: `state` isn't a mapping.
        StateMismatch: It is of another sampler or release, or a field is missing or invalid; the message names it.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"the state is a {type(state).__name__}; pass the dict that state_dict() returned")
    if state.get("sampler") != sampler:
        raise StateMismatch(
            f"the state's sampler is {shown(state.get('sampler'))}, but it was loaded into a {sampler}; pass the dict "
            f"that this sampler's state_dict() returned"
        )
    if as_integer(state.get("version")) != VERSION:
        raise StateMismatch(
            f"the state's version is {shown(state.get('version'))}, but this {sampler} can only resume version "
            f"{VERSION}; resume with the release of swift_loader that saved it"
        )
    fields = {}
    for name in names:
        value = as_integer(state.get(name))
        limit = MAX_EPOCH if name in ("epoch", "position") else 2**MAX_BITS
        if value is None or not 0 <= value <= limit:
            raise StateMismatch(
                f"the state's {name}={shown(state.get(name))} isn't an integer from 0 on, or is too large; pass the "
                f"dict that state_dict() returned, unchanged"
            )
        fields[name] = value
    return fields


def check_same(name: str, saved: object, present: object) -> None:
    """Check that a value on which the order depends is the one that was saved.

    Raises:
        StateMismatch: It isn't.
    """
    if saved != present:
        raise StateMismatch(
            f"the state was saved with {name}={saved}, but this sampler has {name}={present}, which changes the order. "
            f"Give the saved value, or start a new run without load_state_dict()"
        )
