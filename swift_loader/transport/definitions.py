"""Classes and functions that no other process can import: those of `__main__`, of notebooks, lambdas, local ones.

The trainer sends their code once, to the template, in a single `dill` stream, so that what they share stays shared.
Afterwards both sides hold them in the same order, and a batch refers to one by its number: an instance of a class of
the user's script arrives as an instance of that very class.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any

__all__ = ["Definitions", "travels_by_value"]

_MP_MAIN = "__mp_main__"
"""The script, as `multiprocessing` re-imports it in a process that it spawned."""

_MAIN_MODULES = frozenset({"__main__", _MP_MAIN})

_UNNAMED_TYPES = (type(None), type(...), type(NotImplemented))
"""pickle knows these by heart, although their modules don't hold them."""


def travels_by_value(thing: object) -> bool:
    """Return whether a class or function can't be found by another process under its module and name."""
    if not isinstance(thing, (type, FunctionType)) or thing in _UNNAMED_TYPES:
        return False
    module_name = getattr(thing, "__module__", None)
    if module_name is None or module_name in _MAIN_MODULES:
        return True
    found: Any = sys.modules.get(module_name)
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not thing


class Definitions:
    """A numbered list of classes and functions, the same in trainer, template and workers."""

    def __init__(self, things: Iterable[object] = ()) -> None:
        self._things: list[object] = []
        self._numbers: dict[int, int] = {}
        for thing in things:
            self.add(thing)

    def add(self, thing: object) -> int:
        """Return the number of a class or function, a new one if it is not known yet."""
        number = self._numbers.setdefault(id(thing), len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number

    def number_of(self, thing: object) -> int | None:
        """Return the number of a class or function, None if it is not known."""
        return self._numbers.get(id(thing))

    def __getitem__(self, number: int) -> object:
        return self._things[number]

    def __len__(self) -> int:
        return len(self._things)

    def dumps(self) -> bytes:
        """Return the code of all, after adding what they refer to in turn; empty if there are none.

        Raises:
            Exception: Whatever dill raises for something it can't take apart.
        """
        if not self._things:
            return b""
        _dump_by_value(self._things, self)  # finds what they refer to
        return _dump_by_value(self._things, Definitions())

    @classmethod
    def loads(cls, stream: bytes) -> Definitions:
        """Return the copies of another process's definitions, under the same numbers."""
        if not stream:
            return cls()
        import dill

        return cls(dill.loads(stream))


def _dump_by_value(things: list[object], record: Definitions) -> bytes:
    import dill

    renamed: list[Any] = []

    class Recorder(dill.Pickler):  # type: ignore[misc]  # dill has no types
        """Notes each class and function whose code goes into the stream."""

        def save(self, obj: Any, save_persistent_id: bool = True) -> None:
            if travels_by_value(obj):
                record.add(obj)
                if obj.__module__ == _MP_MAIN:  # dill takes this one for a module that can be imported
                    obj.__module__ = "__main__"
                    renamed.append(obj)
            super().save(obj, save_persistent_id)

    stream = io.BytesIO()
    try:
        Recorder(stream, protocol=5, byref=False, recurse=True).dump(list(things))
    finally:
        for thing in renamed:
            thing.__module__ = _MP_MAIN
    return stream.getvalue()
