"""Digests of the leaves of samples and batches, to compare them byte by byte."""

from __future__ import annotations

import hashlib
import pickle
import re
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["as_array", "digest", "digest_array", "digest_leaf"]

_ADDRESS = re.compile(r"0x[0-9a-f]{6,16}")
"""An address in the `repr` of an object, which differs each time."""


def as_array(part: Any) -> NDArray[Any] | None:
    """Return an array or a tensor as an array; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(part, torch.Tensor):
        return np.asarray(part) if isinstance(part, (np.ndarray, np.generic)) else None
    tensor = part.detach().cpu().to_dense() if part.layout is not torch.strided else part.detach().cpu()
    try:
        return np.asarray(tensor.numpy())
    except TypeError:  # NumPy doesn't have the dtype, such as bfloat16
        return np.asarray(tensor.contiguous().reshape(*tensor.shape, 1).view(torch.uint8).numpy())


def digest_array(array: NDArray[Any]) -> bytes:
    """Return the digest of an array's dtype, shape and bytes."""
    return digest(f"{array.dtype}{array.shape}".encode() + array.tobytes())


def digest_leaf(leaf: Any) -> bytes:
    """Return the digest of a leaf that isn't an array."""
    return digest(_to_bytes(leaf))


def digest(data: bytes) -> bytes:
    """Return the digest of bytes, 16 bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _to_bytes(leaf: Any) -> bytes:
    if isinstance(leaf, (set, frozenset)):
        return repr(sorted(map(repr, leaf))).encode()  # a set has no order
    try:
        return pickle.dumps(leaf)
    except Exception:  # the result of the user's code may not be picklable
        return _ADDRESS.sub("", repr(leaf)).encode()
