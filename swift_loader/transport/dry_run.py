"""Checks whether an object can be sent, without sending it. Runs in the sender."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable
from enum import Enum
from threading import Thread
from threading import local as thread_local
from typing import Any

import numpy as np

from swift_loader.transport import rebuild
from swift_loader.transport.by_value import travels_by_value
from swift_loader.transport.encoder import NumberOf, can_reduce_tensor
from swift_loader.transport.reducers import reduce_ctype, reduce_local, reduce_member, reduce_memmap, reducers

_NAMES_OF_TYPES = {id(kind): name for name, kind in vars(types).items() if type(kind) is type}
"""id -> name in `types`, for types such as the one of functions: their `__module__` doesn't contain them."""


class DryRunPickler(pickle.Pickler):
    """Pickles an object and discards the result. Raises if it can't be sent, and finds the code that it needs."""

    def __init__(self, is_known: Callable[[object], bool] = lambda thing: False) -> None:  # noqa: ARG005
        super().__init__(_Nowhere(), protocol=5, buffer_callback=lambda buffer: False)  # noqa: ARG005
        self.dispatch_table = reducers()
        self._is_known = is_known
        self.found: list[object] = []
        """Classes and functions that must be sent by value."""
        self.runs_code = False
        """Whether rebuilding the object may call the script's code, instead of only creating containers."""

    def reducer_override(self, obj: Any) -> Any:  # noqa: D102 - pickle's
        kind = type(obj)
        if isinstance(obj, type) and (made := reduce_ctype(obj)) is not None:
            return made
        if isinstance(obj, (types.FunctionType, type)) and travels_by_value(obj):
            if not self._is_known(obj):
                self.found.append(obj)
            return rebuild.nothing, ()
        if kind is types.CellType or (isinstance(obj, types.ModuleType) and obj.__name__ in sys.modules):
            return rebuild.nothing, ()
        if kind is np.ndarray and not obj.dtype.hasobject:
            return rebuild.nothing, ()
        self.runs_code |= not isinstance(obj, (types.FunctionType, types.BuiltinFunctionType, type))
        torch = sys.modules.get("torch")
        if torch is not None and kind is torch.Tensor and can_reduce_tensor(obj):
            return rebuild.nothing, ()
        special = reduce_special(obj, kind, lambda thing: 0 if self._is_known(thing) else None)
        return NotImplemented if special is None else special


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def reduce_special(obj: Any, kind: type, number_of: NumberOf) -> Any:
    """Reduce an object that needs `isinstance` checks instead of a table by exact type; None if it needs none."""
    if isinstance(obj, Enum):
        return reduce_member(obj) if travels_by_value(kind) and number_of(kind) is None else None
    if isinstance(obj, thread_local):
        return reduce_local(obj)
    if isinstance(obj, np.memmap):
        return reduce_memmap(obj)
    if isinstance(obj, Thread) and obj.ident is not None:
        raise TypeError("a thread that has been started can't be sent; start it in the process that uses it")
    if isinstance(obj, type) and id(obj) in _NAMES_OF_TYPES:
        return getattr, (types, _NAMES_OF_TYPES[id(obj)])
    if isinstance(obj, type):
        return reduce_ctype(obj)
    return None
