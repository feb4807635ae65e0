"""Splits a sequence over ranks, item by item. Pure.

In step s, rank r of R gets item `s * R + r`. So after any step the items drawn are a prefix of the sequence, and a run
with another number of ranks can continue there.
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_loader.sampling.plan import Uneven

__all__ = ["Shard"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank."""

    rank: int
    world_size: int
    uneven: Uneven
    """The last step, if fewer than `world_size` items are left for it: PAD repeats these items, DROP leaves them out,
    EXACT gives nothing to some ranks."""

    def num_steps(self, num_items: int) -> int:
        """Return how many of the items this rank gets."""
        full, left = divmod(num_items, self.world_size)
        return full + (self.pick(left) is not None)

    def pick(self, num_left: int) -> int | None:
        """Return which of the next items is this rank's, given how many are left; None if it gets none."""
        if num_left >= self.world_size:
            return self.rank
        if num_left <= 0 or self.uneven is Uneven.DROP:
            return None
        if self.uneven is Uneven.PAD:
            return self.rank % num_left
        return self.rank if self.rank < num_left else None

    def is_last(self, num_left: int) -> bool:
        """Return whether nothing follows the next step on any rank, given how many items are left before it."""
        after = num_left - self.world_size
        return after <= 0 or (after < self.world_size and self.uneven is Uneven.DROP)
