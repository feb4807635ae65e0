"""Rebuilds code that another process sent by value. The pickles call these functions.

No code that created a class or function runs a second time: no metaclass or `__init_subclass__` of the script, no
`__set_name__`, no decorator. Each object is created empty and filled later, so cycles need no special care. Imports the
standard library only: workers need nothing else for this.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple


class Finished(NamedTuple):
    """The result of the last pickle."""

    content: Any
    things: list[object]
    """The classes and functions that were sent by value, in the order of their numbers."""


class _Script(types.ModuleType):
    """The module `__main__` in a process that hasn't run the script."""

    @property
    def __file__(self) -> str:  # type: ignore[override]
        """Not an attribute, else `multiprocessing` would run the script in each process that it spawns.

        The script's functions still find it among their globals.
        """
        raise AttributeError("__file__")


def new_namespace(name: str, basics: dict[str, Any], is_script: bool, is_module: bool) -> dict[str, Any]:
    """Return a dict of globals for functions.

    The script's globals become the module `__main__`, so that classes are found there. If the functions belong to a
    module that this process has imported, the dict is the module's own: all its functions see each other's changes.
    """
    if is_module and name in sys.modules:
        return vars(sys.modules[name])
    namespace: dict[str, Any] = {}
    if is_script:
        module = _Script("__main__")
        namespace = module.__dict__
        sys.modules["__main__"] = sys.modules[name] = module
    namespace.update(basics, __builtins__=builtins)
    return namespace


def new_module(name: str) -> types.ModuleType:
    """Return a module that can't be imported: the one in `sys.modules`, or a new, empty one."""
    return sys.modules.setdefault(name, types.ModuleType(name))


def namespace_of(module: types.ModuleType, basics: dict[str, Any]) -> dict[str, Any]:
    """Return a module's dict, for use as the globals of its functions. Sets the missing ones of `basics`."""
    for name, value in {**basics, "__builtins__": builtins}.items():
        vars(module).setdefault(name, value)
    return vars(module)


def new_function(
    code: types.CodeType,
    namespace: dict[str, Any],
    names: tuple[str, str, str | None],
    doc: str | None,
    closure: tuple[types.CellType, ...] | None,
) -> types.FunctionType:
    """Return a function without defaults; `names` are its name, qualified name and module."""
    function = types.FunctionType(code, namespace, names[0], None, closure)
    function.__qualname__, function.__doc__ = names[1], doc
    function.__module__ = names[2]  # type: ignore[assignment]  # None is allowed
    return function


def new_cell() -> types.CellType:
    """Return an empty cell of a closure."""
    return types.CellType()


def new_class(metaclass: type, name: str, bases: tuple[type, ...], basics: dict[str, Any], has_abstract: bool) -> type:
    """Return a class without attributes. The metaclass's own `__new__` and `__init__` don't run."""
    try:
        cls: type = type.__new__(metaclass, name, bases, basics)
    except TypeError as error:
        if "is not safe" not in str(error):  # "not safe": a metaclass in C, such as that of ctypes.Structure
            return _without_hook(metaclass, name, bases, basics, has_abstract)
        cls = types.new_class(name, bases, {"metaclass": metaclass}, lambda namespace: namespace.update(basics))
    except Exception:
        return _without_hook(metaclass, name, bases, basics, has_abstract)
    if has_abstract:
        _add_abstract(cls)
    return cls


class _Quiet:
    """As the first base, it stops a library's `__init_subclass__` from seeing a class that isn't filled yet."""

    def __init_subclass__(cls) -> None: ...


def _without_hook(
    metaclass: type, name: str, bases: tuple[type, ...], basics: dict[str, Any], has_abstract: bool
) -> type:
    cls: type = type.__new__(metaclass, name, (_Quiet, *bases), basics)
    type.__setattr__(cls, "__bases__", bases)
    if has_abstract:
        _add_abstract(cls)
    return cls


def _add_abstract(cls: type) -> None:
    """Give a class the registry and caches of `ABCMeta`."""
    from abc import _abc_init  # type: ignore[attr-defined]

    _abc_init(cls)


def update_attributes(thing: Any, attributes: dict[str, Any]) -> None:
    """Set an object's attributes without calling its class's `__setattr__`."""
    thing.__dict__.update(attributes)


def fill_namespace(namespace: dict[str, Any], name: str, value: Any) -> None:
    """Set a global variable, unless this process has set it already."""
    namespace.setdefault(name, value)


def set_variable(namespace: dict[str, Any], name: str, value: Any) -> None:
    """Set a global variable, whatever it holds: it may hold a stand-in for this value."""
    namespace[name] = value


def refill(container: Any, content: Any) -> None:
    """Replace a container's content. Code that ran meanwhile may have put something into the container."""
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def fill_cell(cell: types.CellType, value: Any) -> None:
    """Set the value of a closure's cell."""
    cell.cell_contents = value


def fill_function(function: types.FunctionType, attributes: dict[str, Any], more: dict[str, Any]) -> None:
    """Set a function's special attributes, such as its defaults, and then the user's (`more`)."""
    for name, value in attributes.items():
        setattr(function, name, value)
    function.__dict__.update(more)


def fill_class(cls: type, attributes: dict[str, Any]) -> None:
    """Set a class's attributes without calling the metaclass's `__setattr__`, except for ctypes."""
    for name, value in attributes.items():
        if name == "_abc_registry":
            for known in value:
                cls.register(known)  # type: ignore[attr-defined]
        else:
            try:
                type.__setattr__(cls, name, value)
            except TypeError:  # ctypes needs the call: it computes a structure's layout when _fields_ is set
                setattr(cls, name, value)


def import_modules(names: Iterable[str]) -> None:
    """Import submodules, so that their packages have them as attributes. Errors are ignored."""
    for name in names:
        try:
            import_module(name)
        except Exception:  # noqa: S112 - maybe nobody needs it; code that does gets an AttributeError
            continue


def nothing() -> None:
    """Return None. `DryRunPickler` pickles a call of this in place of objects that need no check."""
