"""The structure of a batch: what its containers hold, and how to make others like them. Pure.

The structure that collating and moving keep is that of list, tuple, namedtuple, Mapping and dataclass: `children`,
`steps`, `rebuilt`. To find a part, sets and the attributes of objects are looked into, too: `parts`, `search`.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

ATOMS = frozenset({str, bytes, int, float, complex, bool, type(None)})
"""Types of leaves that occur in long lists. A list of only these can be skipped at once."""

_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)

# Containers as structure ----------------------------------------------------------------------------------------------


def children(thing: Any) -> Collection[Any] | None:
    """Return what a list, tuple, Mapping or dataclass holds, in order; None for any other object, a leaf."""
    if isinstance(thing, (list, tuple)):
        return thing
    if issubclass(type(thing), Mapping):  # `isinstance` asks for __class__, which the `f` of np.load(npz) hasn't
        items: Collection[Any] = thing.values()
        return items
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    return None


def steps(thing: Any) -> Iterable[str]:
    """Return the path from a container to each of its children: `['x']`, `[3]` or `.name`."""
    if _is_namedtuple(thing):
        return (f".{name}" for name in thing._fields)
    if isinstance(thing, (list, tuple)):
        return (f"[{index}]" for index in range(len(thing)))
    if isinstance(thing, Mapping):
        return (f"[{key!r}]" for key in thing)
    return (f".{field.name}" for field in dataclasses.fields(thing))


def rebuilt(thing: Any, values: list[Any]) -> Any:
    """Return a container like `thing` with other children. It takes over the list.

    A mapping keeps its attributes, such as a default_factory. So does a dataclass.
    """
    if type(thing) is list:
        return values
    if _is_namedtuple(thing):
        return type(thing)(*values)
    if isinstance(thing, (list, tuple)):
        return type(thing)(values)
    if isinstance(thing, Mapping):
        return _refilled(thing, dict(zip(thing, values, strict=True)))
    result = copy.copy(thing)
    for field, value in zip(dataclasses.fields(thing), values, strict=True):
        object.__setattr__(result, field.name, value)  # it may be frozen
    return result


def _is_namedtuple(thing: Any) -> bool:
    return isinstance(thing, tuple) and hasattr(thing, "_fields")


def _refilled(mapping: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of the same type with these items."""
    if type(mapping) is dict:
        return items
    if isinstance(mapping, dict) or hasattr(type(mapping), "__copy__"):
        result = copy.copy(mapping)
    else:
        try:
            return type(mapping)(items)
        except TypeError:  # the type takes no dict: fill a copy, with its own containers instead of shared ones
            result = copy.copy(mapping)
            vars(result).update({name: copy.copy(value) for name, value in vars(mapping).items()})
    for key, value in items.items():
        result[key] = value
    return result


# Objects with paths ---------------------------------------------------------------------------------------------------


def type_name(thing: object) -> str:
    """Return the qualified name of an object's type."""
    kind = type(thing)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def parts(thing: Any) -> Iterator[tuple[str, object]]:
    """Yield (step, part) for each part of a container; a step is text such as `['x']`. Yield nothing for a leaf."""
    values = None if type(thing) in _EMPTY else children(thing)
    if values is not None:
        yield from zip(steps(thing), values, strict=True)
    elif isinstance(thing, (set, frozenset)):
        yield from (("{...}", part) for part in thing)
    elif type(thing) not in _EMPTY and not isinstance(thing, _CODE) and hasattr(thing, "__dict__"):
        yield from ((f".{name}", part) for name, part in vars(thing).items())


def find_unencodable(
    whole: object, error: Exception, attempt: Callable[[object], object]
) -> tuple[str, object, Exception]:
    """Return the innermost part of `whole` for which `attempt` raises: its path, the part itself, and the error."""
    path, culprit, seen = "", whole, {id(whole)}
    descended = True
    while descended:
        descended = False
        for step, part in parts(culprit):
            if id(part) in seen:  # a cycle, such as a child that refers to its parent
                continue
            seen.add(id(part))
            try:
                attempt(part)
            except Exception as part_error:
                if path and type(part_error) is not type(error):  # the part isn't what the whole failed for
                    continue
                path, culprit, error, descended = path + step, part, part_error, True
                break
    return path, culprit, error


# Everything that an object holds --------------------------------------------------------------------------------------

_COLLECTIONS = (list, tuple, set, frozenset, deque)

_PLAIN = (list, tuple, dict)
"""Types without attributes."""

_EMPTY = ATOMS | {np.ndarray, *weakref.ProxyTypes}
"""Types whose instances hold nothing of their own. It is quick, as no subclass is looked up here."""

_LEAVES = (str, bytes, bytearray, int, float, complex, np.ndarray, np.generic, *_CODE)
"""The same with subclasses."""


def search(whole: Any, is_wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the wanted objects that `whole` holds: as items or attributes, at any depth, each once.

    `is_wanted` isn't asked about numbers, text, arrays and code. What is wanted isn't searched further.
    """
    seen: dict[int, Any] = {}  # keep the objects alive, else another one may get the same id
    to_see = [whole]
    while to_see:
        thing = to_see.pop()
        # Not `isinstance`, which asks the object for its class. A proxy asks another object, which may be gone.
        if id(thing) in seen or issubclass(type(thing), _LEAVES):
            continue
        seen[id(thing)] = thing
        if is_wanted(thing):
            yield thing
        else:
            to_see += reversed(_held(thing))


def _held(thing: Any) -> list[Any]:
    """Return the items and attributes of an object that may hold something."""
    kind, held = type(thing), list[Any]()
    if kind in _PLAIN:
        items = thing.values() if kind is dict else thing
        return [] if _EMPTY.issuperset(map(type, items)) else [part for part in items if type(part) not in _EMPTY]
    slots = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    for name in ("__dict__", *chain.from_iterable([one] if isinstance(one, str) else one for one in slots)):
        with suppress(Exception):  # it isn't there; or the class has code of its own for that, which fails
            value = object.__getattribute__(thing, name)
            held += value.values() if name == "__dict__" else [value]
    with suppress(Exception):  # the same
        # A Mapping with attributes keeps its items there, or makes them, as `np.load` reads each from the file.
        if issubclass(kind, dict) or (issubclass(kind, Mapping) and not held):
            held += thing.values()
        elif issubclass(kind, _COLLECTIONS):
            held += thing
    return [part for part in held if type(part) not in _EMPTY]
