"""The options that workers need. The trainer sends them once, when the template starts."""

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
    """How to get the dataset: an instance, or a callable and its keyword arguments."""

    instance: Any = None
    factory: Callable[..., Any] | None = None
    kwargs: dict[str, Any] | None = None

    def make(self, rng: Rng) -> Any:
        """Return the dataset. A factory runs here, after the global generators are seeded."""
        if self.factory is not None:
            seed_for_construction(rng)
        return self.instance if self.factory is None else self.factory(**(self.kwargs or {}))


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The part of the options that workers need."""

    source: DatasetSource
    plan: PlanSettings
    """The first plan; a `NewPlan` message replaces it."""
    rng: Rng
    collate_fn: Callable[[list[Any]], Any] | None
    batch_encoder: Callable[[Any], bytes] | None
    dataset_per_worker: bool
    """True: each worker builds its own dataset after the fork."""
    on_error: OnError = OnError.RAISE
    forks: bool = True
    """False: each worker is a separate interpreter (start_method="spawn")."""
    validate: bool = True
    """Whether each build reports the checksums of some samples."""
    draws: bool = False
    """Whether samples are known to draw from the global random generators."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that define the dataset and the callables, without those that can't be imported."""
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
