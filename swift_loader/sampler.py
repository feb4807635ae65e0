"""The `sampler` with `set_epoch` that frameworks expect of a loader. The order itself is in `order`."""

from __future__ import annotations

from collections.abc import Iterator

from swift_loader.passes import Passes
from swift_loader.plan import PlanReader

__all__ = ["EpochSampler"]


class EpochSampler:
    """Iterates over the dataset indices that this rank gets in the next epoch, like a torch sampler."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, as `SwiftLoader.set_epoch` does."""
        self._passes.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        plan, epoch = self._passes.next_plan()
        reader = PlanReader(plan)
        for step in range(plan.num_batches(epoch)):
            yield from reader.batch(epoch, step).indices.tolist()

    def __len__(self) -> int:
        plan, epoch = self._passes.next_plan()
        num_batches = plan.num_batches(epoch)
        if not num_batches:
            return 0
        return (num_batches - 1) * plan.settings.batch_size + len(plan.batch(epoch, num_batches - 1).indices)

    def __repr__(self) -> str:
        return "<EpochSampler of a SwiftLoader>"
