"""Code by value: classes and functions that can't be imported, and the variables that they use.

`Walk` finds them, without sending anything. `CodeEncoder` then sends a package: each class and function empty; then
what runs no code of the script, so that all of them are complete; then the values, each after what its own code needs;
at last the content. So an instance is rebuilt when its class can do it, cycles need no special care, and no code that
created a class runs a second time: no metaclass or `__init_subclass__` of the script, no `__set_name__`, no decorator.

All functions of the script share one set of globals, with the variables that they use. A variable that is used and
can't be sent is an error. An unused variable that can't be sent is none.
"""

from __future__ import annotations

import dis
import io
import pickle
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import cloudpickle
import numpy as np

from swift_loader.batch.tree import find_unencodable, type_name
from swift_loader.errors import EncodeError
from swift_loader.transport import by_value
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import MAIN_MODULES, Definitions, can_be_found, travels_by_value
from swift_loader.transport.encoder import CodeNeeded, Encoder, can_reduce_tensor
from swift_loader.transport.reducers import reduce_special, reducers

_REMEDY = (
    "Create it where it is used, so that each process has its own, or move the code into a module that can be "
    "imported. SwiftLoader's dataset_class= creates it in its own processes, in the dataset's constructor. "
    'start_method="fork" (DataLoader: multiprocessing_context="fork") sends nothing'
)
"""What to do about a value that can't be sent."""

# Which names code uses ------------------------------------------------------------------------------------------------

_GLOBAL_OPERATIONS = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"}
)
_USERS_OF_ALL = frozenset({"globals", "eval", "exec"})
_BASICS = ("__name__", "__package__", "__file__", "__path__")
_OF_THE_MODULE = {*_BASICS, "__builtins__", "__loader__", "__spec__", "__cached__", "__doc__", "__annotations__"}


def _used_globals(code: types.CodeType) -> tuple[dict[str, None], set[str], bool]:
    """Return the names that a function's code uses, including the functions and classes defined in it.

    They are the global variables; all names, also of attributes; and whether the code may look up any global variable.
    """
    variables: dict[str, None] = {}
    names: set[str] = set()
    constants: set[str] = set()
    codes = [code]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
        constants.update(constant for constant in code.co_consts if isinstance(constant, str))
        operations = dis.get_instructions(code)
        variables.update((one.argval, None) for one in operations if one.opname in _GLOBAL_OPERATIONS)
    by_module = "modules" in names and ("__name__" in variables or "__main__" in constants)
    return variables, names, by_module or "__main__" in names or not _USERS_OF_ALL.isdisjoint(variables)


def _names_in_hints(hints: Iterable[object]) -> list[str]:
    """Return the globals that string type hints use. `from __future__ import annotations` makes all hints strings."""
    found: list[str] = []
    for hint in hints:
        if isinstance(hint, str):
            try:
                found.extend(_used_globals(compile(hint, "<hint>", "eval"))[0])
            except (SyntaxError, ValueError):  # a string that isn't an expression
                continue
    return found


# What is found --------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Space:
    """A set of globals that some functions share. Pickled as what returns the receiver's dict."""

    variables: dict[str, Any]
    kind: by_value.SpaceKind
    asked: dict[str, _Setting] = field(default_factory=dict)

    def __reduce__(self) -> Any:
        basics = {name: self.variables[name] for name in _BASICS if name in self.variables}
        return by_value.new_namespace, (self.variables.get("__name__", ""), basics, self.kind)


@dataclass(eq=False, slots=True)
class _Setting:
    """A value, and the call that sets it: a variable, an attribute, or what a closure's cell holds. Pickled as it."""

    call: Any
    args: tuple[Any, ...]
    value: object
    where: str = ""
    """Names the value in the error message if it can't be sent; empty for the content, whose error the caller words."""
    is_required: bool = True
    """False: leave the value out if it can't be sent."""
    why_missing: str = ""
    """Why it is left out."""
    runs_code: bool = False
    """Whether rebuilding the value may run the script's code, instead of only making containers and functions."""

    def __reduce__(self) -> Any:
        return self.call, (*self.args, self.value)


