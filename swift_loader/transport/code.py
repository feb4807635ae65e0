"""Sends objects together with the code that they need: classes and functions that can't be imported.

The encoder writes a sequence of pickles that share one memo. The first pickles create each class and function empty,
and then fill it. The last pickle holds the content. So a class is complete before an instance of it is rebuilt, and
cycles need no special care. The recursion depth depends on the data, not on how the script's functions call each other.

All functions of the script share one set of globals, with the variables that they use. A variable that is used and
can't be sent is an error. An unused variable that can't be sent is none.
"""

from __future__ import annotations

import ctypes
import io
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import EnumMeta
from functools import partial
from typing import Any

import numpy as np

from swift_loader.batch.tree import find_unencodable, type_name
from swift_loader.errors import EncodeError
from swift_loader.transport import rebuild
from swift_loader.transport.arena import Arena
from swift_loader.transport.definitions import MAIN_MODULES, can_be_found
from swift_loader.transport.encoder import CodeNeeded, Encoder, NumberOf
from swift_loader.transport.names import names_in_hints, used_globals
from swift_loader.transport.reducers import reducers
from swift_loader.transport.steps import Step, Steps
from swift_loader.transport.trial import Trial, reduce_special

__all__ = ["CodeEncoder"]

_BASICS = ("__name__", "__package__", "__file__", "__path__")
_OF_THE_MODULE = frozenset(
    {*_BASICS, "__builtins__", "__loader__", "__spec__", "__cached__", "__doc__", "__annotations__"}
)

_MADE_WITH_THE_CLASS = frozenset({"__module__", "__qualname__", "__slots__", "__orig_bases__"})
_NOT_SENT = frozenset({"__dict__", "__weakref__", "__annotate__", "__annotate_func__"})
_LEAVES = (type(None), bool, int, float, complex, str, bytes)
_MAX_LITERAL = 100


class _Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int),)


_C_FIELD = type(_Pair.first)
"""The type of a ctypes structure's field descriptors. ctypes doesn't export it in Python 3.10."""

_EMPTY: dict[type, Callable[[Any], object]] = {
    **{kind: lambda full: type(full)() for kind in (dict, list, set, OrderedDict)},
    weakref.WeakValueDictionary: lambda _: weakref.WeakValueDictionary(),
    weakref.WeakKeyDictionary: lambda _: weakref.WeakKeyDictionary(),
    defaultdict: lambda full: defaultdict(full.default_factory),
}
"""Makes the empty container that is filled later, if the code that makes its items looks into the container."""

_REMEDY = (
    "Create it where it is used, or in the dataset's constructor with dataset_class=, so that each process has its "
    "own; or move the code into a module that can be imported"
)


