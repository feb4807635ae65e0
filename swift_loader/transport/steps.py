"""In which order values are set that need code: each after those that this code needs in turn. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

__all__ = ["Step", "Steps"]


@dataclass(eq=False, slots=True)
class Step:
    """A value that is to be set."""

    write: Callable[[], None]
    value: object
    where: str
    """What it is, for the message if it can't be sent; empty if the message is made elsewhere."""
    owner: Hashable = None
    """The function, class, cell or variable that isn't complete without it."""
    is_required: bool = True
    """False: if it can't be sent, go without it."""
    note_missing: Callable[[str], None] | None = None
    put: Callable[[object], None] | None = None
    """Puts another value where this one belongs, for as long as this one can't be made."""
    is_open: bool = False
    """What it needs is being looked for, or being set."""
    is_done: bool = False


class Steps:
    """Steps, what they belong to (functions, classes, variables), and which of these need which others."""

    def __init__(self) -> None:
        self._steps: dict[Hashable, list[Step]] = {}
        self._needs: dict[Hashable, list[Hashable]] = {}
        self._waiting: deque[Step] = deque()
        self._stack: list[Step] = []

    def add(self, step: Step) -> None:
        """Have a step done: its owner isn't complete without it."""
        self._steps.setdefault(step.owner, []).append(step)
        self._waiting.append(step)

    def link(self, owner: Hashable, other: Hashable) -> None:
        """Take note that an owner isn't complete before another one is."""
        self._needs.setdefault(owner, []).append(other)

    def next(self) -> Step | None:
        """Return a step to open or, if it is open, to do; None if all are done."""
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
        """Have done first what these need, and return the steps that can't be: they are open, that is a cycle."""
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
