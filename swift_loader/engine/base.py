"""What the loader needs of an engine, however that makes its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from swift_loader.bad_samples import SampleFailure
from swift_loader.plan import PlanSettings

__all__ = ["Delivery", "Engine"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A batch on its way to the loop."""

    batch: Any
    epoch: int
    step: int
    failures: tuple[SampleFailure, ...] = ()
    """The samples that it does without."""
    num_before: int | None = None
    """How many steps of the epoch were delivered before it; None: all those before its own, and no other."""
    error: BaseException | None = None
    """Why there is no batch; to be raised to the loop, and to stay."""


class Engine(Protocol):
    """A source of batches at any position; the processes, or the calling thread."""

    @property
    def num_samples(self) -> int:
        """Length of the dataset, known once started."""
        ...

    @property
    def largest_batch_nbytes(self) -> int:
        """Bytes of the largest batch that has come from a worker; 0 before the first."""
        ...

    def start(self) -> None:
        """Get ready to build batches; blocks until the dataset stands. Cleans up after itself if it raises."""
        ...

    def seek(self, epoch: int, step: int, plan: PlanSettings) -> None:
        """Make `next_batch` go on at this batch of this plan; free if that is where it is anyway."""
        ...

    def is_ready(self) -> bool:
        """Return whether `next_batch` would return at once."""
        ...

    def next_batch(self) -> Delivery:
        """Return the next batch, or why there is none; at the end of an epoch, the first of the next one. Blocks.

        What is wrong with the batch or with the engine is returned (`WorkerStalled`, `WorkerDied`, `LoaderClosed`, what
        the user's code raised when building the batch): so what is raised comes from elsewhere, a signal's handler, and
        says nothing of the batch. Where it interrupted something that can't be repeated, the engine is broken after it.

        Raises:
            SwiftLoaderError: This process is a fork of the one that started the engine.
        """
        ...

    def close(self) -> None:
        """Stop everything and give everything back, within 5 s. Idempotent, from any thread."""
        ...
