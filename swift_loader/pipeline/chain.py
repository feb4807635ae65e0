"""An origin and the nodes after it: what a pipeline is, before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swift_loader.errors import StateMismatch
from swift_loader.pipeline.items import Item, Place
from swift_loader.pipeline.nodes import Node, Opening
from swift_loader.pipeline.origins import Plain
from swift_loader.pipeline.run import Run
from swift_loader.sampling.permutation import derive_key

if TYPE_CHECKING:
    from swift_loader.pipeline.gathered import Gathered


@dataclass(frozen=True, slots=True)
class Chain:
    """A linear graph. Merged pipelines are chains inside an origin."""

    origin: Plain | Gathered
    nodes: tuple[Node, ...] = ()
    max_errors: float | None = None
    """How many items all stages may leave out together in an epoch; below 1: which share of them."""

    @property
    def beginning(self) -> Place:
        """The place where an epoch begins."""
        return (self.origin.beginning, *(0 for node in self.nodes if node.counts))

    @property
    def is_exact(self) -> bool:
        """Whether a place says which results are left: results come in order everywhere."""
        return self.origin.is_exact and all(node.is_exact for node in self.nodes)

    @property
    def parameters(self) -> tuple[str, ...]:
        """What the meaning of a place depends on: the lines of stages that mix items."""
        return (*self.origin.parameters, *(node.describe() for node in self.nodes if node.is_parameter))

    def open(self, place: Place, states: Iterator[Any], run: Run, key: int) -> Iterator[Item]:
        """Return the results from a place on. Threads begin to work.

        `place`: from `Item.after`, or `beginning`. `states`: the state of each plain source in turn, or None: from
        `SourceStates`. `run` owns what is opened. `key`: of what the nodes draw.
        """
        items, length = self.origin.open(place[0], states, run, key), 1
        for number, node in enumerate(self.nodes):
            skipped = place[length] if node.counts else 0
            items = node.open(items, Opening(place[:length], skipped, derive_key(key, number)), run)
            length += node.counts
        return items

    def check(self, place: Any) -> None:
        """Check that a place has the form of this chain's. Raises `StateMismatch` if it hasn't."""
        num_counted = sum(node.counts for node in self.nodes)
        if not isinstance(place, tuple) or len(place) != 1 + num_counted:
            raise StateMismatch(
                f"the place {place!r} of the state isn't one of this pipeline, which has {num_counted} stages that "
                f"count results; load it into a pipeline with the same stages"
            )
        if not all(isinstance(part, int) and part >= 0 for part in place[1:]):
            raise StateMismatch(f"the place {place!r} of the state has entries that are no counts")
        self.origin.check(place[0])

    def source_numbers(self, place: Place) -> list[int | None]:
        """Return how many items of each plain source come before a place; None: the source has ended."""
        return self.origin.source_numbers(place[0])

    @property
    def num_results(self) -> int | None:
        """How many results an epoch has; None if that isn't known."""
        number = self.origin.num_items
        for node in self.nodes:
            number = None if number is None else node.num_results(number)
        return number

    def describe(self) -> list[str]:
        """Return the lines of the graph, the origin's first."""
        return [*self.origin.describe(), *(node.describe() for node in self.nodes)]
