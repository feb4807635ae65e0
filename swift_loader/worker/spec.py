"""What worker processes need: the options for making a batch, and the plan.

The trainer sends them once, as a template, a worker of torch's DataLoader or a Ray actor starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Any

from swift_loader.batch.collate import collate_to_send, default_collate
from swift_loader.checks import check_callable, check_choice, check_flag, option
from swift_loader.sampling.mixture import Mixture
from swift_loader.sampling.plan import PlanSettings
from swift_loader.transport.by_value import is_importable, travels_by_value
from swift_loader.worker.fetch import OnError
from swift_loader.worker.seeding import Rng, seed_for_construction
from swift_loader.worker.torch_worker import TorchMode


class StartMethod(str, Enum):
    """How worker processes are started."""

    TEMPLATE = "template"
    """All are forked from one fresh interpreter that holds the dataset."""
    SPAWN = "spawn"
    """Each is a fresh interpreter with its own dataset."""
    FORK = "fork"
    """All are forked from a fork of the trainer, for datasets that can't be serialised."""


def _as_given(_name: str, value: Any) -> Any:
    return value


def _copied(_name: str, value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value  # the user may change the dict later


def _check_rng(name: str, value: Any) -> Rng:
    return check_choice(name, "none" if value is None else value, Rng)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a batch is made: from which dataset, with which functions. One of the groups in options.py."""

    dataset_class: Callable[..., Any] | None = option("dataset_class", _as_given, default=None)
    """Returns the dataset; None: `dataset` is given."""
    dataset_kwargs: Mapping[str, Any] | None = option("dataset_kwargs", _copied, default=None)
    dataset: Any = option("dataset", _as_given, default=None)
    collate_fn: Callable[[list[Any]], Any] | None = option("collate_fn", check_callable, default=None)
    batch_encoder: Callable[[Any], bytes] | None = option("batch_encoder", check_callable, default=None)
    rng: Rng = option("rng", _check_rng, default=Rng.SAMPLE)
    on_error: OnError = option("on_error", check_choice, OnError, default=OnError.RAISE)
    validate: bool = option("validate", check_flag, default=False)
    """Whether starting waits for the first batch, and each build reports the checksums of some samples."""
    start_method: StartMethod = option("start_method", check_choice, StartMethod, default=StartMethod.TEMPLATE)
    dataset_per_worker: bool = option("dataset_per_worker", check_flag, default=False)
    """True: each worker builds its own dataset after the fork."""
    share: Callable[[Any], Any] | None = option("shared", _as_given, default=None)
    """Replaces the long lists of a dataset, and returns it; None: they stay."""
    torch: TorchMode | None = None
    """How to do as torch's DataLoader does; None in SwiftLoader. No public option."""

    def __post_init__(self) -> None:
        _check_dataset(self.dataset_class, self.dataset_kwargs, self.dataset)

    @property
    def modules(self) -> tuple[str, ...]:
        """What defines dataset and callables, if it can be imported; and torch, for workers that do as torch's."""
        init_fn = self.torch and self.torch.worker_init_fn
        own = modules_of(self.dataset_class, type(self.dataset), self.collate_fn, self.batch_encoder, init_fn)
        return own if self.torch is None else (*own, "torch.utils.data")

    @property
    def has_own_collate(self) -> bool:
        """Whether only the loader's own collate sees the samples of a batch. It copies them."""
        users = self.torch is not None and (self.torch.is_stream or self.torch.collate_functions)
        return self.collate_fn in (None, default_collate, collate_to_send) and not self.batch_encoder and not users

    def make_dataset(self) -> Any:
        """Return the dataset. Its class runs here, after the global generators are seeded."""
        if self.dataset_class is None:
            return self.dataset
        seed_for_construction(self.rng)
        dataset = self.dataset_class(**(self.dataset_kwargs or {}))
        if isinstance(dataset, Mixture):
            raise TypeError(
                "dataset_class returned a Mixture, whose weights this process's loader must know; give "
                "dataset=Mixture(...), with sources that open their files on first use"
            )
        return dataset if self.share is None else self.share(dataset)


def modules_of(*things: Any) -> tuple[str, ...]:
    """Return the modules that define classes and functions, without those that can't be imported."""
    found = (thing for thing in things if isinstance(thing, (type, FunctionType)) and is_importable(thing))
    return tuple(dict.fromkeys(thing.__module__ for thing in found))


def definitions_of(options: WorkerOptions) -> Iterator[object]:
    """Yield the classes and functions of the user's script, and those of the options, if they can't be imported."""
    main = sys.modules.get("__main__")
    given = (options.dataset_class, type(options.dataset), options.collate_fn, options.batch_encoder)
    for thing in (*given, *(vars(main).values() if main is not None else ())):
        if isinstance(thing, (type, FunctionType)) and travels_by_value(thing):
            yield thing


def _check_dataset(dataset_class: Any, dataset_kwargs: Any, dataset: Any) -> None:
    if (dataset_class is None) == (dataset is None):
        what = "neither dataset_class nor dataset was" if dataset is None else "both dataset_class and dataset were"
        raise TypeError(f"{what} given; give dataset_class (with dataset_kwargs) or dataset, an instance")
    if dataset is not None:
        if dataset_kwargs is not None:
            raise TypeError(
                "dataset_kwargs was given with dataset, which is an instance and takes no arguments; leave "
                "dataset_kwargs out, or give dataset_class"
            )
        if isinstance(dataset, type):
            raise TypeError(f"dataset={dataset.__name__} is a class; give an instance, or pass it as dataset_class")
    elif not callable(dataset_class):
        raise TypeError(
            f"dataset_class is a {type(dataset_class).__name__}, which can't be called; give a class or a function "
            f"that returns a dataset, or pass an instance as dataset="
        )
    elif dataset_kwargs is not None and not isinstance(dataset_kwargs, Mapping):
        raise TypeError(f"dataset_kwargs is a {type(dataset_kwargs).__name__}; give a dict of keyword arguments")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What is sent to the worker processes of a rank."""

    options: WorkerOptions
    plan: PlanSettings
    """The first plan; a `NewPlan` message replaces it."""
    draws: bool = False
    """Whether samples are known to draw from the global random generators."""

    @property
    def modules(self) -> tuple[str, ...]:
        """See `WorkerOptions.modules`."""
        return self.options.modules


def length_of(dataset: Any, torch: TorchMode | None = None) -> int:
    """Return the number of samples; 0 in torch mode, where the length has no meaning and may not exist.

    Raises `TypeError` if the dataset is not map-style.
    """
    if torch is not None:
        return 0
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
        raise TypeError(
            f"the dataset is a {type(dataset).__name__} without __getitem__; pass a map-style dataset, which has "
            f"__getitem__(index) and __len__()"
        )
    try:
        return len(dataset)
    except TypeError as error:
        raise TypeError(
            f"the dataset, a {type(dataset).__name__}, has no length ({error}); pass a map-style dataset, which has "
            f"__getitem__(index) and __len__()"
        ) from error
