"""Notices that a dataset or a function was changed since the workers got their copies.

torch's workers are new in each epoch, so they have what the trainer's objects are then. Workers that stay must be
replaced when something has changed. A fingerprint looks at attributes, at any depth, up to a number of objects that
takes a few milliseconds. Of long lists and large arrays it looks at a sample, so a change inside one may go unnoticed.
An attribute that is set to another array or list is noticed.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

MAX_OBJECTS = 5000
"""How many objects are looked at. It takes 1 us each."""

MAX_SAMPLED = 256
"""How many elements of a container are looked at."""

MAX_BYTES = 1 << 19
"""How many bytes of arrays are looked at: whole arrays until then, and of the others 64 bytes in 16 places. It takes
0.5 ms."""

_NUM_PLACES = 16
_PLACE_NBYTES = 64

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Look(NamedTuple):
    """What was found."""

    fingerprint: int
    """Most likely another one after a change. Valid in this process only."""
    has_generator: bool
    """Whether a random generator was met. Its copies in the workers go on, which can't be seen here."""


def look_at(*things: Any) -> Look:
    """Return what these objects are now."""
    walk = _Walk()
    return Look(hash(tuple(walk.visit_all(things))), walk.has_generator)


def fingerprint(*things: Any) -> int:
    """Return the fingerprint of these objects."""
    return look_at(*things).fingerprint


class _Walk:
    """One look at the objects that are reached."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        """Number of each object by its id, in the order in which they were met."""
        self._bytes_left = MAX_BYTES
        self.has_generator = False

    def visit_all(self, things: Iterable[Any]) -> Iterator[int]:
        for thing in things:
            yield self.visit(thing)

    def visit(self, thing: Any) -> int:
        kind = type(thing)
        if kind in _PLAIN:
            return hash((kind, thing))
        known = self._seen.get(id(thing))
        if known is not None:
            return hash(("again", known))
        self._seen[id(thing)] = len(self._seen)
        if len(self._seen) > MAX_OBJECTS:
            return hash((kind, id(thing)))
        if kind is np.ndarray:  # has no attributes
            return hash((id(kind), self._array(thing)))
        return hash((id(kind), *self._content(thing)))

    def _content(self, thing: Any) -> Iterator[int]:
        torch = sys.modules.get("torch")
        if isinstance(thing, _GENERATORS) or (torch is not None and isinstance(thing, torch.Generator)):
            self.has_generator = True
        if isinstance(thing, np.ndarray):
            yield self._array(thing)
        elif torch is not None and isinstance(thing, torch.Tensor):
            yield _tensor(thing)
        elif isinstance(thing, (list, tuple)):
            yield len(thing)
            yield from self.visit_all(_sampled(thing))
        elif isinstance(thing, (set, frozenset)):
            yield len(thing)
            yield id(thing)
        elif isinstance(thing, dict):
            yield len(thing)
            for key, value in islice(thing.items(), MAX_SAMPLED):
                yield self.visit(key)
                yield self.visit(value)
        yield from self._attributes(thing)

    def _array(self, array: np.ndarray[Any, Any]) -> int:
        if array.dtype.hasobject:
            return hash((id(array), array.shape))
        return hash((array.ctypes.data, array.shape, array.strides, array.dtype.str, self._checksum(array)))

    def _checksum(self, array: np.ndarray[Any, Any]) -> int:
        if array.nbytes <= self._bytes_left:
            self._bytes_left -= array.nbytes
            return zlib.crc32(array.tobytes())
        if not array.flags.c_contiguous or array.nbytes < _NUM_PLACES * _PLACE_NBYTES:
            return 0
        flat = array.reshape(-1).view(np.uint8)
        distance = len(flat) // _NUM_PLACES
        return zlib.crc32(flat[: distance * _NUM_PLACES].reshape(_NUM_PLACES, distance)[:, :_PLACE_NBYTES].tobytes())

    def _attributes(self, thing: Any) -> Iterator[int]:
        if isinstance(thing, FunctionType):
            yield id(thing.__code__)
            yield from self.visit_all(cell.cell_contents for cell in thing.__closure__ or () if cell != CellType())
            return
        if isinstance(thing, partial):
            yield from self.visit_all((thing.func, thing.args, thing.keywords))
            return
        if isinstance(thing, (type, ModuleType)):
            yield id(thing)
            return
        attributes = getattr(thing, "__dict__", None)
        slots = [name for base in type(thing).__mro__ for name in getattr(base, "__slots__", ()) if name != "__dict__"]
        if attributes is None and not slots:
            yield 0 if isinstance(thing, (list, tuple, dict, np.ndarray)) else id(thing)
            return
        for name, value in (attributes or {}).items():
            yield hash(name)
            yield self.visit(value)
        for name in slots:
            yield self.visit(getattr(thing, name, None))


def _sampled(things: list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    """Return all elements, or evenly spaced ones."""
    return things if len(things) <= MAX_SAMPLED else things[:: -(-len(things) // MAX_SAMPLED)]


def _tensor(tensor: Any) -> int:
    version = None if tensor.is_inference() else tensor._version  # noqa: SLF001 - counts changes in place
    try:
        place: Any = (tensor.data_ptr(), tuple(tensor.shape))
    except RuntimeError:  # sparse, nested and the like
        place = id(tensor)
    return hash((place, str(tensor.dtype), version))
