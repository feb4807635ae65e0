"""Counts what the loop got, and decides where the next pass begins. Pure bookkeeping, no I/O.

A pass goes through one epoch. Frameworks call `set_epoch` before `iter()`, after it or in the middle, even for the
current epoch. So its value only takes effect when a pass begins, with the first `next`:

    state restored, no set_epoch      resumes at the restored position; at an epoch's end, with the next epoch
    state restored, its own epoch     resumes at the restored position, even if nothing is left there
    another epoch                     that epoch, from its first batch
    the current epoch                 no effect: the next epoch, or the same one if the loop left it unfinished
    none of these                     the epoch after the last pass
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_loader.sampling.plan import BatchPlan, Plan, Position

__all__ = ["Progress"]


@dataclass(slots=True)
class _Pass:
    """One pass through an epoch, and how far it is."""

    plan: Plan
    begin: Position
    first_step: int
    num_steps: int
    """Steps of the epoch that are done, including those before the pass."""
    is_ended: bool = False

    @property
    def position(self) -> Position:
        """The position after the last delivered batch."""
        epoch = self.begin.epoch
        if self.is_ended:
            return self.plan.end_of(epoch)
        return self.begin if self.num_steps == self.first_step else self.plan.position_after(epoch, self.num_steps - 1)

    @property
    def is_complete(self) -> bool:
        """Whether this rank got all its batches of the epoch."""
        return self.is_ended or self.num_steps >= self.plan.num_batches(self.begin.epoch)


class Progress:
    """Counts what was delivered. Not thread-safe: belongs to the loop's thread."""

    def __init__(self) -> None:
        self._start = Position(0, 0)
        """Where the first pass begins, or the first pass after a restore."""
        self._pass: _Pass | None = None
        """The last pass since then."""
        self._chosen: int | None = None
        """The epoch of the last `set_epoch` since the last pass began."""
        self._chosen_while_partly_delivered = False
        """Whether `set_epoch` named the epoch of the pass that was running. That doesn't choose the next epoch."""

    @property
    def position(self) -> Position:
        """Where a run that stops now has to resume."""
        reached = self._start if self._pass is None else self._pass.position
        chosen = self._choice
        is_repeat = self._pass is not None and self._pass.is_complete
        if chosen is None or (chosen == reached.epoch and not is_repeat):
            return reached
        return Position(chosen, 0)

    @property
    def is_in_pass(self) -> bool:
        """Whether a pass has begun and has batches left, and no other epoch was chosen since."""
        current = self._pass
        return current is not None and not current.is_complete and self._choice in (None, current.begin.epoch)

    @property
    def is_partly_delivered(self) -> bool:
        """Whether a pass has delivered some but not all of its batches, and no other epoch was chosen since."""
        current = self._pass
        return self.is_in_pass and current is not None and current.num_steps > current.first_step

    @property
    def next_epoch(self) -> int:
        """The epoch of the next pass. After a restore, the epoch of the restored position."""
        if self._choice is not None:
            return self._choice
        return self._start.epoch if self._pass is None else self._pass.begin.epoch + 1

    def batch(self, step: int) -> BatchPlan:
        """Return the plan of one batch of the pass."""
        assert self._pass is not None
        return self._pass.plan.batch(self._pass.begin.epoch, step)

    def restore(self, position: Position) -> None:
        """Resume at a saved position. Discards an epoch chosen before."""
        self._start = position
        self._pass = self._chosen = None

    def choose_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        current = self._pass
        self._chosen = epoch
        self._chosen_while_partly_delivered = (
            current is not None and not current.is_complete and epoch == current.begin.epoch
        )

    def next_begin(self, num_samples: int) -> Position:
        """Return where the next pass begins, given the dataset's length, unless another epoch is chosen until then."""
        if self._pass is None and self._chosen in (None, self._start.epoch):
            at_end = 0 < num_samples <= self._start.num_samples
            return Position(self._start.epoch + 1, 0) if at_end and self._chosen is None else self._start
        return Position(self.next_epoch, 0)

    def reached_in(self, epoch: int, num_samples: int) -> int:
        """Return how many samples of an epoch are behind the loop. Of an epoch that is past, all are."""
        current, begin = self._pass, self.next_begin(num_samples)
        if current is not None and not current.is_complete and epoch == current.begin.epoch:
            return current.position.num_samples
        if epoch == begin.epoch:
            return begin.num_samples
        return num_samples if epoch < begin.epoch else 0

    def begin(self, position: Position, plan: Plan, first_step: int) -> None:
        """Record that a pass begins at this position, which is where `first_step` begins."""
        self._pass = _Pass(plan, position, first_step, first_step)
        self._chosen = None

    @property
    def pass_position(self) -> Position:
        """The position in the pass, whatever epoch was chosen since it began."""
        assert self._pass is not None
        return self._pass.position

    def replan(self, plan: Plan) -> None:
        """Go on with a plan whose steps up to here are the same."""
        assert self._pass is not None
        self._pass.plan = plan

    def advance(self, num_steps: int) -> None:
        """Record how many steps of the epoch are done."""
        assert self._pass is not None
        self._pass.num_steps = num_steps

    def end(self) -> None:
        """Record that the loop reached the end of the epoch, where another rank may have one more batch."""
        assert self._pass is not None
        self._pass.is_ended = True

    @property
    def _choice(self) -> int | None:
        if self._chosen_while_partly_delivered and self._pass is not None and self._pass.is_complete:
            return None
        return self._chosen

    def __repr__(self) -> str:
        position = self.position
        return f"<Progress epoch {position.epoch}, sample {position.num_samples}, next epoch {self.next_epoch}>"
