"""The pickler of code: classes and functions that can't be imported, and the variables that they use.

It creates each class and function empty, and notes what fills it; `CodeWriter` writes that.

All functions of the script share one set of globals, with the variables that they use. A variable that is used and
can't be sent is an error. An unused variable that can't be sent is none.
"""

from __future__ import annotations

import ctypes
import dis
import io
import sys
import types
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import EnumMeta
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from swift_loader.errors import EncodeError
from swift_loader.transport import rebuild
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import MAIN_MODULES, can_be_found
from swift_loader.transport.encoder import CodeNeeded, Encoder, NumberOf
from swift_loader.transport.fills import REMEDY, Call, Fill, Fills, reduce_special
from swift_loader.transport.reducers import reducers

# Finds the names that code uses. Pure.

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


# The global variables of the script's functions, as sets that functions share.

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


_MADE_WITH_THE_CLASS = frozenset({"__module__", "__qualname__", "__slots__", "__orig_bases__"})
_NOT_SENT = frozenset({"__dict__", "__weakref__", "__annotate__", "__annotate_func__"})
_LEAVES = (type(None), bool, int, float, complex, str, bytes)
_MAX_LITERAL = 100


class _Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int),)


_C_FIELD = type(_Pair.first)
"""The type of a ctypes structure's field descriptors. ctypes doesn't export it in Python 3.10."""


