"""Tells which datasets and functions work only in a fork of the trainer, although some can be serialised.

A tensor in shared memory, for example, would arrive as a private copy: no error, but what workers write is lost.
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

from swift_loader.batch.tree import search, type_name
from swift_loader.worker.spec import WorkerSpec

_SHARED = {
    "multiprocessing.synchronize": ("SemLock",),
    "multiprocessing.queues": ("Queue", "SimpleQueue"),
    "multiprocessing.connection": ("Connection",),
    "multiprocessing.heap": ("BufferWrapper",),
}
"""Classes of the standard library, by module, whose instances processes share by inheritance."""


_MAX_SEEN = 1000

_MAX_ITEMS = 100


def why_fork_is_needed(spec: WorkerSpec) -> str:
    """Return what the dataset or a function shares with other processes; empty if there is nothing.

    Looks at items and attributes, and at the variables that functions keep from where they were defined. What can't be
    serialised at all isn't found here: `write_payload` raises `EncodeError` for that.
    """
    options = spec.options
    classes = _shared_classes()
    for name in ("dataset", "dataset_kwargs", "dataset_class", "collate_fn", "batch_encoder"):
        given = getattr(options, name)
        whole = [given, *_kept_by(given)]
        for thing in search(whole, lambda thing: isinstance(thing, classes) or _is_shared_tensor(thing)):
            what = "a tensor in shared memory" if _is_shared_tensor(thing) else f"a {type_name(thing)}"
            return f"{name} holds {what}, which only forks of this process share with it"
    return ""


def shared_file_of(dataset: Any) -> str:
    """Return the name of a file that a dataset holds open for reading; empty if there is none.

    Forks share its offset, so each of them may read what another one has asked for. Looks at attributes and at small
    collections, at a thousand objects at most.
    """
    to_see, seen = [dataset], set[int]()
    while to_see and len(seen) < _MAX_SEEN:
        thing = to_see.pop(0)
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        kind = type(thing)  # `isinstance` and `getattr` may run code of the user's
        with suppress(Exception):
            if issubclass(kind, io.IOBase):
                if not thing.closed and thing.readable() and thing.seekable() and thing.fileno() >= 0:
                    return str(getattr(thing, "name", thing))
            elif kind in {dict, list, tuple}:
                to_see += (thing.values() if kind is dict else thing) if len(thing) <= _MAX_ITEMS else ()
            elif not issubclass(kind, (type, ModuleType, FunctionType)):
                to_see += object.__getattribute__(thing, "__dict__").values()
    return ""


def _shared_classes() -> tuple[type, ...]:
    """Return the classes of the modules that are imported. There are no instances of the others."""
    return tuple(
        getattr(sys.modules[module], name)
        for module, names in _SHARED.items()
        if module in sys.modules
        for name in names
    )


def _kept_by(function: Any) -> list[Any]:
    """Return the variables that a function keeps in its closure and in its defaults."""
    if not isinstance(function, FunctionType):
        return []
    cells = function.__closure__ or ()
    return [*(cell.cell_contents for cell in cells if cell != type(cell)()), *(function.__defaults__ or ())]


def _is_shared_tensor(thing: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Tensor) and thing.device.type == "cpu" and _is_shared(thing)


def _is_shared(tensor: Any) -> bool:
    try:
        return bool(tensor.is_shared())
    except (NotImplementedError, RuntimeError):  # it has no storage, as a sparse one
        return False
