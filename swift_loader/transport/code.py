"""Code by value: classes and functions that can't be imported, by cloudpickle.

All functions of the script that are sent together share one set of globals: those of the module `__main__` of a process
that hasn't run the script, else a new one. Only the variables that they use are sent. In a new process, the script's
classes and functions are found in `__main__`, too, as pickle looks them up there.
"""

from __future__ import annotations

import inspect
import io
import sys
import types
from collections.abc import Callable, Iterator
from copy import copy
from enum import EnumMeta
from importlib import import_module
from typing import Any

import cloudpickle
import numpy as np

from swift_loader.batch.tree import find_unencodable, type_name
from swift_loader.errors import EncodeError
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import MAIN_MODULES, Definitions, can_be_found, script_globals, travels_by_value
from swift_loader.transport.encoder import Encoder
from swift_loader.transport.reducers import reduce_special, reducers

_REMEDY = (
    "Create it where it is used, so that each process has its own, or move the code into a module that can be "
    "imported. SwiftLoader's dataset_class= creates it in its own processes, in the dataset's constructor. "
    'start_method="fork" (DataLoader: multiprocessing_context="fork") sends nothing'
)
"""What to do about a value that can't be sent."""

_BASICS = frozenset({"__name__", "__package__", "__file__"})
"""The variables that say which module it is."""


class _ScriptGlobals:
    """Pickled as what returns the variables of the receiver's `__main__`."""

    def __reduce__(self) -> Any:
        return script_globals, ({name: value for name, value in _script().items() if name in _BASICS},)


class _Later:
    """Pickled as what a function returns once all before it is written."""

    def __init__(self, find: Callable[[], object]) -> None:
        self._find = find

    def __reduce__(self) -> Any:
        return copy, (self._find(),)


