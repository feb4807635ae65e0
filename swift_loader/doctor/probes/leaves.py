"""The leaves of a sample: what they are, and their digests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from swift_loader.batch.digests import digest_of, leaves_of
from swift_loader.batch.tree import type_name
from swift_loader.doctor.facts import Layout, Leaf

__all__ = ["digests_of", "large_views", "layout_of", "requiring_grad"]

_TEXT = {"U": "text", "S": "bytes"}
"""Kinds of NumPy's dtypes that depend on the length of the text."""

_LARGE_NBYTES = 1 << 20
_MANY_TIMES = 16
"""An array is large beside its view if it has so many bytes, and so many times those of the view."""


def layout_of(sample: Any) -> Layout:
    """Return what a sample consists of."""
    return tuple(_describe(path, leaf) for path, leaf in leaves_of(sample))


def _describe(path: str, leaf: Any) -> Leaf:
    kind = type_name(leaf)
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape") and isinstance(leaf, (np.ndarray, np.generic, _tensor_type())):
        dtype = _TEXT.get(getattr(leaf.dtype, "kind", ""), str(leaf.dtype))
        return Leaf(path, kind, dtype, tuple(map(int, leaf.shape)), int(leaf.nbytes))
    if hasattr(leaf, "getbands") and hasattr(leaf, "width"):  # an image of Pillow's
        return Leaf(path, kind, nbytes=leaf.width * leaf.height * len(leaf.getbands()))
    nbytes = len(leaf) if isinstance(leaf, (str, bytes)) else sys.getsizeof(leaf)
    return Leaf(path, kind, nbytes=nbytes)


def _tensor_type() -> type[Any]:
    torch = sys.modules.get("torch")
    return type(None) if torch is None else torch.Tensor


def digests_of(sample: Any) -> dict[str, bytes]:
    """Return the digest of each leaf by its path."""
    return {path: digest_of(leaf) for path, leaf in leaves_of(sample)}


def large_views(sample: Any) -> Iterator[tuple[str, int, int]]:
    """Yield (path, bytes, bytes of the array) for each leaf that is a writable view of a much larger array."""
    for path, leaf in leaves_of(sample):
        if isinstance(leaf, np.ndarray) and leaf.flags.writeable:
            root: Any = leaf
            while isinstance(root.base, np.ndarray):
                root = root.base
            whole = root.nbytes if root is not leaf else 0
        elif isinstance(leaf, _tensor_type()) and _is_plain(leaf):
            whole = leaf.untyped_storage().nbytes()
        else:
            continue
        if whole >= _LARGE_NBYTES and whole >= _MANY_TIMES * leaf.nbytes:
            yield path, leaf.nbytes, whole


def _is_plain(tensor: Any) -> bool:
    return bool(tensor.layout is sys.modules["torch"].strided and tensor.is_cpu)


def requiring_grad(sample: Any) -> Iterator[str]:
    """Yield the paths of tensors that require grad."""
    kind = _tensor_type()
    yield from (
        path for path, leaf in leaves_of(sample) if isinstance(leaf, kind) and getattr(leaf, "requires_grad", False)
    )
