"""The leaves of samples and batches, and their digests, to compare them byte by byte."""

from __future__ import annotations

import hashlib
import pickle
import re
import sys
from collections.abc import Iterator
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