class CodeEncoder(Encoder, cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """An encoder that also serialises code, locks and other objects that scripts hold."""

    dispatch_table = reducers()

    def __init__(self, stream: io.BytesIO, arena: Arena, definitions: Definitions, *, has_run_script: bool) -> None:
        """`has_run_script`: whether the receiver has: it gets a batch, and its own variables stay as they are."""
        super().__init__(stream, arena, definitions)
        self.things: list[Any] = []
        """The classes and functions that are sent by value, in order."""
        self._packages: list[str] = []
        self._names: set[object] = set()
        """All names and constants in code that is sent."""
        self._has_run_script = has_run_script
        if not has_run_script:
            self.globals_ref[id(_script())] = _ScriptGlobals()

    def dump_package(self, content: object) -> None:
        """Write what `codec.decode_with_code` reads."""
        self.dump([content, _Later(self._looked_up), _Later(self._submodules), self.things], [content])
        self.clear_memo()  # it refers to what refers to this object, and so to the content

    def _looked_up(self) -> dict[str, Any]:
        """Return the variables that code may look up by their names: classes around others, as pickle does, or all."""
        names, script = self._names, _script()
        inside = (thing.__qualname__ for thing in self.things if "<locals>" not in thing.__qualname__)
        outer = {name.partition(".")[0] for name in inside if "." in name}
        by_module = "modules" in names and not names.isdisjoint({"__name__", "__main__"})
        if by_module or not names.isdisjoint({"globals", "eval", "exec", "__main__"}):
            outer = {name for name, value in script.items() if name[:2] != "__" and refusal(value) is None}
        return {name: script[name] for name in outer if name in script}

    def _submodules(self) -> list[str]:
        """Return the submodules that code may use as attributes of their packages, without importing them by name."""
        inner = ((package, name) for package in self._packages for name in [*sys.modules] if name.startswith(package))
        return [name for package, name in inner if self._names.issuperset(name[len(package) :].split("."))]

    def reducer_override(self, obj: Any) -> Any:  # noqa: D102 - pickle's
        if isinstance(obj, types.ModuleType):
            return self._reduce_module(obj)
        if isinstance(obj, types.CellType):  # one that several functions have stays one
            return types.CellType, (), _content_of(obj), None, None, fill_cell
        if isinstance(obj, np.memmap) and self._has_run_script:
            return NotImplemented  # in a batch it may be written to; the file must not be
        if isinstance(obj, type) and not travels_by_value(obj):
            return cloudpickle.Pickler.reducer_override(self, obj)  # it may have no importable name
        special = reduce_special(obj, type(obj))
        return super().reducer_override(obj) if special is None else special

    def _reduce_module(self, module: types.ModuleType) -> Any:
        name = module.__name__
        if sys.modules.get(name) is not module:  # made by the script
            return NotImplemented
        if name not in MAIN_MODULES and not can_be_found(name):
            cloudpickle.register_pickle_by_value(module)
            return NotImplemented
        if hasattr(module, "__path__"):
            self._packages.append(f"{name}.")
        return import_module, (name.encode().decode(),)  # a new string, which pickle writes out: see `modules_of`

    def _reduce_code(self, thing: Any) -> Any:
        module = sys.modules.get(thing.__module__)
        if module is not None and thing.__module__ != "__main__" and not can_be_found(thing.__module__):
            cloudpickle.register_pickle_by_value(module)
        if isinstance(thing, EnumMeta) and any(map(_has_constructor, thing.__mro__)):
            what = f"the Enum {thing.__qualname__} has a constructor, or is one of a dataclass"
            raise EncodeError(what, "In workers, its members would differ. Define it in a module that can be imported")
        self.things.append(thing)
        reduced = cloudpickle.Pickler.reducer_override(self, thing)
        if isinstance(thing, type):
            reduced[2][0]["__qualname__"] = thing.__qualname__
        else:
            self._names.update(_names_in(thing.__code__))
        return reduced

    def _function_getnewargs(self, func: types.FunctionType) -> Any:
        """Return the arguments of the receiver's function: cloudpickle's, but with the function's own cells."""
        return (*super()._function_getnewargs(func)[:-1], func.__closure__)


def _has_constructor(base: type) -> bool:
    return "__init__" in vars(base) and base.__module__ not in ("enum", "builtins")


def _script() -> dict[str, Any]:
    """Return the variables of the script."""
    return vars(sys.modules["__main__"])


def _content_of(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()


def fill_cell(cell: types.CellType, content: tuple[Any, ...]) -> None:
    """Set the value of a closure's cell; empty: it has none."""
    for cell.cell_contents in content:
        pass


def _names_in(code: types.CodeType) -> Iterator[object]:
    """Yield the names and constants in code, also in that of functions and classes inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            yield constant


# What can't be sent ---------------------------------------------------------------------------------------------------


def try_out(part: object) -> None:
    """Raise if an object can't be sent, not even together with its code."""
    CodeEncoder(io.BytesIO(), Arena(np.empty(0, np.uint8)), Definitions(), has_run_script=False).dump(part)


def refusal(value: object) -> tuple[str, object, Exception] | None:
    """Return where in a value what is that can't be sent, and why; None if it can be."""
    try:
        try_out(value)
    except Exception as error:
        return find_unencodable(value, error, try_out)
    return None


def blame(thing: object) -> EncodeError | None:
    """Return the error that names the variable or attribute because of which code can't be sent; None: unknown."""
    for where, value in _used_by(thing):
        if value is thing or (refused := refusal(value)) is None:
            continue
        path, culprit, reason = refused
        holds = f"holds at {path} a" if path else "is a"
        why = f"{type_name(culprit)}, which can't be sent to another process ({type(reason).__name__}: {reason})"
        return blame(culprit) or EncodeError(f"{where} {holds} {why}", _REMEDY)
    return None


def _used_by(thing: object) -> Iterator[tuple[str, object]]:
    """Yield what a function or class uses, with what it is."""
    if isinstance(thing, types.FunctionType):
        used, user = inspect.getclosurevars(thing), f"which the function {thing.__qualname__} uses,"
        yield from ((f"the global variable {name!r}, {user}", value) for name, value in used.globals.items())
        yield from ((f"the variable {name!r}, {user}", value) for name, value in used.nonlocals.items())
        if thing.__defaults__ or thing.__kwdefaults__:
            given = [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
            yield f"a default of the function {thing.__qualname__}", given
    elif isinstance(thing, type):
        for name, value in vars(thing).items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, types.FunctionType):
                yield from _used_by(function)
            elif name[:2] != "__":
                yield f"the attribute {name!r} of the class {thing.__qualname__}", value
