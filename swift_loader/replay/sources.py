"""Where a replay takes the samples from: a dataset, or a loader with the options of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from swift_loader.loader import SwiftLoader
from swift_loader.options import Options
from swift_loader.worker.spec import length_of

__all__ = ["SampleSource"]


@dataclass(frozen=True, slots=True)
class SampleSource:
    """A dataset, and how its batches are made."""

    options: Options
    """Without workers, log and benchmark."""
    dataset: Any
    chosen: frozenset[str]
    """The fields of a state that the loader's options say, too."""

    @classmethod
    def of(cls, source: Any, batch_size: int | None, world_size: int | None) -> SampleSource:
        """Return the source that the user means.

        Args:
            source: A dataset, a `SwiftLoader`, or a function or class that returns one. Called without arguments, with
                the generators seeded as a loader does for `dataset_class`.
            batch_size: None: that of the loader.
            world_size: None: that of the loader, or 1.

        Raises:
            TypeError: It is something else.
            ValueError: It is a dataset, and no batch size was given.
            Exception: Whatever the function raised.
        """
        if isinstance(source, SwiftLoader):
            return cls._of_loader(source, batch_size, world_size)
        if not isinstance(source, type) and hasattr(source, "__getitem__"):
            loader = SwiftLoader(dataset=source, worker_per_consumer=0)
        elif callable(source):
            loader = SwiftLoader(source, worker_per_consumer=0)
            made = loader.dataset
            if isinstance(made, SwiftLoader):
                with made:
                    return cls._of_loader(made, batch_size, world_size)
        else:
            raise _not_a_source(source)
        length_of(loader.dataset)  # says what is wrong with anything else
        if batch_size is None:
            raise ValueError(
                "a dataset doesn't say the batch size of the run; give batch_size, or a function that returns the "
                "run's SwiftLoader"
            )
        return replace(cls._of_loader(loader, batch_size, world_size), chosen=frozenset())

    @classmethod
    def _of_loader(cls, loader: SwiftLoader, batch_size: int | None, world_size: int | None) -> SampleSource:
        options = loader._options  # noqa: SLF001 - of this package
        sampling = replace(
            options.sampling,
            batch_size=options.sampling.batch_size if batch_size is None else batch_size,
            world_size=(options.sampling.world_size or 1) if world_size is None else world_size,
        )
        delivery = replace(options.delivery, num_workers=0, in_order=True, pin_memory=False)
        report = replace(options.report, log=None, benchmark=False, benchmark_file=None)
        alone = replace(options, sampling=sampling, delivery=delivery, report=report)
        return cls(alone, loader.dataset, options.sampling.chosen)


def _not_a_source(source: Callable[..., Any]) -> TypeError:
    return TypeError(
        f"the source is a {type(source).__name__}; give a map-style dataset, a SwiftLoader, or a function that returns "
        f"one of them"
    )