class CodeEncoder(Encoder):
    """An encoder that also serialises code, locks and other objects that scripts hold."""

    def __init__(
        self,
        stream: io.BytesIO,
        arena: Arena,
        number_of: NumberOf,
        note: Callable[[object], object] | None = None,
        *,
        sends_code: bool = True,
    ) -> None:
        """`stream` gets the pickles, `arena` the bulk data.

        `number_of` returns the number of a definition that the receiver has; then only the number is sent. `note` is
        called with each class and function that is sent. If given, the receiver hasn't run the script. Without
        `sends_code`, raise `CodeNeeded` if code would have to be sent.
        """
        super().__init__(stream, arena, number_of)
        self.dispatch_table = reducers()
        self._note = note
        self._sends_code = sends_code
        self._cells: dict[int, types.CellType] = {}
        self._spaces = Spaces(has_run_script=note is None)
        self.things: dict[int, object] = {}
        """The classes and functions that are sent, by address, in order."""
        self.fills = Fills()
        """How to fill what was created empty."""
        self.submodules = Submodules()
        """Those that the code uses."""

    def is_known(self, thing: object) -> bool:
        """Return whether the receiver has a class or function."""
        return self._number_of(thing) is not None

    def noted(self) -> list[object]:
        """Return the classes and functions that `note` was called with."""
        return list(self.things.values()) if self._note is not None else []

    def reducer_override(self, obj: Any) -> Any:  # noqa: D102 - pickle's
        kind = type(obj)
        if kind is Call:
            return obj.reduced
        if kind is Space and obj.made is not None:
            return rebuild.namespace_of, (obj.made, obj.basics)
        if kind is Space:
            return rebuild.new_namespace, (obj.name, obj.basics, obj.is_script, obj.is_module)
        if kind is types.CellType:
            self._note_cell(obj)
            return rebuild.new_cell, ()
        if kind is types.ModuleType or isinstance(obj, types.ModuleType):
            return self._reduce_module(obj)
        if isinstance(obj, np.memmap) and self._note is None:  # in a batch it may be written to; the file must not be
            return super().reducer_override(obj)
        special = reduce_special(obj, kind, self._number_of)
        return super().reducer_override(obj) if special is None else special

    def _reduce_code(self, thing: Any) -> Any:
        if not self._sends_code:
            raise CodeNeeded
        self.things.setdefault(id(thing), thing)
        if self._note is not None:
            self._note(thing)
        variables = variables_beside(thing)
        if variables is not None:
            name = thing.__qualname__.partition(".")[0]
            if variables.get(name) is thing:  # for code that looks it up in the module, as pickle does
                self._use(variables, name, "it", None)
        return self._begin_class(thing) if isinstance(thing, type) else self._begin_function(thing)

    def _reduce_module(self, module: types.ModuleType) -> Any:
        name = module.__name__
        if sys.modules.get(name) is not module:
            alias = next((alias for alias, known in list(sys.modules.items()) if known is module), None)
            if alias is None:
                return NotImplemented  # created by the script: cloudpickle's reducer handles it
            name = alias
        if name in MAIN_MODULES:
            self._use_all(vars(module))
        elif is_made(name):
            self._use_all(vars(module))
            return rebuild.new_module, (name,)
        elif hasattr(module, "__path__"):
            self.submodules.add_package(name, list(sys.modules))
        return import_module, (name,)

    # Functions --------------------------------------------------------------------------------------------------------

    def _begin_function(self, function: types.FunctionType) -> Any:
        variables = function.__globals__
        space = self._spaces.of(variables)
        used = used_globals(function.__code__)
        self.submodules.add_names(used.names)
        user = f"the function {function.__qualname__}"
        for name in used.variables:
            if name in variables:
                self._use(variables, name, user, id(function))
        if used.is_all and space.is_script:
            self._use_all(variables, id(function))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._note_cell(cell, f"the variable {name!r}, which {user} uses,")
            self.fills.link(id(function), id(cell))
        given = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
        given = {name: value for name, value in given.items() if value}
        if given or vars(function):
            more = dict(vars(function))
            call = Call(rebuild.fill_function, function, given, more)
            self._fill(id(function), call, (given, more), f"a default or an attribute of {user}")
        annotations = _annotations_of(function)
        if annotations:
            self._use_hints(annotations, variables)
            call = Call(rebuild.fill_function, function, {"__annotations__": annotations}, {})
            self._fill(id(function), call, annotations, "", required=False)
        names = (function.__name__, function.__qualname__, function.__module__)
        return rebuild.new_function, (function.__code__, space, names, function.__doc__, function.__closure__)

    def _note_cell(self, cell: types.CellType, where: str = "a variable of a function") -> None:
        if id(cell) in self._cells:
            return
        self._cells[id(cell)] = cell
        try:
            value = cell.cell_contents
        except ValueError:  # empty
            return
        self._fill(id(cell), Call(rebuild.fill_cell, cell, value), value, where)

    def _use(self, variables: dict[str, Any], name: str, user: str, owner: Hashable, *, required: bool = True) -> None:
        """Send a global variable, unless it is already sent."""
        space = self._spaces.of(variables)
        where = f"the global variable {name!r}, which {user} uses,"
        owned = (id(space), name)
        self.fills.link(owner, owned)
        if name in space.asked:
            fill = space.asked[name]
            if fill is None or not required:
                return
            if fill.why_missing:
                raise EncodeError(f"{where} {fill.why_missing}", REMEDY)
            if not fill.is_required:
                fill.is_required, fill.where = True, where
            return
        space.asked[name] = None
        value = variables[name]
        call = Call(rebuild.fill_namespace, space, name, value)
        fill = space.asked[name] = self._fill(owned, call, value, where, required=required)
        if fill is not None and not space.is_module:  # a module's own values are never replaced
            fill.stand_in = partial(Call, rebuild.set_variable, space, name)

    def _use_hints(self, hints: dict[str, Any], variables: dict[str, Any]) -> None:
        """Send the globals that type hints name, if they can be sent: `typing.get_type_hints` looks them up."""
        for name in names_in_hints(hints.values()):
            if name in variables:
                self._use(variables, name, "", None, required=False)

    def _use_all(self, variables: dict[str, Any], owner: Hashable = None) -> None:
        """Send all variables that can be sent: code may look up any of them by name."""
        for name in names_of(variables):
            self._use(variables, name, "", owner, required=False)

    def _fill(self, owner: Hashable, call: Call, value: object, where: str, *, required: bool = True) -> Fill | None:
        """Schedule a call that sets a value: soon if the value is only code, else in a fill after what it needs.

        Returns:
            The fill, or None if there is none.
        """
        if _is_code(value):
            self.fills.soon.append(call)
            for code in _code_in(value):
                self.fills.link(owner, id(code))
            return None
        fill = Fill(call, value, where, owner, required)
        self.fills.add(fill)
        return fill

    # Classes ----------------------------------------------------------------------------------------------------------

    def _begin_class(self, cls: type) -> Any:
        has_abstract = hasattr(cls, "_abc_impl") and "_abc_impl" in vars(cls)
        basics = {name: value for name, value in vars(cls).items() if name in _MADE_WITH_THE_CLASS}
        basics.setdefault("__qualname__", cls.__qualname__)
        now: dict[str, Any] = {}
        variables = variables_beside(cls)
        if variables is not None and isinstance(vars(cls).get("__annotations__"), dict):
            self._use_hints(vars(cls)["__annotations__"], variables)
        for name, value in vars(cls).items():
            if name in basics or name in _NOT_SENT or _is_made_with_the_class(value, cls):
                continue
            if name == "_abc_impl":
                self._send_registered(cls)
            elif name == "__init_subclass__":
                self.fills.last.append(Call(rebuild.fill_class, cls, {name: value}))
            elif _is_code(value):
                now[name] = value
            else:
                where = f"the attribute {name!r} of the class {cls.__qualname__}"
                call = Call(rebuild.fill_class, cls, {name: value})
                is_dunder = name.startswith("__") and name.endswith("__")
                fill = self._fill(id(cls), call, value, where, required=not is_dunder)
                # No stand-in for dunders and ctypes' _fields_: None has a meaning there. Enums run no code.
                if fill is not None and not (name[:1] == name[-1:] == "_") and not isinstance(cls, EnumMeta):
                    fill.stand_in = partial(_set_attribute, cls, name)
        for needed in (type(cls), *cls.__bases__, *(code for value in now.values() for code in _code_in(value))):
            self.fills.link(id(cls), id(needed))
        self.fills.soon.append(Call(rebuild.fill_class, cls, now))
        return rebuild.new_class, (type(cls), cls.__name__, cls.__bases__, basics, has_abstract)

    def _send_registered(self, cls: type) -> None:
        import abc

        registered = [known for ref in abc._get_dump(cls)[0] if (known := ref()) is not None]  # type: ignore[attr-defined]  # noqa: SLF001
        if registered:
            call = Call(rebuild.fill_class, cls, {"_abc_registry": registered})
            self._fill(id(cls), call, registered, "", required=False)


