"""Compares which batches the ranks of a group take: each takes the same ones, in the same order. Pure."""

from __future__ import annotations

from swift_loader.executors.group.messages import BatchId

__all__ = ["Steps"]


class Steps:
    """What the rank that loads has taken, and what each other rank has taken or waits for."""

    def __init__(self, others: list[int]) -> None:
        """Begin before the first batch. `others`: the ranks that share batches."""
        self.num_taken = 0
        """By the rank that loads."""
        self.last: BatchId | None = None
        """What it has taken last."""
        self._taken: dict[int, BatchId] = {}
        """By number, those that another rank hasn't taken yet."""
        self._num_others = dict.fromkeys(others, 0)
        self._expected: dict[int, dict[int, BatchId]] = {rank: {} for rank in others}
        """By rank and number: what it has taken, or waits for, ahead of the rank that loads."""

    def take(self, batch_id: BatchId) -> tuple[int, BatchId] | None:
        """Note what the rank that loads takes. Return a rank that took another batch instead, and which."""
        number, self.last = self.num_taken, batch_id
        self._taken[number] = batch_id
        self.num_taken += 1
        self._trim()
        for rank, expected in self._expected.items():
            other = expected.pop(number, None)
            if other is not None and other != batch_id:
                return rank, other
        return None

    def note(self, rank: int, num_taken: int, batch_id: BatchId) -> BatchId | None:
        """Note that a rank has taken so many batches, of which this is the last.

        Returns:
            What the rank that loads took instead; None if it is the same, or if it isn't there yet.
        """
        if rank in self._num_others:
            self._num_others[rank] = num_taken
        return self.expect(rank, num_taken - 1, batch_id)

    def expect(self, rank: int, number: int, batch_id: BatchId) -> BatchId | None:
        """Note which batch a rank takes after `number` others. Return the same as `note`."""
        if rank not in self._num_others:
            return None
        ours = self._taken.get(number)
        if ours is None and number >= self.num_taken:
            self._expected[rank][number] = batch_id
        self._trim()
        return None if ours == batch_id else ours

    def forget(self, rank: int) -> None:
        """Wait for this rank no more, and compare nothing with it."""
        self._num_others.pop(rank, None)
        self._expected.pop(rank, None)
        self._trim()

    def slowest(self) -> tuple[int, int] | None:
        """Return the rank that has taken fewest batches, and by how many fewer; None if there are no others."""
        if not self._num_others:
            return None
        rank = min(self._num_others, key=self._num_others.__getitem__)
        return rank, self.num_taken - self._num_others[rank]

    def _trim(self) -> None:
        fewest = min(self._num_others.values(), default=self.num_taken)
        for number in [number for number in self._taken if number < fewest]:
            del self._taken[number]

    def __repr__(self) -> str:
        return f"<Steps {self.num_taken}, others {self._num_others}>"
