"""How far the loop has got, and where its next pass begins: pure bookkeeping, no I/O.

A pass goes through one epoch. Frameworks call `set_epoch` before `iter()`, after it, or in the middle, also for the
epoch they are in; so it is only looked at when a pass begins, with its first `next`.

    restored, no epoch chosen         goes on at the restored position; if that is an epoch's end, with the next epoch
    restored, that epoch chosen       goes on at the restored position, even if nothing is left there
    another epoch chosen              that epoch, from its beginning
    the epoch under way chosen        nothing else is said by it: the next epoch, or the same if the loop left this one
    neither                           the epoch after the one of the last pass
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_loader.plan import BatchPlan, Plan, Position

__all__ = ["Progress"]


@dataclass(slots=True)
class _Pass:
    """One way through an epoch, as far as it has got."""

    plan: Plan
    begin: Position
    first_step: int
    num_steps: int
    """Steps of the epoch that are done, those before the pass included."""
    is_ended: bool = False

    @property
    def position(self) -> Position:
        """After the batch delivered last."""
        epoch = self.begin.epoch
        if self.is_ended:
            return self.plan.end_of(epoch)
        return self.begin if self.num_steps == self.first_step else self.plan.position_after(epoch, self.num_steps - 1)

    @property
    def is_complete(self) -> bool:
        """Whether all that this rank has of the epoch was delivered."""
        return self.is_ended or self.num_steps >= self.plan.num_batches(self.begin.epoch)


class Progress:
    """Counts what was delivered. Not thread-safe: it belongs to the loop's thread."""

    def __init__(self) -> None:
        self._start = Position(0, 0)
        """Where the first pass begins, or the first one after a restore."""
        self._pass: _Pass | None = None
        """The last one since the start."""
        self._chosen: int | None = None
        """What `set_epoch` said since the last pass began."""
        self._chosen_in_its_midst = False
        """Whether it named the epoch of the pass that was under way: that says nothing about the one after."""

    @property
    def position(self) -> Position:
        """Where a run that is stopped now has to go on."""
        reached = self._start if self._pass is None else self._pass.position
        chosen = self._choice
        is_repeat = self._pass is not None and self._pass.is_complete
        if chosen is None or (chosen == reached.epoch and not is_repeat):
            return reached
        return Position(chosen, 0)

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass has begun, has something left, and no other epoch was chosen since."""
        current = self._pass
        return current is not None and not current.is_complete and self._choice in (None, current.begin.epoch)

    @property
    def is_in_midst(self) -> bool:
        """Whether a pass has delivered something, but not all it has, and no other epoch was chosen since."""
        current = self._pass
        return self.is_in_pass and current is not None and current.num_steps > current.first_step

    @property
    def next_epoch(self) -> int:
        """The epoch of the next pass; if the position is restored, the one it lies in."""
        if self._choice is not None:
            return self._choice
        return self._start.epoch if self._pass is None else self._pass.begin.epoch + 1

    def batch(self, step: int) -> BatchPlan:
        """Return what a batch of the pass consists of."""
        assert self._pass is not None
        return self._pass.plan.batch(self._pass.begin.epoch, step)

    def restore(self, position: Position) -> None:
        """Go on at a saved position; an epoch chosen before doesn't count any more."""
        self._start = position
        self._pass = self._chosen = None

    def choose_epoch(self, epoch: int) -> None:
        """Have the next pass go through this epoch."""
        current = self._pass
        self._chosen = epoch
        self._chosen_in_its_midst = current is not None and not current.is_complete and epoch == current.begin.epoch

    def next_begin(self, num_samples: int) -> Position:
        """Return where the next pass begins, unless something else is chosen until then, given the dataset's length."""
        if self._pass is None and self._chosen in (None, self._start.epoch):
            at_end = 0 < num_samples <= self._start.num_samples
            return Position(self._start.epoch + 1, 0) if at_end and self._chosen is None else self._start
        return Position(self.next_epoch, 0)

    def begin(self, position: Position, plan: Plan, first_step: int) -> None:
        """Take note that a pass begins at this position, which is that of a step."""
        self._pass = _Pass(plan, position, first_step, first_step)
        self._chosen = None

    def advance(self, num_steps: int) -> None:
        """Take note of how many steps of the epoch are done."""
        assert self._pass is not None
        self._pass.num_steps = num_steps

    def end(self) -> None:
        """Take note that the loop has come to the end of the epoch, where another rank may have one batch more."""
        assert self._pass is not None
        self._pass.is_ended = True

    @property
    def _choice(self) -> int | None:
        if self._chosen_in_its_midst and self._pass is not None and self._pass.is_complete:
            return None
        return self._chosen

    def __repr__(self) -> str:
        position = self.position
        return f"<Progress epoch {position.epoch}, sample {position.num_samples}, next epoch {self.next_epoch}>"
