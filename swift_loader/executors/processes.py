"""Chooses how worker processes are started, and the executor that goes with it.

What a choice needs is imported once it is chosen: `executors.process.fleet` and what it uses exist on Linux only.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from swift_loader.errors import warn
from swift_loader.executors.fleet import Fleet
from swift_loader.executors.wording import Explainer, rank_in
from swift_loader.options import DeliveryOptions
from swift_loader.worker.spec import StartMethod, WorkerSpec

PLATFORM = sys.platform
"""A name of its own, so that a test can be elsewhere."""


def has_own_processes() -> bool:
    """Return whether the loader starts worker processes itself. Elsewhere than on Linux, torch's DataLoader does."""
    return PLATFORM == "linux"


def warm_up(start_method: StartMethod, modules: tuple[str, ...]) -> None:
    """Begin in the background what all processes of this start method share. Returns at once, and raises no error.

    `modules`: what the dataset will import.
    """
    if has_own_processes() and start_method is StartMethod.TEMPLATE:
        from swift_loader.executors.process.roots import ROOTS

        ROOTS.warm(modules)


def make_fleet(spec: WorkerSpec, options: DeliveryOptions, explainer: Explainer | None = None) -> Fleet:
    """Return the fleet that the options and the platform demand. It starts nothing yet.

    `explainer` has the words for its workers; None: those of a loader.
    """
    explainer = explainer or Explainer(options, rank_in(spec))
    if options.executor is not None:
        from swift_loader.executors.ray.fleet import ActorFleet, MixedFleet

        remote = ActorFleet(spec, options, options.executor, explainer)
        if not options.num_local:
            return remote
        here = replace(options, num_workers=options.num_local, executor=None, num_local=0)
        return MixedFleet(make_fleet(spec, here, explainer), remote)
    if not has_own_processes():
        from swift_loader.executors.torch_fleet import TorchFleet

        return TorchFleet(spec, options, explainer)
    from swift_loader.executors.process.fleet import TemplateFleet

    if spec.options.start_method is StartMethod.FORK:
        _warn_of_file(_shared_file_of(spec.options.dataset))
    return TemplateFleet(spec, options, explainer)


_MAX_SEEN = 1000

_MAX_ITEMS = 100


def _shared_file_of(dataset: Any) -> str:
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
                name = thing.name  # without a path, multiprocessing may have opened it
                if (
                    isinstance(name, str)
                    and not name.startswith("<")
                    and not thing.closed
                    and thing.readable()
                    and _is_regular(thing.fileno())
                ):
                    return name
            elif kind in {dict, list, tuple}:
                to_see += (thing.values() if kind is dict else thing) if len(thing) <= _MAX_ITEMS else ()
            elif not issubclass(kind, (type, ModuleType, FunctionType)):
                to_see += object.__getattribute__(thing, "__dict__").values()
    return ""


def _is_regular(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


@cache
def _warn_of_file(name: str) -> None:
    """Warn that forks read from the same file. Once for the same file. Empty: there is none."""
    if name:
        warn(
            f"the dataset holds {name!r} open for reading, and forks share the position in it, so samples may be those "
            f"of other indices, as with torch. Open it in __getitem__. Or leave the file out in __getstate__, and give "
            f"multiprocessing_context='forkserver' to DataLoader, start_method='template' to SwiftLoader"
        )
