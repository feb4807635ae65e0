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
from enum import Enum
from importlib import import_module
from types import CellType, CodeType, FunctionType, ModuleType
from types import new_class as new_class_by_call
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


# The receiver's side: pickles of code call these functions. Each object is created empty and filled later. ------------


class SpaceKind(Enum):
    """Which dict of globals the receiver uses for functions."""

    OWN = "own"
    """A new one, which nothing else uses."""
    SCRIPT = "script"
    """That of a new module `__main__`, so that classes are found there: this process hasn't run the script."""
    MODULE = "module"
    """That of a module that can be imported, if this process has: all its functions see each other's changes."""
    MADE = "made"
    """That of a module in `sys.modules` that the script made."""


class _Script(ModuleType):
    """The module `__main__` in a process that hasn't run the script."""

    @property
    def __file__(self) -> str:  # type: ignore[override]
        """Not an attribute, else `multiprocessing` would run the script in each process that it spawns.

        The script's functions still find it among their globals.
        """
        raise AttributeError("__file__")


def new_namespace(name: str, basics: dict[str, Any], kind: SpaceKind) -> dict[str, Any]:
    """Return a dict of globals for functions. `basics` are the variables that say which module it is."""
    if kind is SpaceKind.MODULE and name in sys.modules:
        return vars(sys.modules[name])
    namespace: dict[str, Any] = {}
    if kind is SpaceKind.MADE:
        namespace = vars(new_module(name))
    elif kind is SpaceKind.SCRIPT:
        module = _Script("__main__")
        namespace = module.__dict__
        sys.modules["__main__"] = sys.modules[name] = module
        namespace.update(basics)
    for given, value in {**basics, "__builtins__": builtins}.items():
        namespace.setdefault(given, value)
    return namespace


def new_module(name: str) -> ModuleType:
    """Return a module that can't be imported: the one in `sys.modules`, or a new, empty one."""
    return sys.modules.setdefault(name, ModuleType(name))


def new_function(
    code: CodeType,
    namespace: dict[str, Any],
    names: tuple[str, str, str | None],
    doc: str | None,
    closure: tuple[CellType, ...] | None,
) -> FunctionType:
    """Return a function without defaults; `names` are its name, qualified name and module."""
    function = FunctionType(code, namespace, names[0], None, closure)
    function.__qualname__, function.__doc__ = names[1], doc
    function.__module__ = names[2]  # type: ignore[assignment]  # None is allowed
    return function


def new_class(metaclass: type, name: str, bases: tuple[type, ...], basics: dict[str, Any], has_abstract: bool) -> type:
    """Return a class without attributes. The metaclass's own `__new__` and `__init__` don't run."""
    try:
        cls: type = type.__new__(metaclass, name, bases, basics)
    except TypeError as error:
        if "is not safe" not in str(error):  # "not safe": a metaclass in C, such as that of ctypes.Structure
            return _without_hook(metaclass, name, bases, basics, has_abstract)
        cls = new_class_by_call(name, bases, {"metaclass": metaclass}, lambda namespace: namespace.update(basics))
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


def fill_cell(cell: CellType, value: Any) -> None:
    """Set the value of a closure's cell."""
    cell.cell_contents = value


def fill_function(function: FunctionType, attributes: dict[str, Any]) -> None:
    """Set a function's attributes, such as its defaults."""
    for name, value in attributes.items():
        setattr(function, name, value)


def set_attribute(cls: type, name: str, value: Any) -> None:
    """Set a class's attribute without calling the metaclass's `__setattr__`, except for ctypes."""
    try:
        type.__setattr__(cls, name, value)
    except TypeError:  # ctypes needs the call: it computes a structure's layout when _fields_ is set
        setattr(cls, name, value)


def register_all(cls: Any, known: list[type]) -> None:
    """Register classes with an abstract base class."""
    for one in known:
        cls.register(one)


def import_modules(names: Iterable[str]) -> None:
    """Import submodules, so that their packages have them as attributes. Errors are ignored."""
    for name in names:
        try:
            import_module(name)
        except Exception:  # noqa: S112 - maybe nobody needs it; code that does gets an AttributeError
            continue
