"""Classes and functions that another process can't import.

These are the ones of `__main__` and of notebooks, lambdas, local ones, and those of modules that the script created
itself or loaded from a file that isn't on `sys.path`.

The trainer sends their code once, to the template, as part of the payload. Then both sides hold them in the same order,
and a batch refers to one by its number. So an instance of a class of the user's script arrives as an instance of the
same class. `code` says how code is sent.

Imports the standard library only: workers need nothing else to rebuild code.
"""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

_MP_MAIN = "__mp_main__"
"""The name under which `multiprocessing` imports the script in a process that it spawned."""

MAIN_MODULES = frozenset({"__main__", _MP_MAIN})

_UNNAMED_TYPES = (type(None), type(...), type(NotImplemented))
"""pickle has a special case for these, although they aren't attributes of their modules."""

_IS_HEAP_TYPE = 1 << 9
"""From CPython's object.h: set for classes made by a class statement, clear for most types defined in C."""


def travels_by_value(thing: object) -> bool:
    """Return whether an object is a class or function that another process can't import by module and name."""
    if not isinstance(thing, (type, FunctionType)) or any(thing is unnamed for unnamed in _UNNAMED_TYPES):
        return False  # `is` instead of `in`: a metaclass may define __eq__
    if isinstance(thing, type) and not thing.__flags__ & _IS_HEAP_TYPE:
        return False
    return not is_importable(thing)


def is_importable(thing: Any) -> bool:
    """Return whether another process can import an object by its module and name."""
    module_name = getattr(thing, "__module__", None)
    if module_name is None or module_name in MAIN_MODULES:
        return False
    qualified = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    if qualified is None:
        return False
    found: Any = sys.modules.get(module_name)
    for name in qualified.split("."):
        found = getattr(found, name, None)
    return found is thing and can_be_found(module_name)


def can_be_found(module_name: str) -> bool:
    """Return whether another process can import a module: not if the script created it in memory."""
    return _root_can_be_found(module_name.partition(".")[0])


@functools.cache  # batches ask for each class
def _root_can_be_found(root: str) -> bool:
    is_package = hasattr(sys.modules.get(root), "__path__")
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(root, None)
        except Exception:  # noqa: S112 - the user's own finder, or an old one without the method
            continue
        if spec is not None and (is_package or spec.origin is not None):  # else it is only a folder of that name
            return True
    return False


class Definitions:
    """A numbered list of classes and functions, the same in trainer, template and workers."""

    def __init__(self, things: Iterable[object] = (), num_before: int = 0) -> None:
        """`num_before`: how many numbers other processes use for others."""
        self._things: list[object] = [None] * num_before
        self._numbers: dict[int, int] = {}
        for thing in things:
            self.add(thing)

    def add(self, thing: object) -> int:
        """Return the number of a class or function; assign one if it has none."""
        number = self._numbers.setdefault(id(thing), len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number

    def extend(self, things: Iterable[object]) -> None:
        """Add classes and functions under new numbers. Those that have one keep it, too."""
        for thing in things:
            self._numbers.setdefault(id(thing), len(self._things))
            self._things.append(thing)

    def number_of(self, thing: object) -> int | None:
        """Return the number of a class or function; None if it has none."""
        return self._numbers.get(id(thing))

    def names(self) -> list[str]:
        """Return what they are called, by number. Several may have one name."""
        return [f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}" for thing in self._things]

    def __getitem__(self, number: int) -> object:
        return self._things[number]

    def __len__(self) -> int:
        return len(self._things)


class NewDefinitions(Definitions):
    """For a sender and receiver in the same process: every definition is known, and arrives as the same object."""

    def number_of(self, thing: object) -> int:
        """Return the number of a class or function; assign one if it has none."""
        return self.add(thing)

    def clear(self) -> None:
        """Forget all definitions, once the batch has been decoded."""
        self._things.clear()
        self._numbers.clear()


# The receiver's side --------------------------------------------------------------------------------------------------


class _Script(ModuleType):
    """The module `__main__` in a process that hasn't run the script."""

    @property
    def __file__(self) -> str:  # type: ignore[override]
        """Not an attribute, else `multiprocessing` would run the script in each process that it spawns.

        The script's functions still find it among their globals.
        """
        raise AttributeError("__file__")


def script_globals(basics: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the module `__main__` of a process that hasn't run the script.

    `basics`: those that say which module it is.
    """
    if not isinstance(sys.modules["__main__"], _Script):
        module = sys.modules["__main__"] = sys.modules[basics.get("__name__", "__main__")] = _Script("__main__")
        vars(module).update({**basics, "__builtins__": builtins})
    return vars(sys.modules["__main__"])


def complete_script(variables: dict[str, Any], submodules: Iterable[str], things: Iterable[Any]) -> None:
    """Let code find in `__main__` what it looks up there by name: variables, and the script's classes and functions.

    `submodules` are imported, so that their packages have them as attributes.
    """
    named = {thing.__qualname__: thing for thing in things if thing.__module__ in MAIN_MODULES}
    for name, value in {**named, **variables}.items():
        script_globals({}).setdefault(name, value)
    for name in submodules:
        with suppress(Exception):  # maybe nobody needs it; code that does gets an AttributeError
            import_module(name)


def update_attributes(thing: Any, attributes: dict[str, Any]) -> None:
    """Set an object's attributes without calling its class's `__setattr__`."""
    thing.__dict__.update(attributes)
