"""Accepts integers of Python, NumPy and torch, of any size, and checks those of a saved state. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, SupportsIndex

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


class Form(NamedTuple):
    """What values of a field are."""

    what: str
    read: Callable[[Any], Any]
    """Returns the value, as this package uses it. Raises any error if it isn't one."""


def integer(smallest: int, largest: int) -> Form:
    """Return the form of a Python integer. A checkpoint may have converted it to NumPy's or torch's."""

    def read(value: Any) -> int:
        number = as_integer(value)
        if number is None or not smallest <= number <= largest:
            raise ValueError
        return number

    limit = f"at most {largest}" if largest.bit_length() < MAX_BITS else f"below 2**{MAX_BITS}"
    return Form(f"an integer of at least {smallest} and {limit}", read)


def optional(form: Form) -> Form:
    """Return the form of such a value or None."""
    return Form(f"{form.what}, or None", lambda value: None if value is None else form.read(value))


def several(form: Form) -> Form:
    """Return the form of a list of such values."""

    def read(values: Any) -> list[Any]:
        if not isinstance(values, (list, tuple)):
            raise TypeError
        return [form.read(value) for value in values]

    return Form(f"a list, of which each is {form.what}", read)


def field_of(state: Any, path: str) -> Any:
    """Return what stands at a path in a state, as in "folder.name"."""
    for name in path.split("."):
        if not isinstance(state, Mapping) or name not in state:
            raise StateMismatch(f"the state has no field {path!r}; pass the dict that state_dict() returned, unchanged")
        state = state[name]
    return state


def checked_fields(state: Any, forms: Mapping[str, Form], where: str = "") -> dict[str, Any]:
    """Return fields of a state by their paths, see `field_of`. Raises `StateMismatch` that names one.

    `where`: the path to the state if it is a part of another one, for the error.
    """
    fields = {}
    for path, form in forms.items():
        value = field_of(state, path)
        try:
            fields[path] = form.read(value)
        except Exception as error:
            text = shown(value)[:_MAX_SHOWN_CHARS]
            raise StateMismatch(
                f"the state's {where}{path}={text} must be {form.what}; pass the dict that state_dict() returned, "
                f"unchanged"
            ) from error
    return fields
