"""What the dataset holds: objects that can't be shared, containers of Python objects, random generators."""

from __future__ import annotations

import io
import mmap
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import numpy as np

from swift_loader.batch.tree import find_unencodable, type_name
from swift_loader.doctor.facts import Container, Growth, Holder, Unsendable
from swift_loader.doctor.probes.walk import CONTAINERS, evenly, walk
from swift_loader.transport.codec import try_out

__all__ = ["containers_of", "generators_of", "growths", "holders_of", "lengths_of", "unsendable_part"]

_MAX_HOLDERS = 8
_MAX_ERROR = 300
_LEAST_OBJECTS = 1000
"""Containers with fewer Python objects aren't worth a word."""
_MAX_DEPTH = 5

_BY_NAME = {
    ("h5py", "File"): "an open HDF5 file",
    ("h5py", "Dataset"): "a dataset of an open HDF5 file",
    ("h5py", "Group"): "a group of an open HDF5 file",
    ("sqlite3", "Connection"): "an open database",
    ("lmdb", "Environment"): "an open database",
    ("lmdb", "_Environment"): "an open database",
    ("zipfile", "ZipFile"): "an open archive",
    ("tarfile", "TarFile"): "an open archive",
    ("multiprocessing", "Pool"): "a pool of processes",
    ("multiprocessing", "SemLock"): "a lock of processes",
    ("multiprocessing", "Queue"): "a queue between processes",
    ("multiprocessing", "Connection"): "a pipe between processes",
}
"""(top-level module, class) -> what it is."""


def holders_of(dataset: object) -> tuple[Holder, ...]:
    """Return the objects that processes can't share, by path."""
    found = []
    for path, thing in walk(dataset):
        what = _what(thing)
        if what:
            found.append(Holder(path, type_name(thing), what))
    found = [one for one in found if not any(other is not one and _is_inside(one, other) for other in found)]
    return tuple(found[:_MAX_HOLDERS])


def _is_inside(one: Holder, other: Holder) -> bool:
    """Return whether a path begins with another one: a buffered file holds a raw one."""
    return one.path.startswith((f"{other.path}.", f"{other.path}["))


def _what(thing: Any) -> str:
    """Return what it is in words; empty if it can be shared."""
    if isinstance(thing, (io.BytesIO, io.StringIO)):
        return ""
    if isinstance(thing, io.IOBase):
        return "" if thing.closed or _is_standard(thing) else "an open file"
    if isinstance(thing, socket.socket):
        return "a socket" if thing.fileno() >= 0 else ""
    if isinstance(thing, threading.Thread):
        return "a running thread" if thing.is_alive() else ""
    if isinstance(thing, Executor):
        return "a pool of threads or processes"
    if isinstance(thing, subprocess.Popen):
        return "a running process"
    if isinstance(thing, mmap.mmap):
        return ""
    return next(
        (
            text
            for kind in type(thing).__mro__
            if (text := _BY_NAME.get((kind.__module__.split(".")[0], kind.__name__)))
        ),
        "",
    )


def _is_standard(file: io.IOBase) -> bool:
    """Return whether it is one of the standard streams, which processes share in any case."""
    if any(file is stream for stream in (sys.stdin, sys.stdout, sys.stderr)):
        return True
    try:
        return file.fileno() in range(3)
    except (OSError, ValueError):
        return False


def unsendable_part(dataset: object) -> Unsendable | None:
    """Return the innermost part of the dataset that can't be serialised; None if it can be."""
    try:
        try_out(dataset)
    except Exception as error:
        path, part, reason = find_unencodable(dataset, error, try_out)
        return Unsendable(path, type_name(part), f"{type(reason).__name__}: {reason}"[:_MAX_ERROR])
    return None


