"""The interface between the loader and its engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from swift_loader.bad_samples import SampleFailure
from swift_loader.engine.lease import Loan
from swift_loader.plan import PlanSettings

__all__ = ["Delivery", "Engine"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A batch on its way to the loop, or the error in its place."""

    batch: Any
    epoch: int
    step: int
    failures: tuple[SampleFailure, ...] = ()
    """The batch's failed samples."""
    num_before: int | None = None
    """How many steps of the epoch were delivered before it. None: exactly the steps before its own."""
    error: BaseException | None = None
    """Why there is no batch. The loop raises it, now and at each later `next`."""
    loan: Loan | None = None
    """The loan of the slot that the batch lies in. None if it lies in no slot."""

    def keep(self) -> None:
        """Note that only the user keeps the batch's memory from here on. Any thread."""
        if self.loan is not None:
            self.loan.keep()


class Engine(Protocol):
    """A source of batches that can start at any position: worker processes, or the calling thread."""

    @property
    def num_samples(self) -> int:
        """Length of the dataset. Known after `start`."""
        ...

    @property
    def largest_batch_nbytes(self) -> int:
        """Bytes of the largest batch that has come from a worker; 0 before the first."""
        ...

    def start(self) -> None:
        """Get ready to build batches. Blocks until the dataset is built. If it raises, it leaves nothing behind."""
        ...

    def seek(self, epoch: int, step: int, plan: PlanSettings) -> None:
        """Make `next_batch` continue at this batch of this plan. Costs nothing if the engine is there already."""
        ...

    def is_ready(self) -> bool:
        """Return whether `next_batch` would return without blocking. Receives what has arrived. Loop's thread.

        Raises:
            Exception: A signal handler raised it meanwhile, see `next_batch`.
        """
        ...

    def next_batch(self) -> Delivery:
        """Return the next batch, or the error in its place; after an epoch, the next epoch's first batch. Blocks.

        Errors of the batch or the engine are returned, not raised: `WorkerStalled`, `WorkerDied`, `LoaderClosed`, and
        what the user's code raised. So any exception that is raised comes from a signal handler and says nothing about
        the batch. If it interrupted something that can't be repeated, the engine is broken afterwards.

        Raises:
            SwiftLoaderError: This process is a fork of the one that started the engine.
        """
        ...

    def close(self) -> None:
        """Stop all processes and threads and free all resources, within 5 s. Idempotent and thread-safe."""
        ...
