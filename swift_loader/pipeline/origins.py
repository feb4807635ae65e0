"""Where a pipeline's items come from: a source; see `gathered` for other pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from swift_loader.errors import StateMismatch
from swift_loader.pipeline import flows
from swift_loader.pipeline.functions import name_of
from swift_loader.pipeline.items import Item
from swift_loader.pipeline.run import Run
from swift_loader.pipeline.sources import length_of, source_items
from swift_loader.worker.stream import is_stateful


@dataclass(frozen=True, slots=True)
class Plain:
    """One source."""

    source: Any
    is_endless: bool

    beginning = 0
    parameters = ()

    @property
    def is_exact(self) -> bool:
        """Whether it gives the same items in the same order each time. A pipeline as a source knows."""
        return bool(getattr(self.source, "is_exact", True))

    @property
    def num_items(self) -> int | None:
        """The source's length, if it has one."""
        return length_of(self.source)

    def open(self, entry: Any, states: Iterator[Any], run: Run, key: int) -> Iterator[Item]:  # noqa: ARG002
        """Return the source's items. Pulls nothing yet."""
        noted, begin = run.note_source(), next(states, None)
        if begin is not None:
            noted.note((run.epoch, begin[0]), begin[1])
        items = source_items(self.source, entry, begin, run, noted, is_endless=self.is_endless)
        (name,) = self.describe()
        return run.counted(flows.told(items, name, entry), name)

    def check(self, entry: Any) -> None:
        """Check that it is a count."""
        if not isinstance(entry, int) or entry < 0:
            raise StateMismatch(f"the state says that {entry!r} items of the source came; that must be a count")

    def check_states(self, states: Iterator[Any]) -> None:
        """Check that the source has a way to take its state."""
        state = next(states, None)
        if state is not None and not is_stateful(self.source):
            kind = type(self.source).__name__
            raise StateMismatch(f"the state has one of the source, but a {kind} has no load_state_dict() to take it")

    def source_numbers(self, entry: Any) -> list[int | None]:
        """The entry is the number."""
        return [entry]

    def set_epoch(self, epoch: int) -> None:
        """Tell the source, if it has `set_epoch`."""
        if self.has_epochs:
            self.source.set_epoch(epoch)

    @property
    def has_epochs(self) -> bool:
        """Whether the source has `set_epoch`."""
        return hasattr(self.source, "set_epoch")

    def describe(self) -> list[str]:
        """Return one line: the source's class, or the function's name."""
        name = name_of(self.source) if callable(self.source) else type(self.source).__name__
        return [f"source {name}{', continuous' if self.is_endless else ''}"]
