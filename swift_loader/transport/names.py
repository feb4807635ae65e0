"""Finds the names that code uses. Pure."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Used", "names_in_hints", "used_globals"]

_GLOBAL_OPERATIONS = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"}
)
_USERS_OF_ALL = frozenset({"globals", "eval", "exec"})


class Used(NamedTuple):
    """The names that code uses."""

    variables: list[str]
    """Global variables that it reads or writes."""
    names: set[str]
    """All names in the code, including attributes and imports."""
    is_all: bool
    """Whether the code may look up any global variable, for example by `globals()`."""


def used_globals(code: types.CodeType) -> Used:
    """Return the names that a function's code uses, including the functions and classes defined in it."""
    variables: dict[str, None] = {}
    names: set[str] = set()
    constants: set[str] = set()
    codes = [code]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
        constants.update(constant for constant in code.co_consts if isinstance(constant, str))
        for instruction in dis.get_instructions(code):
            if instruction.opname in _GLOBAL_OPERATIONS:
                variables[instruction.argval] = None
    by_module = "modules" in names and ("__name__" in variables or "__main__" in constants)
    is_all = by_module or "__main__" in names or not _USERS_OF_ALL.isdisjoint(variables)
    return Used(list(variables), names, is_all)


def names_in_hints(hints: Iterable[object]) -> list[str]:
    """Return the globals that string type hints use. `from __future__ import annotations` makes all hints strings."""
    found: dict[str, None] = {}
    for hint in hints:
        if isinstance(hint, str):
            try:
                code = compile(hint, "<hint>", "eval")
            except (SyntaxError, ValueError):  # a string that isn't an expression
                continue
            found.update(dict.fromkeys(used_globals(code).variables))
    return list(found)
