"""What the dataset holds: containers of Python objects, random generators.

Forked workers share the pages of the dataset until they write to them. Reading a Python object writes: it counts the
reference in the object's header. So each worker ends with its own copy of all Python objects that it has read. The data
of arrays isn't affected.
"""

from __future__ import annotations

import functools
import io
import logging
import random
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from swift_loader.batch.tree import type_name
from swift_loader.doctor.examination import Diagnosis, quoted
from swift_loader.errors import nbytes_text

Held = list[tuple[str, Any]]
"""All that `walk` yields of the dataset."""

_LARGE_NBYTES = 16 << 20
"""Containers from this size on are reported. A worker takes about 10 times as much anyway."""
_LEAST_OBJECTS = 1000
"""Containers with fewer Python objects aren't worth a look."""
_MAX_NESTING = 5

_GROWS_SHARE = 0.5
"""A container that gets so many items per sample grows with the samples."""

# What grows in workers ------------------------------------------------------------------------------------------------


def judge_containers(held: Held, num_workers: int, diagnosis: Diagnosis) -> None:
    """Find containers with many Python objects, the largest first."""
    found: list[tuple[float, float, str, str]] = []
    for path, thing in held:
        inside = tuple(f"{one[2]}{step}" for one in found for step in ".[{")
        if not path.startswith(inside):  # else it is counted with what holds it
            found += ((*_size_of(items), where, kind) for where, kind, items in _objects_of(path, thing))
    large = sorted((one for one in found if one[0] >= _LARGE_NBYTES), reverse=True)
    for nbytes, num_objects, path, kind in large:
        size, in_all = nbytes_text(nbytes), nbytes_text(nbytes * num_workers)
        diagnosis.warning(
            "memory",
            f"dataset{path} will be copied into each worker, because reading a Python object changes its reference "
            f"count.",
            f"a {kind} of {num_objects - 1:,.0f} Python objects, about {size}: {in_all} in {num_workers} workers",
            "Keep it as a NumPy array, a pyarrow array, or one bytes object with an array of offsets: workers share "
            "these.",
        )
    if not large:
        total = nbytes_text(sum(one[0] for one in found))
        diagnosis.healthy.append(f"it holds {total} of Python objects, so workers stay small")


