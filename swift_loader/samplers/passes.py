"""Counts the passes of a sampler, and splits what it draws over the ranks. Pure bookkeeping.

`set_epoch` chooses the epoch of the next pass. It never changes a pass that runs, and that pass's own epoch chooses
nothing. Without it:

    the last pass is over                the next epoch
    the last pass was left               the same epoch, from its start
    a state was loaded                   resumes where the state was saved; at an epoch's end, the next epoch

After a loaded state, `set_epoch` of its own epoch keeps the position. That of another epoch discards it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from swift_loader.sampling.plan import Uneven


class PassState(Enum):
    """How far a pass is."""

    READY = "ready"
    """Nothing is drawn yet. The position is where it begins."""
    RUNNING = "running"
    """Something may be left."""
    OVER = "over"
    """Nothing is left."""


@dataclass(slots=True)
class Pass:
    """One pass through an epoch. The iterator that makes it advances it; an iterator left behind has its own."""

    epoch: int
    position: int
    """How much of the epoch was drawn, over all ranks. The unit is the sampler's."""
    state: PassState
    at_end: bool = False
    """Whether the position is the end of the epoch."""

    def advance(self, position: int, *, at_end: bool) -> None:
        """Record how much is drawn. Call it before the item is given out, so that a saved state counts it."""
        self.position = position
        if at_end:
            self.end()

    def end(self) -> None:
        """Record that nothing is left."""
        self.state = PassState.OVER
        self.at_end = True


class Passes:
    """The passes of one sampler. Not thread-safe."""

    def __init__(self) -> None:
        self._last = Pass(0, 0, PassState.READY)
        self._chosen: int | None = None
        """The epoch of the last `set_epoch` since the last pass began."""

    @property
    def current(self) -> Pass:
        """The pass that a state saved now has to continue."""
        last, chosen = self._last, self._chosen
        is_begun = last.state is PassState.RUNNING
        if chosen is None or is_begun or (last.state is PassState.READY and chosen == last.epoch):
            return last
        return Pass(chosen, 0, PassState.READY)

    @property
    def epoch(self) -> int:
        """The epoch of the pass that runs; if none does, that of the next pass."""
        return self._last.epoch if self._last.state is PassState.RUNNING else self._next().epoch

    def choose(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        is_running = self._last.state is PassState.RUNNING and epoch == self._last.epoch
        self._chosen = None if is_running else epoch

    def restore(self, epoch: int, position: int, *, at_end: bool) -> None:
        """Begin the next pass at a saved position. Discards an epoch chosen before."""
        self._last = Pass(epoch, position, PassState.READY, at_end)
        self._chosen = None

    def begin(self) -> Pass:
        """Begin the next pass."""
        self._last = self._next()
        self._last.state = PassState.RUNNING
        self._chosen = None
        return self._last

    def _next(self) -> Pass:
        last, chosen = self._last, self._chosen
        keeps_position = chosen == last.epoch or (chosen is None and not last.at_end)
        if last.state is PassState.READY and keeps_position:
            return Pass(last.epoch, last.position, PassState.READY, last.at_end)
        if chosen is not None:
            return Pass(chosen, 0, PassState.READY)
        return Pass(last.epoch + last.at_end, 0, PassState.READY)


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank in a sequence of items.

    In step s, rank r of R gets item `s * R + r`. So after any step the items drawn are a prefix of the sequence, and a
    run with another number of ranks can continue there.
    """

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