_CONTAINERS = (dict, list, set, OrderedDict, WeakValueDictionary, WeakKeyDictionary)


def _stand_in(setting: _Setting) -> _Setting | None:
    """Return what sets a stand-in until a value can be set: an empty container, or None as in a class that creates its
    only instance later. None if the value can have no stand-in.
    """
    target, name = setting.args if len(setting.args) > 1 else (None, "__")
    if (name[:1] == name[-1:] == "_") or (isinstance(target, _Space) and target.kind is by_value.SpaceKind.MODULE):
        return None  # None has a meaning there; a module's own values are never replaced
    value: Any = setting.value
    kind = type(value)
    empty: Any = kind() if kind in _CONTAINERS else defaultdict(value.default_factory) if kind is defaultdict else None
    stand_in = _Setting(setting.call, setting.args, empty)
    if isinstance(target, _Space):
        setting.call = dict.__setitem__  # whatever the variable holds: it may hold the stand-in
    return stand_in


_RUNS_NOTHING = (types.FunctionType, types.BuiltinFunctionType, type, classmethod, staticmethod, property)


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: bytes) -> int:
        """Return how much would have been written."""
        return len(data)


class Finder(pickle.Pickler):
    """Pickles an object and discards the result. Raises if it can't be sent, and finds the code that it needs."""

    def __init__(self, definitions: Definitions | None = None) -> None:
        super().__init__(_Nowhere(), protocol=5, buffer_callback=lambda _: False)
        self.dispatch_table = reducers()
        self._definitions = Definitions() if definitions is None else definitions
        self.found: list[Any] = []
        """Classes and functions that must be sent by value, cells of closures, and modules."""
        self.runs_code = False

    def reducer_override(self, obj: Any) -> Any:  # noqa: D102 - pickle's
        kind = type(obj)
        if kind is types.CellType or (isinstance(obj, types.ModuleType) and _module_name(obj) is not None):
            self.found.append(obj)
            return id, ()
        special = reduce_special(obj, kind, self._definitions)
        if special is None and isinstance(obj, (types.FunctionType, type)) and travels_by_value(obj):
            if self._definitions.number_of(obj) is None:
                self.found.append(obj)
            return id, ()
        if kind is np.ndarray and not obj.dtype.hasobject:
            return id, ()
        torch = sys.modules.get("torch")
        if torch is not None and kind is torch.Tensor and can_reduce_tensor(obj) and not obj.__dict__:
            return id, ()
        self.runs_code |= not isinstance(obj, _RUNS_NOTHING)
        return NotImplemented if special is None else special


def _module_name(module: types.ModuleType) -> str | None:
    """Return the name by which a module is in `sys.modules`; None if it isn't there."""
    if sys.modules.get(module.__name__) is module:
        return module.__name__
    return next((name for name, known in list(sys.modules.items()) if known is module), None)


_MADE_WITH_THE_CLASS = frozenset({"__module__", "__qualname__", "__slots__", "__orig_bases__"})
_NOT_SENT = frozenset({"__dict__", "__weakref__", "__annotate__", "__annotate_func__"})
_LEAVES = (type(None), bool, int, float, complex, str, bytes)


