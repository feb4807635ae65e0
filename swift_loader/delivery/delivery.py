"""A batch on its way from the dispatcher to the loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from swift_loader.executors.base import Lease
from swift_loader.metrics.metrics import NOT_NOTED
from swift_loader.metrics.observations import Arrival
from swift_loader.scheduler.sample_errors import SampleFailure
from swift_loader.scheduler.work import Work


@dataclass(slots=True)
class Delivery:
    """A batch on its way to the loop, or the error in its place. Not frozen, because it is made for each batch."""

    batch: Any
    epoch: int
    step: int
    failures: tuple[SampleFailure, ...] = ()
    """The batch's failed samples."""
    num_before: int | None = None
    """How many steps of the epoch were delivered before it; without a plan, how many deliveries. None: exactly the
    steps before its own."""
    error: BaseException | None = None
    """Why there is no batch. The loop raises it, now and at each later `next`."""
    lease: Lease | None = None
    """The lease of the slot that the batch lies in. None if it lies in no slot."""
    work: Work | None = None
    """What the batch was built for. None if there is no batch and no error of one."""
    state: bytes | None = None
    """The state of the worker's dataset after the batch, if it came with the batch: a packed `Snapshot`."""
    is_end: bool = False
    """Whether the source of work has ended, so that there is no batch. It may hand out more later."""
    arrival: Arrival | None = field(default=None, compare=False)
    """What was measured of the batch; None if there is no batch, or if it wasn't measured."""
    number: int = NOT_NOTED
    """The batch's number in the metrics."""

    def with_batch(self, batch: Any) -> Delivery:
        """Return the delivery with another batch. Takes half as long as `dataclasses.replace`."""
        return Delivery(
            batch,
            self.epoch,
            self.step,
            self.failures,
            self.num_before,
            self.error,
            self.lease,
            self.work,
            self.state,
            self.is_end,
            self.arrival,
            self.number,
        )

    def keep(self) -> None:
        """Note that only the user keeps the batch's memory from here on. Any thread."""
        if self.lease is not None:
            self.lease.keep()
