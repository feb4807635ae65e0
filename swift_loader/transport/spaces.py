"""The global variables of the script's functions, as sets that functions share."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import Any

from swift_loader.transport.by_value import MAIN_MODULES, can_be_found
from swift_loader.transport.fills import Fill

_BASICS = ("__name__", "__package__", "__file__", "__path__")
_OF_THE_MODULE = frozenset(
    {*_BASICS, "__builtins__", "__loader__", "__spec__", "__cached__", "__doc__", "__annotations__"}
)


@dataclass(eq=False, slots=True)
class Space:
    """A set of globals that some functions share."""

    name: str
    variables: dict[str, Any]
    """The dict that was seen first, if several hold the script's."""
    is_script: bool
    """Whether they become those of `__main__` in a process that hasn't run the script."""
    is_module: bool
    """Whether they are the globals of a module in `sys.modules`."""
    made: types.ModuleType | None = None
    """The module, if it is in `sys.modules` but can't be imported."""
    asked: dict[str, Fill | None] = field(default_factory=dict)
    """The variables that are sent, each with its fill; None if it needs none."""

    @property
    def basics(self) -> dict[str, Any]:
        """The variables that say which module it is."""
        return {name: self.variables[name] for name in _BASICS if name in self.variables}


class Spaces:
    """The sets of globals, by the dict that holds them. The script's are one set, whatever dict holds them."""

    def __init__(self, *, has_run_script: bool) -> None:
        """Start with none. `has_run_script` says whether the receiver has run the user's script."""
        self._has_run_script = has_run_script
        self._spaces: dict[int | str, Space] = {}

    def of(self, variables: dict[str, Any]) -> Space:
        """Return the set that a dict of globals belongs to."""
        name = variables.get("__name__", "")
        main = vars(sys.modules["__main__"])
        # In a process that multiprocessing spawned, the script's functions use a copy of the module's variables.
        is_script = variables is main or (name == "__mp_main__" and main.get("__name__") == name)
        key = name if is_script else id(variables)
        space = self._spaces.get(key)
        if space is None:
            is_module = not is_script and vars(sys.modules.get(name, object)) is variables
            made = sys.modules[name] if is_module and is_made(name) else None
            sends_main = is_script and not self._has_run_script
            space = self._spaces[key] = Space(str(name), variables, sends_main, is_module, made)
        return space


def names_of(variables: dict[str, Any]) -> list[str]:
    """Return the names of all variables except those that the import system sets."""
    return [name for name in variables if name not in _OF_THE_MODULE]


def is_made(module_name: str) -> bool:
    """Return whether the script made a module, so that no other process can import it."""
    return not can_be_found(module_name.partition(".")[0])


def variables_beside(thing: Any) -> dict[str, Any] | None:
    """Return the globals of the module of a class or function, if that module can't be imported; else None."""
    name = thing.__module__
    if name in MAIN_MODULES:
        return vars(sys.modules["__main__"])
    return vars(sys.modules[name]) if name in sys.modules and is_made(name) else None
