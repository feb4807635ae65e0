"""Orders the calls that fill what was created empty: if a value needs code, that code is complete first. Pure.

A fill is WAITING ─► OPEN ─► DONE. It is opened to find out what its value needs; the fills found come before it. It
is done at once if its value can't be sent, or needs nothing.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from threading import Thread
from threading import local as thread_local
from typing import Any

import numpy as np

from swift_loader.transport import rebuild
from swift_loader.transport.by_value import travels_by_value
from swift_loader.transport.encoder import NumberOf, can_reduce_tensor
from swift_loader.transport.reducers import reduce_ctype, reduce_local, reduce_member, reduce_memmap, reducers

REMEDY = (
    "Create it where it is used, so that each process has its own, or move the code into a module that can be "
    "imported. SwiftLoader's dataset_class= creates it in its own processes, in the dataset's constructor"
)
"""What to do about a value that can't be sent."""


class Call:
    """Pickled as a call of a function: the receiver gets the call's result."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.reduced = function, args


class FillState(Enum):
    """See the module."""

    WAITING = "waiting"
    OPEN = "open"
    DONE = "done"


@dataclass(eq=False, slots=True)
class Fill:
    """One value, and how to set it."""

    call: Call | None
    """Sets the value; None: the value is only checked."""
    value: object
    where: str
    """Names the value in the error message if it can't be sent; empty if the caller writes the message."""
    owner: Hashable = None
    """The function, class, cell or variable that isn't complete without the value."""
    is_required: bool = True
    """False: leave the value out if it can't be sent."""
    why_missing: str = ""
    """Why the value was left out."""
    stand_in: Callable[[object], Call] | None = None
    """Makes the call that sets a stand-in in the value's place until the value can be set."""
    state: FillState = FillState.WAITING


class Fills:
    """Fills, their owners (functions, classes, cells, variables), and which owner needs which others."""

    def __init__(self) -> None:
        self.soon: deque[Call] = deque()
        """Calls that need nothing but code. They come before all fills."""
        self.last: deque[Call] = deque()
        """Calls that must come after all fills."""
        self._of_owner: dict[Hashable, list[Fill]] = {}
        self._needs: dict[Hashable, list[Hashable]] = {}
        self._waiting: deque[Fill] = deque()
        self._stack: list[Fill] = []

    def add(self, fill: Fill) -> None:
        """Add a fill. Its owner isn't complete until it is done."""
        self._of_owner.setdefault(fill.owner, []).append(fill)
        self._waiting.append(fill)

    def link(self, owner: Hashable, other: Hashable) -> None:
        """Record that `owner` isn't complete before `other` is."""
        self._needs.setdefault(owner, []).append(other)

    def next(self) -> Fill | None:
        """Return the next fill: open it, or, if it is already open, do it. None if all are done."""
        while True:
            if not self._stack:
                if not self._waiting:
                    return None
                self._stack.append(self._waiting.popleft())
            fill = self._stack[-1]
            if fill.state is not FillState.DONE:
                return fill
            self._stack.pop()

    def put_first(self, owners: Iterable[Hashable]) -> list[Fill]:
        """Schedule first all fills that `owners` need. Return those that are already open: they are part of a cycle."""
        found: list[Fill] = []
        in_cycles: list[Fill] = []
        queue = deque(owners)
        seen = set(queue)
        while queue:
            owner = queue.popleft()
            for fill in self._of_owner.get(owner, ()):
                if fill.state is not FillState.DONE:
                    (in_cycles if fill.state is FillState.OPEN else found).append(fill)
            for other in self._needs.get(owner, ()):
                if other not in seen:
                    seen.add(other)
                    queue.append(other)
        self._stack.extend(reversed(found))
        return in_cycles


# Checks whether an object can be sent, without sending it. Runs in the sender.

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


"""Makes the empty container that is filled later, if the code that makes its items looks into the container."""
