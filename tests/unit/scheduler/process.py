"""A worker of the model, as it is in truth."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from swift_loader.scheduler.messages import Death, Disconnected, Ended, Event, Send


@dataclass
class Process:
    """A worker. It does its tasks in order."""

    serial: int
    worker_id: int
    pipe: deque[Send] = field(default_factory=deque)
    """Tasks that have arrived and aren't done."""
    said: deque[Event] = field(default_factory=deque)
    """Events that the executor hasn't heard."""
    is_ready: bool = False
    is_hanging: bool = False
    is_dead: bool = False
    is_unkillable: bool = False
    is_at_work: bool = False
    """Whether it has begun the first task of its pipe."""
    is_cut_off: bool = False
    """Whether the executor has stopped listening to it."""
    with_template: bool = False
    newest: int = 0
    """The latest generation that it knows of."""

    def die(self, *, with_template: bool = False) -> None:
        """End, at work or not."""
        if not self.is_dead:
            self.is_dead, self.with_template = True, with_template
            if not self.is_cut_off:
                self.said.append(Disconnected(self.serial, self.worker_id))

    def dismiss(self) -> None:
        """End, once it has nothing left to do."""
        assert not self.pipe
        self.die()

    def cut_off(self) -> None:
        """Find out how it ended, and listen to nothing else."""
        self.is_cut_off = True
        self.said.clear()
        death = Death(-9 if self.is_dead else None, self.is_at_work, self.with_template)
        self.said.append(Ended(self.serial, death))