def _objects_of(path: str, thing: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (path, kind, container) if it has many Python objects; for a table of pandas, for each such column."""
    if isinstance(thing, _CONTAINERS) and len(thing) >= _LEAST_OBJECTS:
        yield path, type_name(thing), thing
    elif isinstance(thing, np.ndarray) and thing.dtype.hasobject and thing.size >= _LEAST_OBJECTS:
        yield path, f"numpy.ndarray of dtype {thing.dtype}", thing.ravel().tolist()
    elif type(thing).__module__.startswith("pandas") and hasattr(thing, "dtypes"):
        is_table = type(thing).__name__ == "DataFrame"
        for name, column in thing.items() if is_table else [("", thing)]:
            if str(getattr(column, "dtype", "")) == "object" and len(column) >= _LEAST_OBJECTS:
                where = f"{path}[{name!r}]" if is_table else path
                yield where, "pandas column of dtype object", column.tolist()


def _size_of(thing: Any, depth: int = 0) -> tuple[float, float]:
    """Return the bytes and the number of the Python objects in a container and itself, estimated from some of them."""
    own = float(sys.getsizeof(thing)) if not isinstance(thing, np.ndarray) else 0.0
    if depth > _MAX_NESTING or not isinstance(thing, _CONTAINERS) or not thing:
        return own, 1
    num_items = len(thing)
    chosen = _evenly(thing, num_items)
    if isinstance(thing, dict):
        chosen += _evenly(thing.values(), num_items)
        num_items *= 2
    parts = [_size_of(item, depth + 1) for item in chosen]
    shared = len({id(item) for item in chosen}) / len(chosen)  # the same object again takes no more
    factor = num_items / len(chosen) * shared
    return own + factor * sum(part[0] for part in parts), 1 + factor * sum(part[1] for part in parts)


def lengths_of(held: Held) -> dict[str, tuple[str, int]]:
    """Return the lengths of all containers that can grow: path -> (type, length)."""
    return {path: (type_name(thing), len(thing)) for path, thing in held if isinstance(thing, (list, dict, set))}


def judge_growth(before: dict[str, tuple[str, int]], held: Held, num_samples: int, diagnosis: Diagnosis) -> None:
    """Find containers that became longer while so many samples were fetched."""
    least = max(2, _GROWS_SHARE * num_samples)
    grown = [
        f"dataset{path} ({kind}) from {before[path][1]:,} to {length:,} items"
        for path, (kind, length) in lengths_of(held).items()
        if path in before and length - before[path][1] >= least
    ]
    if grown:
        diagnosis.warning(
            "memory",
            "The dataset grows with each sample, in each worker separately.",
            f"{quoted(grown)}, over {num_samples:,} samples",
            "Bound the cache (functools.lru_cache with maxsize), or fill it once in the constructor, before workers "
            "fork.",
        )


def generators_of(dataset: object) -> dict[str, Any]:
    """Return the random generators that the dataset or its module holds, by a name for people."""
    torch = sys.modules.get("torch")
    kinds: tuple[type, ...] = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
    known = {id(np.random.mtrand._rand), id(random._inst)}  # noqa: SLF001 - the global ones, which the loader seeds
    if torch is not None:
        kinds = (*kinds, torch.Generator)
        known.add(id(torch.default_generator))
    module = type(dataset).__module__
    of_module = [
        (f"{module}.{name}", value) for name, value in getattr(sys.modules.get(module), "__dict__", {}).items()
    ]
    found: dict[str, Any] = {}
    for path, thing in (*walk(dataset, "dataset"), *of_module):
        if isinstance(thing, kinds) and not isinstance(thing, random.SystemRandom) and id(thing) not in known:
            found[f"{path} ({type_name(thing)})"] = thing
            known.add(id(thing))
    return found


# What an object holds -------------------------------------------------------------------------------------------------

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)

_MAX_OBJECTS = 20_000
_MAX_DEPTH = 12

_MANY = 256
"""Of longer containers, only so many items are looked at, evenly spread."""

_ATOMS = (str, bytes, bytearray, int, float, complex, type(None), type, ModuleType)
_NOTHING_INSIDE = (np.ndarray, np.generic, io.IOBase, threading.Thread, logging.Logger, BuiltinFunctionType)
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
            to_see.extend((path + step, part, depth + 1) for step, part in _held_by(thing))


def _held_by(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield (step, part) for items, attributes, slots, and the variables of functions. Of many items, only some."""
    if isinstance(thing, Mapping) and type(thing).__module__ != "os":
        yield from ((f"[{key!r}]", value) for key, value in _evenly(thing.items(), len(thing)))
    elif isinstance(thing, (list, tuple, deque)):
        yield from ((f"[{number}]", item) for number, item in _evenly(enumerate(thing), len(thing)))
    elif isinstance(thing, (set, frozenset)):
        yield from (("{...}", item) for item in _evenly(thing, len(thing)))
    elif isinstance(thing, MethodType):
        yield ".__self__", thing.__self__
    elif isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif isinstance(thing, FunctionType):
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False):
            with suppress(ValueError):  # it is empty
                yield f".<{name}>", cell.cell_contents
        yield from ((f".<default {number}>", value) for number, value in enumerate(thing.__defaults__ or ()))
        return
    if type(thing).__module__.partition(".")[0] not in {"pandas", "pyarrow"}:  # tables are looked at by column
        slots = [vars(kind).get("__slots__", ()) for kind in type(thing).__mro__]
        names = [name for one in slots for name in ([one] if isinstance(one, str) else one)]
        attributes = {name: getattr(thing, name, None) for name in names} | getattr(thing, "__dict__", {})
        yield from [(f".{name}", part) for name, part in attributes.items()]


def _evenly(items: Iterable[Any], length: int) -> list[Any]:
    """Return some of the items, evenly spread; all of them if there are few. Copies no others."""
    return list(islice(items, 0, None, -(-length // _MANY) or 1))
