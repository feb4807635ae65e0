"""The leaves of samples and batches, and their digests, to compare them byte by byte; and samples by value."""

from __future__ import annotations

import copyreg
import hashlib
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.batch.tree import ATOMS, children, steps

_ADDRESS = re.compile(r"0x[0-9a-f]{6,16}")
"""An address in the `repr` of an object, which differs each time."""

_MANY = 64
"""Longer lists of numbers or text are one leaf."""


def leaves_of(thing: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for each leaf, in order. An empty container is a leaf, and so is a long list of numbers."""
    inside = children(thing)
    is_long = isinstance(thing, (list, tuple)) and len(thing) > _MANY and ATOMS.issuperset(map(type, thing))
    if not inside or is_long:
        yield path, thing
        return
    for step, child in zip(steps(thing), inside, strict=True):
        yield from leaves_of(child, path + step)


def as_array(part: Any) -> NDArray[Any] | None:
    """Return an array or a tensor as an array; None for anything else, also for an array of Python objects."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(part, torch.Tensor):
        is_array = isinstance(part, (np.ndarray, np.generic)) and not part.dtype.hasobject
        return np.asarray(part) if is_array else None
    tensor = part.detach().cpu().resolve_conj().resolve_neg()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    try:
        return np.asarray(tensor.numpy())
    except TypeError:  # NumPy doesn't have the dtype, such as bfloat16
        return np.asarray(tensor.contiguous().reshape(*tensor.shape, 1).view(torch.uint8).numpy())


def digest_of(leaf: Any) -> bytes:
    """Return the digest of a leaf, 16 bytes; of an array or a tensor, that of its dtype, shape and bytes."""
    array = as_array(leaf)
    data = _to_bytes(leaf) if array is None else f"{array.dtype}{array.shape}".encode() + array.tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


def _to_bytes(leaf: Any) -> bytes:
    if isinstance(leaf, (set, frozenset)):
        return repr(sorted(map(repr, leaf))).encode()  # a set has no order
    if isinstance(leaf, (list, tuple)) and ATOMS.issuperset(map(type, leaf)):
        return repr(leaf).encode()  # pickle tells equal text from the same text
    try:
        return pickle.dumps(leaf)
    except Exception:  # the result of the user's code may not be picklable
        return _ADDRESS.sub("", repr(leaf)).encode()


# Samples by value -----------------------------------------------------------------------------------------------------

_MAX_SHOWN = 60
"""Characters shown of a value."""

Difference = tuple[str, str, str]
"""A path, and what each of two samples has there."""


def difference(one: Any, other: Any, path: str = "", seen: dict[Any, Any] | None = None) -> Difference | None:
    """Return the first leaf in which two samples differ by value; None if they are equal. NaN equals NaN.

    An object of any other class is compared by its type and by what its pickle is restored from. If that differs, its
    own `equals` or `==` decides. `seen`: the pairs that are being compared.
    """
    seen = {} if seen is None else seen
    if one is other or (id(one), id(other)) in seen:
        return None
    if type(one) is not type(other):
        return path, _shown(one), _shown(other)
    if isinstance(one, (str, bytes, bytearray, int, float, complex)):
        return None if one == other or (one != one and other != other) else (path, *_shown_apart(one, other))  # noqa: PLR0124 - NaN
    seen[id(one), id(other)] = one, other  # which keeps their addresses
    is_own = isinstance(one, np.ndarray) and type(one) is not np.ndarray  # it may have a mask
    array, other_array = (None, None) if is_own else (as_array(one), as_array(other))
    if array is not None and other_array is not None:
        found = _difference_of_arrays(array, other_array, path)
        return found or difference(getattr(one, "__dict__", None), getattr(other, "__dict__", None), path, seen)
    inside, others = children(one), children(other)
    if isinstance(one, (set, frozenset)):
        is_equal = one == other or (
            len(one) == len(other) and all(any(difference(a, b) is None for b in other) for a in one)
        )
        return None if is_equal else (path, _shown(one), _shown(other))
    if inside is None or others is None:
        return _difference_of_objects(one, other, path, seen)
    types = [*map(type, inside)]
    if ATOMS.issuperset(types) and types == [*map(type, others)] and isinstance(one, (list, tuple)) and one == other:
        return None  # as below, but 100 times as fast
    if isinstance(one, Mapping):
        if set(one) != set(other):
            return path, f"with the keys {_shown(list(one))}", _shown(list(other))
        others = [other[key] for key in one]
    if len(inside) != len(others):
        return path, f"of length {len(inside)}", f"of length {len(others)}"
    found_inside = (difference(a, b, path + step, seen) for step, a, b in zip(steps(one), inside, others, strict=True))
    return next((found for found in found_inside if found is not None), None)


def _difference_of_arrays(one: NDArray[Any], other: NDArray[Any], path: str) -> Difference | None:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return path, f"{one.dtype} {one.shape}", f"{other.dtype} {other.shape}"
    if one.tobytes() == other.tobytes():
        return None
    differs = np.asarray((one != other) & ~((one != one) & (other != other)))  # noqa: PLR0124 - NaN
    if not differs.any():
        return None
    place = np.unravel_index(differs.argmax(), differs.shape)
    return path + (f"[{', '.join(map(str, place))}]" if place else ""), str(one[place]), str(other[place])


def _difference_of_objects(one: Any, other: Any, path: str, seen: dict[Any, Any]) -> Difference | None:
    try:
        found = difference(_restored_from(one), _restored_from(other), path, seen)
    except Exception:  # it can't be pickled
        found = path, _shown(one), _shown(other)
    for name in ("equals", "__eq__") if found is not None else ():  # such as of frames with other blocks of columns
        with suppress(Exception):
            if getattr(one, name)(other) is True:
                return None
    return found


def _restored_from(thing: Any) -> Any:
    """Return what a pickle of an object is made of: a global's name, or function, arguments, state and items."""
    reduce = copyreg.dispatch_table.get(type(thing))
    made = thing.__reduce_ex__(4) if reduce is None else reduce(thing)
    return made if isinstance(made, str) else [*made[:3], *map(list, filter(None, made[3:5]))]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _shown_apart(one: Any, other: Any) -> tuple[str, str]:
    """Return two different texts or numbers, long ones from shortly before where they differ."""
    if not isinstance(one, (str, bytes, bytearray)):
        return _shown(one), _shown(other)
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, same - _MAX_SHOWN // 3)
    return _shown(one[begin:]), _shown(other[begin:])