class _Call:
    """Pickled as a call of a function: the receiver gets the call's result."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.reduced = function, args


@dataclass(eq=False, slots=True)
class _Space:
    """A set of globals that some functions share."""

    name: str
    basics: dict[str, Any]
    is_script: bool
    is_module: bool
    """Whether they are the globals of a module in `sys.modules`."""
    made: types.ModuleType | None = None
    """The module, if it is in `sys.modules` but can't be imported."""
    asked: dict[str, Step | None] = field(default_factory=dict)
    """The variables that are sent, each with its step; None if it needs no step."""
    missing: dict[str, str] = field(default_factory=dict)
    """Variables that couldn't be sent and weren't required then, each with the reason."""


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
        """Get ready.

        Args:
            stream: Receives the pickles.
            arena: Receives the bulk data.
            number_of: Returns the number of a definition that the receiver has; then only the number is sent.
            note: Is called with each class and function that is sent. If given, the receiver hasn't run the script.
            sends_code: False: raise `CodeNeeded` if code would have to be sent.
        """
        super().__init__(stream, arena, number_of)
        self.dispatch_table = reducers()
        self._note = note
        self._sends_code = sends_code
        self._kept: list[object] = []
        """The memo knows objects by address, so they must stay alive."""
        self._things: dict[int, object] = {}
        self._cells: dict[int, types.CellType] = {}
        self._spaces: dict[int | str, _Space] = {}
        self._soon: deque[_Call] = deque()
        self._steps = Steps()
        self._hooks: list[_Call] = []
        self._packages: dict[str, list[tuple[frozenset[str], str]]] = {}
        self._names: set[str] = set()
        self._num_seen = (0, 0)

    def write(self, content: object) -> None:
        """Write all pickles.

        Raises:
            EncodeError: A variable of the script can't be sent, or an attribute of one of its classes.
            Exception: The content can't be sent.
        """
        # The empty text: the caller explains an error of the content.
        self._steps.add(Step(lambda: None, content, ""))
        self._write_steps()
        self._write_hooks()
        self.dump(content)
        self._write_steps()  # for objects that a reducer creates anew each time
        self._write_hooks()
        things = list(self._things.values()) if self._note is not None else []
        self._dump_call(_Call(rebuild.Finished, content, things))

    # Called by pickle -------------------------------------------------------------------------------------------------

    def reducer_override(self, obj: Any) -> Any:  # noqa: D102 - pickle's
        kind = type(obj)
        if kind is _Call:
            return obj.reduced
        if kind is _Space and obj.made is not None:
            return rebuild.namespace_of, (obj.made, obj.basics)
        if kind is _Space:
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
        self._things.setdefault(id(thing), thing)
        if self._note is not None:
            self._note(thing)
        variables = _variables_beside(thing)
        if variables is not None:
            name = thing.__qualname__.partition(".")[0]
            if variables.get(name) is thing:  # for code that looks it up in the module, as pickle does
                self._use(self._space_of(variables), variables, name, "it", None)
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
        elif _is_made(name):
            self._use_all(vars(module))
            return rebuild.new_module, (name,)
        elif hasattr(module, "__path__") and name not in self._packages:
            inner = [other for other in list(sys.modules) if other.startswith(f"{name}.")]
            self._packages[name] = [(frozenset(other[len(name) + 1 :].split(".")), other) for other in inner]
        return rebuild.import_module, (name,)

    # Functions --------------------------------------------------------------------------------------------------------

    def _begin_function(self, function: types.FunctionType) -> Any:
        space = self._space_of(function.__globals__)
        used = used_globals(function.__code__)
        self._names.update(used.names)
        user = f"the function {function.__qualname__}"
        for name in used.variables:
            if name in function.__globals__:
                self._use(space, function.__globals__, name, user, id(function))
        if used.is_all and space.is_script:
            self._use_all(function.__globals__, id(function))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._note_cell(cell, f"the variable {name!r}, which {user} uses,")
            self._steps.link(id(function), id(cell))
        given = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
        given = {name: value for name, value in given.items() if value}
        if given or vars(function):
            more = dict(vars(function))
            call = _Call(rebuild.fill_function, function, given, more)
            self._set(id(function), call, (given, more), f"a default or an attribute of {user}")
        annotations = _annotations_of(function)
        if annotations:
            self._use_hints(annotations, space, function.__globals__)
            call = _Call(rebuild.fill_function, function, {"__annotations__": annotations}, {})
            self._set(id(function), call, annotations, "", required=False)
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
        self._set(id(cell), _Call(rebuild.fill_cell, cell, value), value, where)

    def _space_of(self, variables: dict[str, Any]) -> _Space:
        name = variables.get("__name__", "")
        main = vars(sys.modules["__main__"])
        # In a process that multiprocessing spawned, the script's functions use a copy of the module's variables.
        is_script = variables is main or (name == "__mp_main__" and main.get("__name__") == name)
        key = name if is_script else id(variables)
        if key not in self._spaces:
            basics = {basic: variables[basic] for basic in _BASICS if basic in variables}
            is_module = not is_script and vars(sys.modules.get(name, object)) is variables
            made = sys.modules[name] if is_module and _is_made(name) else None
            self._spaces[key] = _Space(str(name), basics, is_script and self._note is not None, is_module, made)
            self._kept.append(variables)
        return self._spaces[key]

    def _use(
        self,
        space: _Space,
        variables: dict[str, Any],
        name: str,
        user: str,
        owner: Hashable,
        *,
        required: bool = True,
    ) -> None:
        """Send a global variable, unless it is already sent."""
        where = f"the global variable {name!r}, which {user} uses,"
        if name in space.missing and required:
            raise EncodeError(f"{where} {space.missing[name]}")
        self._steps.link(owner, (id(space), name))
        if name in space.asked:
            step = space.asked[name]
            if required and step is not None and not step.is_required:
                step.is_required, step.where = True, where
            return
        space.asked[name] = None
        value = variables[name]
        call = _Call(rebuild.fill_namespace, space, name, value)
        note_missing = partial(space.missing.__setitem__, name)
        step = space.asked[name] = self._set(
            (id(space), name), call, value, where, required=required, note_missing=note_missing
        )
        if step is not None and not space.is_module:  # a module's own values are never replaced
            step.put = lambda other: self._dump_call(_Call(rebuild.set_variable, space, name, other))

    def _use_hints(self, hints: dict[str, Any], space: _Space, variables: dict[str, Any]) -> None:
        """Send the globals that type hints name, if they can be sent: `typing.get_type_hints` looks them up."""
        for name in names_in_hints(hints.values()):
            if name in variables:
                self._use(space, variables, name, "", None, required=False)

    def _use_all(self, variables: dict[str, Any], owner: Hashable = None) -> None:
        """Send all variables that can be sent: code may look up any of them by name."""
        space = self._space_of(variables)
        for name in list(variables):
            if name not in _OF_THE_MODULE:
                self._use(space, variables, name, "", owner, required=False)

    # Classes ----------------------------------------------------------------------------------------------------------

    def _begin_class(self, cls: type) -> Any:
        has_abstract = hasattr(cls, "_abc_impl") and "_abc_impl" in vars(cls)
        basics = {name: value for name, value in vars(cls).items() if name in _MADE_WITH_THE_CLASS}
        basics.setdefault("__qualname__", cls.__qualname__)
        now: dict[str, Any] = {}
        variables = _variables_beside(cls)
        if variables is not None and isinstance(vars(cls).get("__annotations__"), dict):
            self._use_hints(vars(cls)["__annotations__"], self._space_of(variables), variables)
        for name, value in vars(cls).items():
            if name in basics or name in _NOT_SENT or _is_made_with_the_class(value, cls):
                continue
            if name == "_abc_impl":
                self._send_registered(cls)
            elif name == "__init_subclass__":
                self._hooks.append(_Call(rebuild.fill_class, cls, {name: value}))
            elif _is_code(value):
                now[name] = value
            else:
                where = f"the attribute {name!r} of the class {cls.__qualname__}"
                call = _Call(rebuild.fill_class, cls, {name: value})
                step = self._set(id(cls), call, value, where, required=not _is_dunder(name))
                # No stand-in for dunders and ctypes' _fields_: None has a meaning there. Enums run no code.
                if step is not None and not (name[:1] == name[-1:] == "_") and not isinstance(cls, EnumMeta):
                    step.put = partial(self._put_attribute, cls, name)
        for needed in (type(cls), *cls.__bases__, *(code for value in now.values() for code in _code_in(value))):
            self._steps.link(id(cls), id(needed))
        self._soon.append(_Call(rebuild.fill_class, cls, now))
        return rebuild.new_class, (type(cls), cls.__name__, cls.__bases__, basics, has_abstract)

    def _put_attribute(self, cls: type, name: str, value: object) -> None:
        self._dump_call(_Call(rebuild.fill_class, cls, {name: value}))

    def _send_registered(self, cls: type) -> None:
        import abc

        registered = [known for ref in abc._get_dump(cls)[0] if (known := ref()) is not None]  # type: ignore[attr-defined]  # noqa: SLF001
        if registered:
            call = _Call(rebuild.fill_class, cls, {"_abc_registry": registered})
            self._set(id(cls), call, registered, "", required=False)

    # Order of the steps -----------------------------------------------------------------------------------------------

    def _set(
        self,
        owner: Hashable,
        call: _Call,
        value: object,
        where: str,
        *,
        required: bool = True,
        note_missing: Callable[[str], None] | None = None,
    ) -> Step | None:
        """Schedule a call that sets a value: soon if the value is only code, else in a step after what it needs.

        Returns:
            The step, or None if there is none.
        """
        if _is_code(value):
            self._soon.append(call)
            for code in _code_in(value):
                self._steps.link(owner, id(code))
            return None
        step = Step(partial(self._dump_call, call), value, where, owner, required, note_missing)
        self._steps.add(step)
        return step

    def _write_steps(self) -> None:
        """Write all waiting steps, each value after everything that its code needs."""
        self._write_soon()
        while (step := self._steps.next()) is not None:
            if step.is_open:
                step.write()
                step.is_done = True
                continue
            step.is_open = True
            self._kept.append(step)
            trial = Trial(lambda thing: self._number_of(thing) is not None)
            try:
                trial.dump(step.value)
            except Exception as error:
                step.is_done = True
                self._refuse(step, error)
                continue
            for thing in trial.found:
                if id(thing) not in self._things:
                    self._dump_as(_name_of(thing), thing)
            self._write_soon()
            if trial.runs_code or step.owner is None:
                for other in self._steps.put_first(id(thing) for thing in trial.found):
                    self._put_stand_in(other)
                continue
            for thing in trial.found:  # their steps are written later; whoever needs this owner needs them, too
                self._steps.link(step.owner, id(thing))
            step.write()
            step.is_done = True

    def _put_stand_in(self, step: Step) -> None:
        """Set a stand-in for a value in a cycle: the code that creates the value already looks the value up.

        The stand-in of a container is the container itself, empty. Any other value is None until it can be set, as in a
        class that creates its only instance later.
        """
        put, value = step.put, step.value
        if put is None:
            return
        step.put = None
        make_empty = _EMPTY.get(type(value))
        if make_empty is None:
            put(None)
            step.write = partial(put, value)
            return
        memo = self.memo.copy()
        if id(value) in memo:  # the receiver has it already, complete
            put(value)
            step.is_done = True
            return
        empty = make_empty(value)
        put(empty)
        memo = self.memo.copy()
        memo[id(value)] = (memo.pop(id(empty))[0], value)  # the memo's size must stay: the unpickler counts entries
        self.memo = memo
        content = dict(value) if hasattr(value, "keys") else list(value)  # type: ignore[call-overload]
        step.write = partial(self._dump_call, _Call(rebuild.refill, value, content))

    def _write_hooks(self) -> None:
        """Write the `__init_subclass__` methods once all classes exist: earlier they would run for unfilled ones."""
        self._soon.extend(self._hooks)
        self._hooks.clear()
        self._write_steps()

    def _refuse(self, step: Step, error: Exception) -> None:
        """Raise for a value that can't be sent. If it isn't required, record the reason instead."""
        if isinstance(error, EncodeError) or (step.is_required and not step.where):
            raise error
        path, culprit, error = find_unencodable(step.value, error, lambda part: Trial().dump(part))
        holds = f"holds at {path} a" if path else "is a"
        text = (
            f"{holds} {type_name(culprit)}, which can't be sent to another process ({type(error).__name__}: {error}). "
            f"{_REMEDY}"
        )
        if step.is_required:
            raise EncodeError(f"{step.where} {text}") from error
        if step.note_missing is not None:
            step.note_missing(text)

    def _write_soon(self) -> None:
        while self._soon:
            call = self._soon.popleft()
            filled, what = call.reduced[1][:2]
            self._dump_as(f"the global variable {what!r}" if isinstance(filled, _Space) else _name_of(filled), call)
        if (len(self._packages), len(self._names)) == self._num_seen:
            return
        self._num_seen = len(self._packages), len(self._names)
        used: list[str] = []
        for package, inner in self._packages.items():
            found = [name for parts, name in inner if parts <= self._names]
            used.extend(found)
            self._packages[package] = [(parts, name) for parts, name in inner if name not in found]
        if used:
            self._dump_call(_Call(rebuild.import_modules, used))

    def _dump_as(self, name: str, part: object) -> None:
        """Write code.

        Raises:
            EncodeError: It can't be sent; the message begins with `name`.
        """
        self._kept.append(part)
        try:
            self.dump(part)
        except (EncodeError, CodeNeeded):
            raise
        except Exception as error:
            text = f"{name} can't be sent to another process ({type(error).__name__}: {error}). {_REMEDY}"
            raise EncodeError(text) from error

    def _dump_call(self, call: _Call) -> None:
        self._kept.append(call)
        self.dump(call)


def _is_made(module_name: str) -> bool:
    return not can_be_found(module_name.partition(".")[0])


def _variables_beside(thing: Any) -> dict[str, Any] | None:
    """Return the globals of the module of a class or function, if that module can't be imported; else None."""
    name = thing.__module__
    if name in MAIN_MODULES:
        return vars(sys.modules["__main__"])
    return vars(sys.modules[name]) if name in sys.modules and _is_made(name) else None


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


def _name_of(thing: Any) -> str:
    if isinstance(thing, types.CellType):
        return "a variable of a function"
    return f"the {'class' if isinstance(thing, type) else 'function'} {thing.__qualname__}"


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
