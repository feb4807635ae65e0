"""Looks at the arrays and tensors of a batch: what they are, their checksums, and which samples aren't finite."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.batch.tree import children, steps

__all__ = ["Leaf", "checksum", "leaves_of"]

_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Leaf:
    """A part of a batch that isn't a container."""

    path: str
    """From the batch, such as `['image']`."""
    kind: str
    """dtype and shape; of other objects, the type."""
    checksum: str
    """The same for the same kind and bytes."""
    not_finite: tuple[int, ...]
    """The positions along the first axis that have a NaN or an infinity."""


def checksum(batch: Any) -> str:
    """Return 16 hexadecimal digits that are the same for batches with the same structure, dtypes, shapes and bytes.

    A tensor on a device is copied to the host.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for leaf in leaves_of(batch):
        digest.update(f"{leaf.path} {leaf.kind} {leaf.checksum}\n".encode())
    return digest.hexdigest()


def leaves_of(part: Any, path: str = "") -> Iterator[Leaf]:
    """Yield the leaves of a batch, in order."""
    array = _array_of(part)
    if array is not None:
        kind, bits, is_finite = array
        yield Leaf(path, kind, _digest(bits), _rows_not_finite(is_finite))
        return
    inside = children(part)
    if inside is None or not inside:
        yield Leaf(path, type(part).__name__, _digest(_pickled(part)), ())
        return
    for step, child in zip(steps(part), inside, strict=True):
        yield from leaves_of(child, path + step)


def _array_of(part: Any) -> tuple[str, bytes, NDArray[np.bool_]] | None:
    """Return kind, bytes and which numbers are finite, of an array or a tensor; None for anything else."""
    import torch

    if isinstance(part, torch.Tensor):
        tensor = part.detach().cpu().resolve_conj().resolve_neg()
        tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        if tensor.is_floating_point():
            tensor = tensor.double()  # isfinite doesn't take 8-bit floats
        return f"{part.dtype} {tuple(part.shape)}", bits, torch.isfinite(tensor).numpy()
    if isinstance(part, (np.ndarray, np.generic)) and not part.dtype.hasobject:
        array = np.asarray(part)
        is_number = np.issubdtype(array.dtype, np.inexact)
        is_finite = np.isfinite(array) if is_number else np.ones(array.shape, np.bool_)
        return f"{array.dtype} {array.shape}", array.tobytes(), np.asarray(is_finite)
    return None


def _rows_not_finite(is_finite: NDArray[np.bool_]) -> tuple[int, ...]:
    by_row = np.atleast_1d(is_finite)
    rows = by_row.reshape(len(by_row), -1).all(axis=1) if by_row.size else by_row
    return tuple(np.flatnonzero(~rows).tolist()) if by_row.size else ()


def _pickled(leaf: Any) -> bytes:
    if isinstance(leaf, (set, frozenset)):
        return repr(sorted(map(repr, leaf))).encode()  # a set has no order
    try:
        return pickle.dumps(leaf)
    except Exception:  # the result of the user's batch_decoder may not be picklable
        return repr(leaf).encode()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
