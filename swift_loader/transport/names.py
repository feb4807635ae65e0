"""The names that code uses. Pure."""

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
    """What code looks up by name."""

    variables: list[str]
    """Globals, read or written."""
    names: set[str]
    """All that the code calls by a name: also attributes and what it imports."""
    is_all: bool
    """Whether the code can look up any global variable."""


def used_globals(code: types.CodeType) -> Used:
    """Return what a function's code looks up by name, the functions and classes in it included."""
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
    """Return the globals that type hints need which are strings, as with `from __future__ import annotations`."""
    found: dict[str, None] = {}
    for hint in hints:
        if isinstance(hint, str):
            try:
                code = compile(hint, "<hint>", "eval")
            except (SyntaxError, ValueError):  # not meant to be evaluated
                continue
            found.update(dict.fromkeys(used_globals(code).variables))
    return list(found)
