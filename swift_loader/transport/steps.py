"""Orders the steps that set values: if a value needs code, the values which that code needs come first. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

__all__ = ["Step", "Steps"]


@dataclass(eq=False, slots=True)
class Step:
    """One value, and how to set it."""

    write: Callable[[], None]
    value: object
    where: str
    """Names the value in the error message if it can't be sent; empty if the caller writes the message."""
    owner: Hashable = None
    """The function, class, cell or variable that isn't complete without the value."""
    is_required: bool = True
    """False: leave the value out if it can't be sent."""
    note_missing: Callable[[str], None] | None = None
    """Is called with the reason if a value that isn't required can't be sent."""
    put: Callable[[object], None] | None = None
    """Sets a stand-in in the value's place until the value can be set."""
    is_open: bool = False
    """Whether the search for what the value needs has started."""
    is_done: bool = False


class Steps:
    """Steps, their owners (functions, classes, cells, variables), and which owner needs which others."""

    def __init__(self) -> None:
        self._steps: dict[Hashable, list[Step]] = {}
        self._needs: dict[Hashable, list[Hashable]] = {}
        self._waiting: deque[Step] = deque()
        self._stack: list[Step] = []

    def add(self, step: Step) -> None:
        """Add a step. Its owner isn't complete until the step is done."""
        self._steps.setdefault(step.owner, []).append(step)
        self._waiting.append(step)

    def link(self, owner: Hashable, other: Hashable) -> None:
        """Record that `owner` isn't complete before `other` is."""
        self._needs.setdefault(owner, []).append(other)

    def next(self) -> Step | None:
        """Return the next step: open it, or, if it is already open, do it. None if all are done."""
        while True:
            if not self._stack:
                if not self._waiting:
                    return None
                self._stack.append(self._waiting.popleft())
            step = self._stack[-1]
            if not step.is_done:
                return step
            self._stack.pop()

    def put_first(self, owners: Iterable[Hashable]) -> list[Step]:
        """Schedule first all steps that `owners` need. Return those that are already open: they are part of a cycle."""
        found: list[Step] = []
        in_cycles: list[Step] = []
        queue = deque(owners)
        seen = set(queue)
        while queue:
            owner = queue.popleft()
            for step in self._steps.get(owner, ()):
                if not step.is_done:
                    (in_cycles if step.is_open else found).append(step)
            for other in self._needs.get(owner, ()):
                if other not in seen:
                    seen.add(other)
                    queue.append(other)
        self._stack.extend(reversed(found))
        return in_cycles
