"""Classes and functions that another process can't import.

These are the ones of `__main__` and of notebooks, lambdas, local ones, and those of modules that the script created
itself or loaded from a file that isn't on `sys.path`.

The trainer sends their code once, to the template, as part of the payload. Then both sides hold them in the same order,
and a batch refers to one by its number. So an instance of a class of the user's script arrives as an instance of the
same class.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable, Iterable
from types import FunctionType
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
    return found is thing and can_be_found(module_name.partition(".")[0])


@functools.cache  # batches ask for each class
def can_be_found(root: str) -> bool:
    """Return whether another process can import a top-level module: not if the script created it in memory."""
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

    def __init__(self, things: Iterable[object] = ()) -> None:
        self._things: list[object] = []
        self._numbers: dict[int, int] = {}
        for thing in things:
            self.add(thing)

    def add(self, thing: object) -> int:
        """Return the number of a class or function; assign one if it has none."""
        number = self._numbers.setdefault(id(thing), len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number

    def number_of(self, thing: object) -> int | None:
        """Return the number of a class or function; None if it has none."""
        return self._numbers.get(id(thing))

    def names(self) -> list[str]:
        """Return what they are called, by number. Several may have one name."""
        return [f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}" for thing in self._things]

    def loads(self, pickled: memoryview) -> Any:
        """Return what was pickled in the trainer, by its plain pickler. Finds the script's classes that are known."""
        return _Unpickler(pickled, self._named).load() if self._things else pickle.loads(pickled)

    def _named(self, name: str) -> object | None:
        """Return a class or function of the script by its qualified name; None if it isn't known."""
        return next((thing for thing in self._things if _qualified_name(thing) == name), None)

    def __getitem__(self, number: int) -> object:
        return self._things[number]

    def __len__(self) -> int:
        return len(self._things)


def _qualified_name(thing: object) -> str | None:
    """Return the name of what a script defines; None for what else travels by value."""
    return getattr(thing, "__qualname__", None) if getattr(thing, "__module__", None) in MAIN_MODULES else None


class _Unpickler(pickle.Unpickler):
    """Looks up what the user's script defines, which this process hasn't run."""

    def __init__(self, pickled: memoryview, named: Callable[[str], object | None]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._named = named

    def find_class(self, module: str, name: str) -> Any:
        found = self._named(name) if module in MAIN_MODULES else None
        return super().find_class(module, name) if found is None else found


class NewDefinitions(Definitions):
    """For a sender and receiver in the same process: every definition is known, and arrives as the same object."""

    def number_of(self, thing: object) -> int:
        """Return the number of a class or function; assign one if it has none."""
        return self.add(thing)

    def clear(self) -> None:
        """Forget all definitions, once the batch has been decoded."""
        self._things.clear()
        self._numbers.clear()