def generators_of(dataset: object) -> dict[str, Any]:
    """Return the random generators that the dataset or its module holds, by a name for people."""
    torch = sys.modules.get("torch")
    kinds: tuple[type, ...] = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
    kinds = kinds if torch is None else (*kinds, torch.Generator)
    shared = {id(np.random.mtrand._rand), id(random._inst)}  # noqa: SLF001 - the global ones
    if torch is not None:
        shared.add(id(torch.default_generator))
    found: dict[str, Any] = {}
    module = sys.modules.get(type(dataset).__module__)
    roots = [
        ("dataset", dataset),
        *((f"{getattr(module, '__name__', '')}.{name}", value) for name, value in _values(module)),
    ]
    for name, root in roots:
        things = walk(root, name) if root is dataset else [(name, root)]
        for path, thing in things:
            known = shared | set(map(id, found.values()))
            if isinstance(thing, kinds) and not isinstance(thing, random.SystemRandom) and id(thing) not in known:
                found[f"{path} ({type_name(thing)})"] = thing
    return found


def _values(module: Any) -> list[tuple[str, Any]]:
    return [] if module is None else list(vars(module).items())


def containers_of(dataset: object) -> tuple[Container, ...]:
    """Return the outermost containers with many Python objects, the largest first."""
    found: list[Container] = []
    for path, thing in walk(dataset):
        if any(path.startswith((f"{one.path}.", f"{one.path}[", f"{one.path}{{")) for one in found):
            continue
        found += _as_containers(path, thing)
    return tuple(sorted(found, key=lambda one: -one.nbytes))


def _as_containers(path: str, thing: Any) -> Iterator[Container]:
    if isinstance(thing, CONTAINERS) and len(thing) >= _LEAST_OBJECTS:
        num_objects, nbytes = _estimate(thing, 0)
        yield Container(path, type_name(thing), round(num_objects) - 1, round(nbytes))
    elif isinstance(thing, np.ndarray) and thing.dtype.hasobject and thing.size >= _LEAST_OBJECTS:
        num_objects, nbytes = _estimate(thing.ravel().tolist() if thing.dtype == object else list(thing.ravel()), 0)
        yield Container(path, f"numpy.ndarray of dtype {thing.dtype}", round(num_objects) - 1, round(nbytes))
    elif type(thing).__module__.startswith("pandas") and hasattr(thing, "dtypes"):
        yield from _columns(path, thing)


def _columns(path: str, frame: Any) -> Iterator[Container]:
    """Yield the columns of a pandas frame or series that hold Python objects."""
    columns = frame.items() if type(frame).__name__ == "DataFrame" else [(None, frame)]
    for name, column in columns:
        if str(getattr(column, "dtype", "")) == "object" and len(column) >= _LEAST_OBJECTS:
            num_objects, nbytes = _estimate(column.tolist(), 0)
            step = "" if name is None else f"[{name!r}]"
            yield Container(f"{path}{step}", "pandas column of dtype object", round(num_objects) - 1, round(nbytes))


def _estimate(thing: Any, depth: int) -> tuple[float, float]:
    """Return the number and bytes of an object and the Python objects in it, estimated from some items."""
    own = float(sys.getsizeof(thing)) if not isinstance(thing, np.ndarray) else 0.0
    if depth > _MAX_DEPTH or not isinstance(thing, CONTAINERS) or not thing:
        return 1, own
    num_items = len(thing)
    chosen = evenly(thing, num_items)
    if isinstance(thing, dict):
        chosen += evenly(thing.values(), num_items)
        num_items *= 2
    distinct = {id(item) for item in chosen}
    parts = [_estimate(item, depth + 1) for item in chosen]
    shared = len(distinct) / len(chosen)  # the same object again takes no more
    factor = num_items / len(chosen) * shared
    return 1 + factor * sum(part[0] for part in parts), own + factor * sum(part[1] for part in parts)


def lengths_of(dataset: object) -> dict[str, tuple[str, int]]:
    """Return the lengths of all containers that can grow: path -> (type, length)."""
    growing = (list, dict, set)
    return {path: (type_name(thing), len(thing)) for path, thing in walk(dataset) if isinstance(thing, growing)}


def growths(before: dict[str, tuple[str, int]], after: dict[str, tuple[str, int]]) -> tuple[Growth, ...]:
    """Return the containers that became longer."""
    return tuple(
        Growth(path, kind, before[path][1], length)
        for path, (kind, length) in after.items()
        if path in before and length > before[path][1]
    )
