"""What a worker is told, once, when its template starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from swift_loader.plan import PlanSettings
from swift_loader.transport.definitions import is_importable
from swift_loader.worker.fetch import OnError
from swift_loader.worker.seeding import Rng, seed_for_construction

__all__ = ["DatasetSource", "WorkerSetup", "length_of"]


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """How to come by the dataset: an instance, or a callable and its keyword arguments."""

    instance: Any = None
    factory: Callable[..., Any] | None = None
    kwargs: dict[str, Any] | None = None

    def make(self, rng: Rng) -> Any:
        """Return the dataset; runs the user's constructor, with generators that are seeded."""
        if self.factory is not None:
            seed_for_construction(rng)
        return self.instance if self.factory is None else self.factory(**(self.kwargs or {}))


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The part of the options that workers need."""

    source: DatasetSource
    plan: PlanSettings
    """To begin with; it can be replaced."""
    rng: Rng
    collate_fn: Callable[[list[Any]], Any] | None
    batch_encoder: Callable[[Any], bytes] | None
    dataset_per_worker: bool
    """True: each worker builds its own dataset after the fork."""
    on_error: OnError = OnError.RAISE
    forks: bool = True
    """False: each worker is an interpreter of its own, by the start method."""
    validate: bool = True
    """Whether a build tells the checksums of some samples."""
    draws: bool = False
    """Whether samples are known to draw from the global random generators."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that define the dataset and the callables, as far as they can be imported."""
        things = (self.source.factory, type(self.source.instance), self.collate_fn, self.batch_encoder)
        found = (thing for thing in things if isinstance(thing, (type, FunctionType)) and is_importable(thing))
        return tuple(dict.fromkeys(thing.__module__ for thing in found))


def length_of(dataset: Any) -> int:
    """Return the number of samples.

    Raises:
        TypeError: The dataset is not map-style.
    """
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
        raise TypeError(
            f"the dataset is a {type(dataset).__name__} without __getitem__; give a map-style dataset, which has "
            f"__getitem__(index) and __len__()"
        )
    try:
        return len(dataset)
    except TypeError as error:
        raise TypeError(
            f"the dataset, a {type(dataset).__name__}, has no length ({error}); give a map-style dataset, which has "
            f"__getitem__(index) and __len__()"
        ) from error
