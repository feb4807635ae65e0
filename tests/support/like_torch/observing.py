"""Makes a DataLoader of either class as a cell says, iterates over it, and records all that a program could see."""

from __future__ import annotations

import hashlib
import random
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tests.support.like_torch.datasets import MAPS, STREAMS
from tests.support.like_torch.options import COLLATES, INITS, ORDERS

Cell = Mapping[str, Any]
"""The choices of one construction, by name: see `arguments_of`."""

MAX_STEPS = 48
"""A loop that goes on for longer is stopped."""

ATTRIBUTES = (
    "batch_size",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "drop_last",
    "persistent_workers",
    "in_order",
    "multiprocessing_context",
    "_auto_collation",
    "_dataset_kind",
)
FROZEN = ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers")


class Observation:
    """What was seen, in order: pairs of what it is about and what was seen."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def see(self, what: str, value: Any) -> None:
        self.events.append((what, value))

    def attempt(self, what: str, action: Callable[[], Any]) -> Any:
        """Do something; see what it raises. Returns its result, or None."""
        try:
            return action()
        except Exception as error:
            self.see(what, error_of(error))
            return None


def observe(loader_class: Any, cell: Cell) -> Observation:
    """Return all that is seen of a loader of this class."""
    seen = Observation()
    random.seed(11)
    np.random.seed(12)
    torch.manual_seed(13)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        generator = torch.Generator().manual_seed(14) if cell.get("generator") else None
        dataset = dataset_of(cell)
        options = seen.attempt("options", lambda: arguments_of(cell, generator))
        if options is not None:
            loader = seen.attempt("construction", lambda: loader_class(dataset, **options))
            _see_states(seen, "construction", generator)
            if loader is not None:
                _see_attributes(seen, loader, dataset, options)
                _iterate(seen, loader, cell, generator)
                seen.see("frozen", [seen_of_setting(loader, name) for name in FROZEN])
    told = {_warning_of(one) for one in warned if one.category is not DeprecationWarning}  # of os.fork, Python 3.12
    seen.see("warnings", sorted(told))
    return seen


def dataset_of(cell: Cell) -> Any:
    makers = STREAMS if cell["dataset"] in STREAMS else MAPS
    return makers[cell["dataset"]](cell["num_samples"])


def arguments_of(cell: Cell, generator: torch.Generator | None) -> dict[str, Any]:
    """Return the arguments, with new values.

    The choices "dataset", "num_samples", "order", "collate", "init", "size", "generator" and "loop" have a meaning of
    their own. Every other one is an argument as it is.
    """
    own = {"dataset", "num_samples", "order", "collate", "init", "size", "generator", "loop"}
    options: dict[str, Any] = {name: value for name, value in cell.items() if name not in own}
    options |= ORDERS[cell.get("order", "default")](cell["num_samples"], generator)
    if "batch_sampler" not in options and "size" in cell:
        options["batch_size"], options["drop_last"] = cell["size"]
    options["collate_fn"] = COLLATES[cell.get("collate", "none")]()
    options["worker_init_fn"] = INITS[cell.get("init", "none")]()
    return options | {"generator": generator}


def _see_attributes(seen: Observation, loader: Any, dataset: Any, options: Mapping[str, Any]) -> None:
    for name in ATTRIBUTES:
        seen.see(name, described(getattr(loader, name)))
    seen.see("sampler", type(loader.sampler).__name__)
    seen.see("batch_sampler", type(loader.batch_sampler).__name__)
    for name in ("sampler", "batch_sampler", "generator", "worker_init_fn"):
        given = options.get(name)
        seen.see(f"{name} is given", getattr(loader, name) is given)
    seen.see("dataset", loader.dataset is dataset)
    seen.see("collate_fn", described(loader.collate_fn))


def seen_of_setting(loader: Any, name: str) -> Any:
    """Set an attribute to what it is, and return the error."""
    seen = Observation()
    seen.attempt(name, lambda: setattr(loader, name, getattr(loader, name)))
    return seen.events


def _iterate(seen: Observation, loader: Any, cell: Cell, generator: torch.Generator | None) -> None:
    """Iterate as the cell's "loop" says."""
    loop = cell.get("loop", "whole")
    ordered = bool(cell.get("in_order", True)) or cell.get("num_workers", 0) < 2
    seen.see("len", seen.attempt("len", lambda: len(loader)) if loop != "unmeasured" else None)
    if loop == "interleaved":
        _interleave(seen, loader)
        _see_states(seen, "interleaved", generator)
        return
    for epoch in range({"broken": 3, "first": 1}.get(loop, 2)):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        iterator = seen.attempt("iter", lambda: iter(loader))
        _see_states(seen, "iter", generator)
        if iterator is None:
            continue
        seen.see("iter of iterator", iter(iterator) is iterator)
        seen.see("len of iterator", seen.attempt("len of iterator", iterator.__len__))
        steps = 1 if loop == "first" else 2 if loop == "broken" and epoch == 0 else MAX_STEPS
        batches = _drain(seen, iterator, steps)
        seen.see("batches", batches if ordered else sorted(batches, key=repr))
        _see_states(seen, "epoch", generator)
        if loop == "broken":
            del iterator


def _drain(seen: Observation, iterator: Any, steps: int) -> list[Any]:
    """Return what the iterator gives, errors included, until it is over twice."""
    found: list[Any] = []
    for _ in range(steps):
        try:
            found.append(described(next(iterator)))
        except StopIteration:
            found.append(("end", type(seen.attempt("after the end", lambda: next(iterator, None))).__name__))
            break
        except Exception as error:
            found.append(error_of(error))
    return found


def _interleave(seen: Observation, loader: Any) -> None:
    first, second = (seen.attempt("iter", lambda: iter(loader)) for _ in range(2))
    if first is None or second is None:
        return
    for _ in range(4):
        seen.see("first", _drain(seen, first, 1))
        seen.see("second", _drain(seen, second, 2))


def _see_states(seen: Observation, what: str, generator: torch.Generator | None) -> None:
    """See the states of all generators, as digests."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": repr(random.getstate()).encode(),
        "numpy": repr([np.asarray(part).tolist() for part in np.random.get_state()]).encode(),
        "given": b"" if generator is None else generator.get_state().numpy().tobytes(),
    }
    digests = {name: hashlib.sha1(state).hexdigest()[:8] for name, state in states.items()}
    seen.see(f"generators after {what}", digests)


def described(value: Any) -> Any:
    """Return a value as something that can be compared and printed."""
    if isinstance(value, torch.Tensor):
        return type(value).__name__, str(value.dtype), tuple(value.shape), value.requires_grad, value.tolist()
    if isinstance(value, np.ndarray | np.generic):
        return type(value).__name__, value.dtype.str, value.shape, value.tolist()
    if isinstance(value, Mapping):
        return type(value).__name__, [(described(key), described(one)) for key, one in value.items()]
    if isinstance(value, tuple | list):
        return type(value).__name__, [described(one) for one in value]
    return type(value).__name__, _without_addresses(repr(value))


def error_of(error: BaseException) -> tuple[str, ...]:
    return "error", type(error).__name__, _without_addresses(str(error))


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]{6,}", "0x", text)


def _warning_of(warned: warnings.WarningMessage) -> tuple[str, str]:
    text = _without_addresses(str(warned.message))
    for topic in ("pin_memory_device", "pin_memory", "Length of IterableDataset"):  # said in other words
        if topic in text:
            text = " ".join([topic, *re.findall(r"(?<=to be )\d+|(?<=but )\d+", text)])
            break
    return warned.category.__name__, text
