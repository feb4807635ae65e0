"""What an object holds, with paths: items, attributes, slots, and the variables of its functions."""

from __future__ import annotations

import functools
import io
import logging
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

__all__ = ["CONTAINERS", "evenly", "held_by", "walk"]

CONTAINERS = (list, tuple, dict, set, frozenset, deque)

_MAX_OBJECTS = 20_000
_MAX_DEPTH = 12

_MANY = 256
"""Of longer containers, only so many items are looked at, evenly spread."""

_ATOMS = (str, bytes, bytearray, int, float, complex, type(None), type, ModuleType)
_NOTHING_INSIDE = (np.ndarray, np.generic, io.IOBase, threading.Thread, logging.Logger)
"""What these hold is their own business, or, for a logger, that of the whole process."""


def walk(root: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, object) for `root` and what it holds, each object once, nearest first."""
    seen: dict[int, object] = {}  # keeps them alive, so that ids stay unique
    to_see: deque[tuple[str, Any, int]] = deque([(path, root, 0)])
    while to_see and len(seen) < _MAX_OBJECTS:
        path, thing, depth = to_see.popleft()
        if id(thing) in seen or isinstance(thing, _ATOMS):
            continue
        seen[id(thing)] = thing
        yield path, thing
        if depth < _MAX_DEPTH and not isinstance(thing, _NOTHING_INSIDE):
            to_see.extend((path + step, part, depth + 1) for step, part in held_by(thing))


def held_by(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield (step, part) for what an object holds. Of a long container, only some items."""
    if isinstance(thing, (dict, Mapping)) and type(thing).__module__ != "os":
        yield from ((f"[{key!r}]", value) for key, value in evenly(thing.items(), len(thing)))
    elif isinstance(thing, (list, tuple, deque)):
        yield from ((f"[{number}]", item) for number, item in evenly(enumerate(thing), len(thing)))
    elif isinstance(thing, (set, frozenset)):
        yield from (("{...}", item) for item in evenly(thing, len(thing)))
    elif isinstance(thing, FunctionType):
        yield from _variables_of(thing)
    elif isinstance(thing, MethodType):
        yield ".__self__", thing.__self__
    elif isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    if not isinstance(thing, (FunctionType, BuiltinFunctionType)) and not _is_frame(thing):
        yield from _attributes_of(thing)


def evenly(items: Iterable[Any], length: int) -> list[Any]:
    """Return some of the items, evenly spread; all of them if there are few. Copies no others."""
    return list(islice(items, 0, None, -(-length // _MANY) or 1))


def _attributes_of(thing: Any) -> Iterator[tuple[str, Any]]:
    attributes = getattr(thing, "__dict__", None)
    if isinstance(attributes, dict):
        yield from [(f".{name}", part) for name, part in attributes.items()]
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            part = getattr(thing, name, None)
            if part is not None:
                yield f".{name}", part


def _variables_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function keeps in its closure and its defaults."""
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=False):
        try:
            yield f".<{name}>", cell.cell_contents
        except ValueError:  # it is empty
            continue
    yield from ((f".<default {number}>", value) for number, value in enumerate(function.__defaults__ or ()))


def _is_frame(thing: Any) -> bool:
    """Return whether it is a table of pandas or pyarrow, which are looked at by column."""
    return type(thing).__module__.partition(".")[0] in {"pandas", "pyarrow"} and "pandas" in sys.modules