def _annotations_of(function: types.FunctionType) -> dict[str, Any]:
    try:
        return function.__annotations__
    except Exception:  # Python 3.14 and later evaluate annotations here
        return {}


def _is_code(value: object) -> bool:
    """Return whether a value is code or a literal, which can be sent before any instance."""
    if type(value) is tuple:
        return len(value) <= _MAX_LITERAL and all(type(item) in _LEAVES for item in value)
    if isinstance(value, (classmethod, staticmethod, property)):
        return type(value) in (classmethod, staticmethod, property) and all(map(_is_code, _code_in(value)))
    return isinstance(value, (types.FunctionType, type)) or type(value) in (types.ModuleType, *_LEAVES)


def _code_in(value: object) -> tuple[Any, ...]:
    if isinstance(value, (classmethod, staticmethod)):
        return _code_in(value.__func__) if isinstance(value.__func__, (classmethod, property)) else (value.__func__,)
    return (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)


def _is_made_with_the_class(value: object, cls: type) -> bool:
    if type(value) is _C_FIELD:
        return True
    kinds = (types.MemberDescriptorType, types.GetSetDescriptorType)
    return isinstance(value, kinds) and value.__objclass__ is cls


def _set_attribute(cls: type, name: str, value: object) -> Call:
    return Call(rebuild.fill_class, cls, {name: value})
