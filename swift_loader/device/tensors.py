"""Finds the tensors in a batch of any structure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

__all__ = ["tensors_in"]

_CONTAINERS = (list, tuple, set, frozenset, deque)

_PLAIN = (list, tuple)
"""Containers without attributes."""

_LEAVES = frozenset({str, bytes, int, float, complex, bool, type(None), np.ndarray})
"""Types of leaves without tensors; lists of only these are skipped."""

_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_ATOMS = (str, bytes, bytearray, int, float, complex, np.ndarray, np.generic, *_CODE)
"""Types whose instances hold no tensors of the batch."""


def tensors_in(batch: Any) -> Iterator[Any]:
    """Yield all strided tensors of a batch, and objects that have a `record_stream` of their own.

    Searches containers, Mappings and the attributes of all objects, at any depth. For a sparse tensor, yields the
    tensors that it consists of.
    """
    import torch

    seen: dict[int, Any] = {}  # keep the objects alive, else another one may get the same id
    to_see = [batch]
    while to_see:
        part = to_see.pop()
        if id(part) in seen or isinstance(part, _ATOMS):
            continue
        seen[id(part)] = part
        if isinstance(part, torch.Tensor):
            yield from _parts(part)
        elif callable(getattr(part, "record_stream", None)):
            yield part
        else:
            to_see += reversed(_children(part))


def _children(batch: Any) -> list[Any]:
    """Return the items and attributes of an object that may hold tensors."""
    children: list[Any] = []
    if isinstance(batch, Mapping):
        children += batch.values()
    elif isinstance(batch, _CONTAINERS):
        if type(batch) in _PLAIN and _LEAVES.issuperset(map(type, batch)):
            return children
        children += batch
    children += getattr(batch, "__dict__", {}).values()
    for kind in type(batch).__mro__:
        slots = vars(kind).get("__slots__", ())
        children += (getattr(batch, name, None) for name in ([slots] if isinstance(slots, str) else slots))
    return [child for child in children if type(child) not in _LEAVES]


def _parts(tensor: Any) -> Iterator[Any]:
    import torch

    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())  # noqa: SLF001 - torch's names; the public ones need a coalesced one
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:  # a nested tensor of the jagged layout, which has its own record_stream
        yield tensor
