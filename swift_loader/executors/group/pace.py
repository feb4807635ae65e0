"""How far the loop of the rank that loads may be ahead of the others, and whether all take the same batches. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from swift_loader.errors import RankMismatch, RankStalled
from swift_loader.executors.group.messages import BatchId
from swift_loader.executors.group.steps import Steps

__all__ = ["Pace"]


class Pace:
    """The steps of all ranks of a group, and the errors about them. The caller holds the lock of the `GroupLeader`."""

    def __init__(self, process: int, others: Iterable[int], max_ahead: int) -> None:
        """Begin before the first batch.

        Args:
            process: The rank that loads.
            others: The ranks that share its batches.
            max_ahead: How many batches the loop may be ahead of the slowest rank.
        """
        self._process = process
        self._max_ahead = max_ahead
        self._steps = Steps(list(others))

    @property
    def last(self) -> BatchId | None:
        """The batch that the rank that loads has taken last; None before the first."""
        return self._steps.last

    @property
    def is_ahead(self) -> bool:
        """Whether the loop must wait for the slowest rank."""
        slowest = self._steps.slowest()
        return slowest is not None and slowest[1] >= self._max_ahead

    def take(self, batch_id: BatchId) -> RankMismatch | None:
        """Note what the rank that loads takes. Return the error if another rank took another batch instead."""
        other = self._steps.take(batch_id)
        return None if other is None else self._mismatch(other[0], other[1], batch_id)

    def note(self, process: int, num_taken: int, batch_id: BatchId) -> RankMismatch | None:
        """Note that a rank has taken so many batches, of which this is the last. Return the same."""
        ours = self._steps.note(process, num_taken, batch_id)
        return None if ours is None else self._mismatch(process, batch_id, ours)

    def expect(self, process: int, num_taken: int, batch_id: BatchId) -> RankMismatch | None:
        """Note which batch a rank takes after so many others. Return the same."""
        ours = self._steps.expect(process, num_taken, batch_id)
        return None if ours is None else self._mismatch(process, batch_id, ours)

    def forget(self, process: int) -> None:
        """Go on without a rank."""
        self._steps.forget(process)

    def waiting(self) -> str:
        """Return what the loop waits for, for a message that goes on with how long. `is_ahead` is true."""
        slowest = self._steps.slowest()
        assert slowest is not None
        at = "" if self.last is None else f" after {self.last.text}"
        return (
            f"rank {self._process} loads for rank {slowest[0]}, too, at most {self._max_ahead} batches ahead "
            f"(data_queue_size). It is so far ahead now{at}, and has waited for rank {slowest[0]}"
        )

    def stalled(self, timeout_s: float) -> RankStalled:
        """Return the error for a loop that has waited for so long. `is_ahead` is true."""
        return RankStalled(f"{self.waiting()} for longer than timeout={timeout_s:g} s")

    def _mismatch(self, process: int, theirs: BatchId, ours: BatchId) -> RankMismatch:
        text = (
            f"ranks {self._process} and {process} share batches, but don't take the same ones: of the first "
            f"{self._steps.num_taken}, rank {self._process} has taken {ours.text} where rank {process} takes "
            f"{theirs.text}"
        )
        if theirs[1:] == ours[1:]:
            text += ", of another order or with other samples skipped"
        hint = (
            "Let all ranks with the same data break, skip and load states at the same batches; or call "
            "start(share_batches=False), so that each loads its own"
        )
        return RankMismatch(f"{text}. {hint}")

    def __repr__(self) -> str:
        return f"<Pace {self._steps!r}, at most {self._max_ahead} ahead>"
