"""Rebuilds code that another process sent by value. The pickles call these functions.

No code that created a class or function runs a second time: no metaclass or `__init_subclass__` of the script, no
`__set_name__`, no decorator. Each object is created empty and filled later, so cycles need no special care. Imports the
standard library and NumPy only: workers need nothing else for this.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import marshal
import os
import sys
import threading
import types
import typing
import weakref
from collections.abc import Iterable
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swift_loader.transport.segments import Segment

__all__ = [
    "Finished",
    "add_abstract",
    "fill_cell",
    "fill_class",
    "fill_function",
    "fill_namespace",
    "import_module",
    "import_modules",
    "namespace_of",
    "new_alias",
    "new_cache",
    "new_cell",
    "new_class",
    "new_context_var",
    "new_event",
    "new_function",
    "new_library",
    "new_local",
    "new_member",
    "new_memmap",
    "new_module",
    "new_namespace",
    "new_ref",
    "new_type_variable",
    "new_view",
    "new_weak_keys",
    "new_weak_values",
    "nothing",
    "read_code",
    "refill",
    "set_variable",
    "update_attributes",
]


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


def read_code(data: bytes) -> types.CodeType:
    """Return a code object, sent by an interpreter of the same version."""
    code = marshal.loads(data)  # noqa: S302 - from a process of ours
    assert isinstance(code, types.CodeType)
    return code


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
        add_abstract(cls)
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
        add_abstract(cls)
    return cls


def add_abstract(cls: type) -> None:
    """Give a class the registry and caches of `ABCMeta`."""
    from abc import _abc_init  # type: ignore[attr-defined]

    _abc_init(cls)


def new_member(enum: type, base: Any, args: tuple[Any, ...]) -> Any:
    """Return an empty member of an Enum class, which may be empty itself."""
    return base.__new__(enum, *args)


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


def new_type_variable(kind: type, name: str, args: tuple[Any, ...], options: dict[str, Any], module: str) -> Any:
    """Return a `TypeVar`, a `ParamSpec`, a `TypeVarTuple` or a `NewType`."""
    made = kind(name, *args, **options)
    made.__module__ = module
    return made


def new_alias(name: str, value: Any, type_params: tuple[Any, ...]) -> Any:
    """Return what `type name = value` creates (Python 3.12 and later)."""
    return typing.TypeAliasType(name, value, type_params=type_params)  # type: ignore[attr-defined, unused-ignore]


def new_cache(function: Any, maxsize: int | None, typed: bool) -> Any:
    """Return `function`, wrapped in an empty `lru_cache`."""
    return functools.lru_cache(maxsize, typed)(function)


def new_event(is_set: bool) -> threading.Event:
    """Return an event."""
    event = threading.Event()
    if is_set:
        event.set()
    return event


def new_local(kind: Any) -> Any:
    """Return a `threading.local`, or an instance of a class derived from it."""
    return kind.__new__(kind)  # __init__ must not run in this thread; other threads run it when they use the object


def new_library(
    kind: type[ctypes.CDLL], name: str | None, uses_errno: bool, functions: dict[str, tuple[Any, Any, Any]]
) -> ctypes.CDLL:
    """Return a ctypes library whose functions have these (restype, argtypes, errcheck)."""
    library = kind(name, use_errno=uses_errno)
    for function_name, (restype, argtypes, errcheck) in functions.items():
        function = getattr(library, function_name)
        function.restype = restype
        if argtypes is not None:
            function.argtypes = argtypes
        if errcheck is not None:
            function.errcheck = errcheck
    return library


def new_view(data: bytes | bytearray, form: str, shape: tuple[int, ...]) -> memoryview:
    """Return a memoryview of `data` with this format and shape."""
    view = memoryview(data)
    return view if form == "B" and len(shape) == 1 else view.cast(form, shape)  # type: ignore[call-overload]


def new_context_var(name: str, values: tuple[Any, ...]) -> ContextVar[Any]:
    """Return a context variable. If it had a value in the sender, that value is its default."""
    return ContextVar(name, default=values[0]) if values else ContextVar(name)


def new_ref(target: Any) -> Any:
    """Return a weak reference to `target`; a dead one if `target` is None."""
    return weakref.ref(_Quiet()) if target is None else weakref.ref(target)


def new_weak_keys(items: dict[Any, Any]) -> Any:
    """Return a `WeakKeyDictionary`."""
    return weakref.WeakKeyDictionary(items)


def new_weak_values(items: dict[Any, Any]) -> Any:
    """Return a `WeakValueDictionary`."""
    return weakref.WeakValueDictionary(items)


def new_memmap(
    file: tuple[str, str, int, int], dtype: np.dtype[Any], shape: tuple[int, ...], start: int, strides: tuple[int, ...]
) -> Any:
    """Return a `np.memmap` of the same file.

    Args:
        file: Path, mode, offset of the mapping in the file in bytes, and length of the mapping in bytes.
        dtype: The array's dtype.
        shape: The array's shape.
        start: Offset of the array in the mapping, in bytes.
        strides: The array's strides, in bytes.
    """
    name, mode, offset, nbytes = file
    # Not Python's mmap: it keeps a descriptor (until Python 3.13), which would look like a file that forks share.
    descriptor = os.open(name, (os.O_RDONLY if mode == "r" else os.O_RDWR) | os.O_CLOEXEC)
    segment = Segment.map_file(descriptor, offset + nbytes, writes_through=mode != "r")
    array: Any = np.ndarray.__new__(np.memmap, shape, dtype, segment.memory, offset + start, strides)
    array._mmap, array.filename, array.offset, array.mode = None, Path(name), offset, mode  # noqa: SLF001
    array.flags.writeable = mode != "r"
    return array


def nothing() -> None:
    """Return None. `Trial` pickles a call of this in place of objects that need no check."""