class Walk:
    """What must be sent with some content, and what of it needs what."""

    def __init__(self, content: object, definitions: Definitions, *, has_run_script: bool) -> None:
        """Walk. `definitions` are those that the receiver knows.

        Raises `EncodeError` if a variable or an attribute can't be sent; another error if the content can't be.
        """
        self._definitions = definitions
        self.has_run_script = has_run_script
        self.spaces: dict[int | str, _Space] = {}
        self.things: list[Any] = []
        """The classes and functions that are sent, in order."""
        self._known: dict[int, Any] = {}
        self._needs: dict[int, list[Any]] = {}
        """By the address of a setting or of what was found: what it isn't complete without."""
        self._packages: list[str] = []
        self._names: set[str] = set()
        """All names in the code, which may be those of submodules."""
        self._found: list[_Setting] = []
        self._content = _Setting(None, (), content)
        self._look_into(self._content)
        for setting in self._found:  # which grows
            self._look_into(setting)

    def settings(self) -> list[_Setting]:
        """Return the values in the order in which they can be set."""
        first = [setting for setting in self._found if not setting.runs_code and not setting.why_missing]
        last: list[_Setting] = []
        stand_ins: dict[int, _Setting] = {}
        path, seen, done = [(self._content, self._needed_by(self._content))], {id(self._content)}, set()
        while path:
            setting, needed = path[-1]
            following = next((other for other in needed if id(other) not in seen), None)
            if following is not None:
                seen.add(id(following))
                path.append((following, self._needed_by(following)))
                continue
            path.pop()
            # Others that are on the path form a cycle: the code that rebuilds this value already looks them up.
            stand_ins.update((id(other), other) for other in needed if id(other) not in done)
            done.add(id(setting))
            last.append(setting)
        return [*first, *filter(None, map(_stand_in, stand_ins.values())), *last[:-1]]

    def _needed_by(self, setting: _Setting) -> list[_Setting]:
        """Return the values that must be set before this one is rebuilt, if rebuilding those may run code."""
        needed: list[_Setting] = []
        queue = deque(self._needs.get(id(setting), ()))
        seen = set(map(id, queue))
        while queue:
            node = queue.popleft()
            if isinstance(node, _Setting) and node.runs_code:
                needed.append(node)
                continue
            following = [need for need in self._needs.get(id(node), ()) if id(need) not in seen]
            seen.update(map(id, following))
            queue.extend(following)
        return needed

    def submodules(self) -> list[str]:
        """Return the submodules that code may use as attributes of their packages, without importing them by name."""
        modules = list(sys.modules)
        inner = ((package, name) for package in self._packages for name in modules if name.startswith(package))
        return [name for package, name in inner if self._names.issuperset(name[len(package) :].split("."))]

    def is_filled(self, found: object) -> bool:
        """Return whether a class, function or cell is filled after it has been created."""
        return id(found) in self._known

    def _look_into(self, setting: _Setting) -> None:
        if type(setting.value) in _LEAVES:
            return
        finder = Finder(self._definitions)
        try:
            finder.dump(setting.value)
        except Exception as error:
            if setting is self._content:
                raise
            self._refuse(setting, error)
            return
        setting.runs_code = finder.runs_code
        self._needs[id(setting)] = finder.found
        for found in finder.found:
            self._add(found)

    def _refuse(self, setting: _Setting, error: Exception) -> None:
        """Raise for a value that can't be sent. If it isn't required, record the reason instead."""
        path, culprit, error = find_unencodable(setting.value, error, lambda part: Finder().dump(part))
        holds = f"holds at {path} a" if path else "is a"
        setting.why_missing = (
            f"{holds} {type_name(culprit)}, which can't be sent to another process ({type(error).__name__}: {error})"
        )
        if setting.is_required:
            raise EncodeError(f"{setting.where} {setting.why_missing}", _REMEDY) from error

    def _add(self, found: Any, where: str = "a variable of a function") -> None:
        if id(found) in self._known:
            return
        self._known[id(found)] = found
        self._needs[id(found)] = []
        if isinstance(found, types.CellType):
            with suppress(ValueError):  # it is empty
                self._set(found, by_value.fill_cell, (found,), found.cell_contents, where)
        elif isinstance(found, types.ModuleType):
            self._add_module(found)
        else:
            self.things.append(found)
            beside = _variables_beside(found)
            name, _, inner = found.__qualname__.partition(".")
            is_nested = isinstance(found, type) and inner and "<locals>" not in inner
            if beside.get(name) is found or is_nested:  # for code that looks it up in the module, as pickle does
                self._use(beside, name, found)
            (self._add_class if isinstance(found, type) else self._add_function)(found)

    def _set(
        self, owner: Any, call: Any, args: tuple[Any, ...], value: object, where: str = "", *, required: bool = True
    ) -> _Setting:
        """Have a value set before `owner` counts as complete."""
        setting = _Setting(call, args, value, where, required)
        self._needs[id(owner)].append(setting)
        self._found.append(setting)
        return setting

    def _use(self, variables: dict[str, Any], name: str, owner: Any, where: str = "") -> None:
        """Send a global variable, if there is one. Without `where`, leave it out if it can't be sent."""
        if name not in variables:
            return
        space = self.space_of(variables)
        setting = space.asked.get(name)
        if setting is None:
            args = (space, name)
            value = variables[name]
            space.asked[name] = self._set(owner, dict.setdefault, args, value, where, required=bool(where))
            return
        self._needs[id(owner)].append(setting)
        if where and setting.why_missing:
            raise EncodeError(f"{where} {setting.why_missing}", _REMEDY)
        if where and not setting.is_required:
            setting.is_required, setting.where = True, where

    def _use_all(self, variables: dict[str, Any], owner: Any) -> None:
        """Send all variables that can be sent: code may look up any of them by name."""
        for name in [name for name in variables if name not in _OF_THE_MODULE]:
            self._use(variables, name, owner)

    def space_of(self, variables: dict[str, Any]) -> _Space:
        """Return the set that a dict of globals belongs to. The script's are one set, whatever dict holds them."""
        name = str(variables.get("__name__", ""))
        main = vars(sys.modules["__main__"])
        # In a process that multiprocessing spawned, the script's functions use a copy of the module's variables.
        is_script = variables is main or (name == "__mp_main__" and main.get("__name__") == name)
        kind = by_value.SpaceKind.OWN
        if is_script:
            kind = by_value.SpaceKind.OWN if self.has_run_script else by_value.SpaceKind.SCRIPT
        elif vars(sys.modules.get(name, object)) is variables:
            kind = by_value.SpaceKind.MADE if not can_be_found(name) else by_value.SpaceKind.MODULE
        return self.spaces.setdefault(name if is_script else id(variables), _Space(variables, kind))

    def _add_module(self, module: types.ModuleType) -> None:
        name = _module_name(module)
        assert name is not None
        if name in MAIN_MODULES or not can_be_found(name):
            self.space_of(vars(module))
            self._use_all(vars(module), module)
        elif hasattr(module, "__path__"):
            self._packages.append(f"{name}.")

    def _add_function(self, function: types.FunctionType) -> None:
        variables, user = function.__globals__, f"the function {function.__qualname__}"
        self.space_of(variables)
        used, names, is_all = _used_globals(function.__code__)
        self._names |= names
        for name in used:
            self._use(variables, name, function, f"the global variable {name!r}, which {user} uses,")
        if is_all and self.space_of(variables).kind is by_value.SpaceKind.SCRIPT:
            self._use_all(variables, function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._needs[id(function)].append(cell)
            self._add(cell, f"the variable {name!r}, which {user} uses,")
        given = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
        given = {**{name: value for name, value in given.items() if value}, **vars(function)}
        if given:
            self._set(function, by_value.fill_function, (function,), given, f"a default or an attribute of {user}")
        try:
            hints = function.__annotations__
        except Exception:  # Python 3.14 and later evaluate them here
            return
        for name in _names_in_hints(hints.values()):  # typing.get_type_hints looks them up
            self._use(variables, name, function)
        if hints:
            self._set(function, by_value.fill_function, (function,), {"__annotations__": hints}, required=False)

    def _add_class(self, cls: Any) -> None:
        for needed in (type(cls), *cls.__bases__):
            if travels_by_value(needed) and self._definitions.number_of(needed) is None:
                self._needs[id(cls)].append(needed)
                self._add(needed)
        hints = vars(cls).get("__annotations__")
        for name in _names_in_hints(hints.values()) if isinstance(hints, dict) else ():
            self._use(_variables_beside(cls), name, cls)
        for name, value in vars(cls).items():
            if name in _MADE_WITH_THE_CLASS or name in _NOT_SENT or _is_made_with_the_class(value, cls):
                continue
            if name == "_abc_impl":
                import abc

                known = [one for ref in abc._get_dump(cls)[0] if (one := ref()) is not None]  # type: ignore[attr-defined]  # noqa: SLF001
                self._set(cls, by_value.register_all, (cls,), known, required=False)
                continue
            is_dunder = name.startswith("__") and name.endswith("__")
            where = f"the attribute {name!r} of the class {cls.__qualname__}"
            self._set(cls, by_value.set_attribute, (cls, name), value, where, required=not is_dunder)


def _variables_beside(thing: Any) -> dict[str, Any]:
    """Return the globals of the module of a class or function, if that module can't be imported; else none."""
    name = thing.__module__
    if name in MAIN_MODULES:
        return vars(sys.modules["__main__"])
    return vars(sys.modules[name]) if name in sys.modules and not can_be_found(name) else {}


def _is_made_with_the_class(value: object, cls: type) -> bool:
    if type(value).__name__ == "CField":  # of a ctypes structure
        return True
    kinds = (types.MemberDescriptorType, types.GetSetDescriptorType)
    return isinstance(value, kinds) and value.__objclass__ is cls


# What is sent ---------------------------------------------------------------------------------------------------------


class CodeEncoder(Encoder, cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """An encoder that also serialises code, locks and other objects that scripts hold."""

    dispatch_table = reducers()

    def __init__(self, stream: io.BytesIO, arena: Arena, definitions: Definitions, walk: Walk | None) -> None:
        """`walk`: that of the content; None: raise `CodeNeeded` if code would have to be sent."""
        super().__init__(stream, arena, definitions)
        self._walk = walk

    def dump_package(self, content: object, walk: Walk) -> None:
        """Write the content and all that it needs, so that it comes last."""
        settings = walk.settings()
        imports = _Setting(by_value.import_modules, (), walk.submodules())
        parts = [content, *(setting.value for setting in settings)]
        self.dump([list(walk.spaces.values()), walk.things, imports, settings, content], parts)

    def reducer_override(self, obj: Any) -> Any:  # noqa: D102 - pickle's
        kind = type(obj)
        if kind is types.CellType:
            is_empty = self._walk is not None and self._walk.is_filled(obj)
            return types.CellType, () if is_empty else (obj.cell_contents,)
        if kind is types.ModuleType or isinstance(obj, types.ModuleType):
            return self._reduce_module(obj)
        if isinstance(obj, np.memmap) and self._walk is not None and self._walk.has_run_script:
            return NotImplemented  # in a batch it may be written to; the file must not be
        special = reduce_special(obj, kind, self._definitions)
        return super().reducer_override(obj) if special is None else special

    def _reduce_module(self, module: types.ModuleType) -> Any:
        name = _module_name(module)
        if name is None:  # made by the script
            return NotImplemented
        if name not in MAIN_MODULES and can_be_found(name):
            return import_module, (name.encode().decode(),)  # a new string, which pickle writes out: see `modules_of`
        if self._walk is None:
            raise CodeNeeded
        return (import_module if name in MAIN_MODULES else by_value.new_module), (name,)

    def _reduce_code(self, thing: Any) -> Any:
        walk = self._walk
        if walk is None:
            raise CodeNeeded
        if not walk.is_filled(thing):  # a reducer has made it just now
            return cloudpickle.Pickler.reducer_override(self, thing)
        if isinstance(thing, type):
            basics = {name: value for name, value in vars(thing).items() if name in _MADE_WITH_THE_CLASS}
            basics.setdefault("__qualname__", thing.__qualname__)
            is_abstract = "_abc_impl" in vars(thing)
            return by_value.new_class, (type(thing), thing.__name__, thing.__bases__, basics, is_abstract)
        space = walk.space_of(thing.__globals__)
        names = (thing.__name__, thing.__qualname__, thing.__module__)
        return by_value.new_function, (thing.__code__, space, names, thing.__doc__, thing.__closure__)
