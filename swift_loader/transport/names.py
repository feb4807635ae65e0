"""Finds the names that code uses. Pure."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable
from typing import NamedTuple

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


class Submodules:
    """The submodules that code may use as attributes of their packages, without importing them by name."""

    def __init__(self) -> None:
        self._packages: dict[str, list[tuple[frozenset[str], str]]] = {}
        """Package -> (parts of a submodule's name within it, whole name) of those that weren't taken."""
        self._names: set[str] = set()
        self._num_seen = (0, 0)

    def add_package(self, package: str, modules: Iterable[str]) -> None:
        """Add a package that code uses, unless it is known; `modules` are the names of all imported modules."""
        if package not in self._packages:
            inner = [name for name in modules if name.startswith(f"{package}.")]
            self._packages[package] = [(frozenset(name[len(package) + 1 :].split(".")), name) for name in inner]

    def add_names(self, names: Iterable[str]) -> None:
        """Add names that code uses."""
        self._names.update(names)

    def take_used(self) -> list[str]:
        """Return the submodules whose names the code uses, each once."""
        used: list[str] = []
        num_seen = (len(self._packages), len(self._names))
        if num_seen != self._num_seen:
            self._num_seen = num_seen
            for package, inner in self._packages.items():
                found = [name for parts, name in inner if parts <= self._names]
                used.extend(found)
                self._packages[package] = [(parts, name) for parts, name in inner if name not in found]
        return used
