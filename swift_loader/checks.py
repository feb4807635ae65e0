"""Checks what the user gives, and turns each public option into a field of a group of options.

Each check takes the public name and the value, and returns what is kept of the value. It raises `TypeError` or
`ValueError`; the message names the value, what is allowed and what to change.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from enum import Enum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar

from swift_loader.sampling.integers import MAX_BITS, as_integer, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_WAIT_S = 1e6
"""Eleven days. poll(2) takes less than 2**31 ms. A longer limit counts as no limit."""

_Value = TypeVar("_Value")
_Choice = TypeVar("_Choice", bound=Enum)
_Group = TypeVar("_Group", bound="DataclassInstance")


def option(name: str, check: Callable[..., _Value], *bounds: Any, default: Any = MISSING) -> _Value:
    """Return the field of a dataclass that holds the public option `name`. See `checked`.

    `bounds`: further arguments of the check. `default`: for loaders that don't have the option.
    """
    metadata = {"option": name, "check": lambda value: check(name, value, *bounds)}
    declared: _Value = field(default=default, metadata=metadata)
    return declared


def checked(group: type[_Group], given: Mapping[str, Any]) -> _Group:
    """Return a group of options. `given` has the arguments of the user by public name, and maybe others."""
    options = [one for one in fields(group) if one.metadata.get("option") in given]
    return group(**{one.name: one.metadata["check"](given[one.metadata["option"]]) for one in options})


def check_integer(name: str, value: Any, at_least: int, at_most: int = 2**MAX_BITS - 1) -> int:
    """Return the value as an integer from `at_least` to `at_most`."""
    number = as_integer(value)
    if number is None:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be an integer")
    if number < at_least:
        raise ValueError(f"{name}={shown(number)} is too small; it must be at least {at_least}")
    if number > at_most:
        limit = f"at most {at_most}" if at_most.bit_length() < MAX_BITS else f"below 2**{MAX_BITS}"
        raise ValueError(f"{name}={shown(number)} is too large; it must be {limit}")
    return number


def check_optional_integer(name: str, value: Any, at_least: int) -> int | None:
    """Return None, or the value as an integer of at least `at_least`."""
    return None if value is None else check_integer(name, value, at_least)


def check_progress(name: str, value: Any) -> bool:
    """Return True or False. Raises `ModuleNotFoundError` if there is no bar to show."""
    from importlib.util import find_spec

    if (shows := check_flag(name, value)) and find_spec("tqdm") is None:
        raise ModuleNotFoundError(f"{name}=True needs tqdm: pip install tqdm", name="tqdm")
    return shows


def check_max_errors(name: str, value: Any) -> float | None:
    """Return a number of samples as an integer, a fraction of them as a float between 0 and 1, or None."""
    if value is None:
        return None
    if isinstance(value, Integral) or not isinstance(value, Real):
        return check_integer(name, value, 0)
    if not 0 < _float(value) < 1:
        raise ValueError(
            f"{name}={value} isn't a fraction between 0 and 1; give one, or an integer to count samples, or None"
        )
    return float(value)


def check_skips(on_error: Any, max_errors: Any) -> float | None:
    """Check both options where nothing can be replaced. Return `max_errors`, see `check_max_errors`."""
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error={shown(on_error)} isn't allowed; it must be 'raise' or 'skip'")
    if max_errors is not None and on_error == "raise":
        raise ValueError(f"max_errors={max_errors} has no effect with on_error='raise'; give on_error='skip'")
    return check_max_errors("max_errors", max_errors)


def check_flag(name: str, value: Any) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={shown(value)} is a {type(value).__name__}; it must be True or False")
    return value


def check_seconds(name: str, value: Any) -> float | None:
    """Return a duration in seconds; None for None, 0 and what is longer than `MAX_WAIT_S`: no limit."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={shown(value)} is a {type(value).__name__}; it must be a number of seconds, or None")
    seconds = _float(value)
    if not seconds >= 0:
        raise ValueError(f"{name}={shown(value)} isn't a duration; it must be at least 0 seconds, or None for no limit")
    return seconds if 0 < seconds <= MAX_WAIT_S else None  # 0 means no limit, as in torch


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond 1e308
        return math.inf if value > 0 else -math.inf


def check_path(name: str, value: Any) -> str | None:
    """Return a path as a string, or None."""
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}={shown(value)} is a {type(value).__name__}; it must be a path, or None")
    return str(os.fspath(value))


def check_choice(name: str, value: Any, choices: type[_Choice]) -> _Choice:
    """Return the member of an enum that has this value."""
    try:
        return choices(value)
    except ValueError:
        allowed = ", ".join(repr(choice.value) for choice in choices)
        raise ValueError(f"{name}={shown(value)} is unknown; it must be one of {allowed}") from None


def check_callable(name: str, value: Any) -> Callable[..., Any] | None:
    """Return a callable, or None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} is a {type(value).__name__}, which can't be called; give a function, or None")
    return value  # type: ignore[no-any-return]


def can_call_without_arguments(function: Any) -> bool:
    """Return whether a call needs no arguments. One whose parameters aren't known, as of C code, counts as such."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:  # a TypeError also if it can't be called
        return isinstance(error, ValueError)
    return True
