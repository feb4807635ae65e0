"""The tensors in a batch, whatever its structure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

__all__ = ["tensors_in"]

_CONTAINERS = (list, tuple, set, frozenset, deque)

_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_ATOMS = (str, bytes, bytearray, int, float, complex, np.ndarray, np.generic, *_CODE)
"""What has no tensors in it that are part of the batch."""


def tensors_in(batch: Any) -> Iterator[Any]:
    """Yield all strided tensors of a batch, and objects that have a `record_stream` of their own.

    Looks into containers and Mappings, and into the attributes of all objects, at any depth. A sparse tensor is yielded
    as the tensors it consists of.
    """
    yield from _tensors_in(batch, set())


def _tensors_in(batch: Any, seen: set[int]) -> Iterator[Any]:
    import torch

    if batch is None or isinstance(batch, _ATOMS) or id(batch) in seen:
        return
    seen.add(id(batch))
    if isinstance(batch, torch.Tensor):
        yield from _parts(batch)
        return
    if callable(getattr(batch, "record_stream", None)):
        yield batch
        return
    for part in _children(batch):
        yield from _tensors_in(part, seen)


def _children(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, _CONTAINERS):
        yield from batch
    yield from getattr(batch, "__dict__", {}).values()
    for kind in type(batch).__mro__:
        slots = vars(kind).get("__slots__", ())
        yield from (getattr(batch, name, None) for name in ([slots] if isinstance(slots, str) else slots))


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
    else:  # a nested tensor of the jagged layout, which does it itself
        yield tensor
