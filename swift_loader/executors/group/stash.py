"""The batches that a rank has got from the rank that loads, and that its loop hasn't taken. Pure.

    HERE ──a task asks for it──► GIVEN ──the loop takes it──► removed
      ▲                            │
      └── the loop goes elsewhere ─┘

A batch that was given and not taken stays: the loop may go where it is needed again, and it comes only once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from swift_loader.executors.group.messages import BatchId, Dropped

__all__ = ["Stash", "Stashed"]


class _State(Enum):
    HERE = "here"
    GIVEN = "given"
    DROPPED = "given, but the rank that loads doesn't take it"


@dataclass(slots=True)
class Stashed:
    """A batch."""

    batch_id: BatchId
    generation: int
    """Of the rank that loads."""
    content: Any
    state: _State = field(default=_State.HERE)
    num_given: int = 0
    """How often a task got it."""

    def is_before(self, other: Stashed) -> bool:
        """Return whether the loop that took `other` is beyond this one."""
        return (self.generation, *self.batch_id[1:]) < (other.generation, *other.batch_id[1:])


class Stash:
    """The batches, in the order in which they came."""

    def __init__(self) -> None:
        self._all: list[Stashed] = []

    def add(self, stashed: Stashed) -> None:
        """Add a batch that came."""
        self._all.append(stashed)

    def has(self, batch_id: BatchId) -> bool:
        """Return whether `give` would return a batch."""
        return any(one.batch_id == batch_id and one.state is _State.HERE for one in self._all)

    def give(self, batch_id: BatchId) -> Stashed | None:
        """Return this batch; None if it isn't here.

        Those before it stay: the task may be one that was sent ahead, before the loop goes back.
        """
        for one in self._all:
            if one.batch_id == batch_id and one.state is _State.HERE:
                one.state = _State.GIVEN
                one.num_given += 1
                return one
        return None

    def take(self, batch_id: BatchId) -> None:
        """Remove the batch that the loop takes, and those before it that nobody has asked for."""
        taken = next((one for one in self._all if one.batch_id == batch_id and one.state is not _State.HERE), None)
        if taken is not None:
            self._all = [
                one
                for one in self._all
                if one is not taken and (one.state is not _State.HERE or not one.is_before(taken))
            ]

    def go_elsewhere(self) -> None:
        """Note that the loop hasn't taken what was given, and goes elsewhere."""
        self._all = [one for one in self._all if one.state is not _State.DROPPED]
        for one in self._all:
            one.state = _State.HERE

    def drop(self, dropped: Dropped) -> None:
        """Remove what the rank that loads won't take. What was given stays until the loop goes elsewhere."""
        for one in self._all:
            if one.generation < dropped.generation and one.batch_id[1:] > (dropped.epoch, dropped.step):
                one.state = _State.DROPPED if one.state is _State.GIVEN else one.state
        self._all = [
            one
            for one in self._all
            if one.state is not _State.HERE
            or one.generation >= dropped.generation
            or one.batch_id[1:] <= (dropped.epoch, dropped.step)
        ]

    def clear(self) -> None:
        """Remove all."""
        self._all.clear()

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return f"<Stash of {len(self)}>"
