"""Other pipelines as the origin of one: merged or mixed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swift_loader.errors import StateMismatch
from swift_loader.pipeline import flows
from swift_loader.pipeline.items import Item, Place
from swift_loader.pipeline.run import Run
from swift_loader.sampling.permutation import derive_key

if TYPE_CHECKING:
    from swift_loader.pipeline.chain import Chain

_BRANCH = 0xB
"""What a key is for."""

Flows = list[Iterator[Item] | None]
"""The items of each pipeline; None: it has ended."""


@dataclass(frozen=True, slots=True)
class InTurn:
    """One item of each pipeline in turn."""

    is_exact = True
    """Whether the order is the same each time."""
    parameter = "merge"
    """What the meaning of a place depends on."""

    def open(self, opened: Flows, entry: Any, run: Run, key: int) -> Iterator[Item]:  # noqa: ARG002
        """Pull on the thread that pulls."""
        return flows.in_turn(opened, list(entry[2:]), entry[1], entry[0])

    def describe(self) -> str:
        """Return the line for the graph."""
        return "merge, in turn"


@dataclass(frozen=True, slots=True)
class AsReady:
    """Whatever comes first."""

    is_exact = False
    parameter = "merge"

    def open(self, opened: Flows, entry: Any, run: Run, key: int) -> Iterator[Item]:  # noqa: ARG002
        """Pull from each pipeline in a thread of its own."""
        return run.gathered([flow for flow in opened if flow is not None], entry)

    def describe(self) -> str:
        """Return the line for the graph."""
        return "merge, as items come"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A random pipeline's item each time."""

    is_exact = True
    weights: tuple[float, ...]
    """How often each is chosen, relative to the others."""

    @classmethod
    def of(cls, weights: Sequence[float] | None, num_pipelines: int) -> Drawn:
        """Check the weights. None: all the same.

        Raises `ValueError` unless there is a positive number for each pipeline.
        """
        chosen = [1.0] * num_pipelines if weights is None else [float(weight) for weight in weights]
        if len(chosen) != num_pipelines or not all(0 < weight < math.inf for weight in chosen):
            raise ValueError(f"weights={weights!r} must have a positive number for each of {num_pipelines} pipelines")
        return cls(tuple(chosen))

    @property
    def parameter(self) -> str:
        """The weights."""
        return self.describe()

    def open(self, opened: Flows, entry: Any, run: Run, key: int) -> Iterator[Item]:
        """Draw on the thread that pulls. Other draws in each epoch."""
        return flows.mixed(opened, self.weights, derive_key(key, run.epoch), list(entry[2:]), entry[0])

    def describe(self) -> str:
        """Return the line for the graph."""
        return f"mix, weights {', '.join(f'{weight:g}' for weight in self.weights)}"


Join = InTurn | AsReady | Drawn
"""Says whose item is next. Its `open` returns the items from a place on, of which `entry` is the first entry. `key`: of
draws."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """An origin that is made of pipelines.

    The first entry of a place is (number of items before it, whose turn is next, place of each pipeline or () if it
    has ended).
    """

    chains: tuple[Chain, ...]
    seeds: tuple[int | None, ...]
    """The seed that the user gave to each."""
    join: Join

    def __post_init__(self) -> None:
        if any(chain.origin.is_endless for chain in self.chains):
            raise ValueError("a continuous pipeline can't be merged or mixed, because its epochs have no end")

    is_endless = False

    @property
    def is_exact(self) -> bool:
        """Whether the order is the same each time, in all pipelines and among them."""
        return self.join.is_exact and all(chain.is_exact for chain in self.chains)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Those of the join and of all pipelines."""
        return (self.join.parameter, *(text for chain in self.chains for text in chain.parameters))

    @property
    def beginning(self) -> Place:
        """Nothing came, and all begin."""
        return (0, 0, *(chain.beginning for chain in self.chains))

    @property
    def num_items(self) -> int | None:
        """The sum; None if one of them isn't known."""
        total = 0
        for chain in self.chains:
            number = chain.num_results
            if number is None:
                return None
            total += number
        return total

    def open(self, entry: Any, states: Iterator[Any], run: Run, key: int) -> Iterator[Item]:
        """Open the pipelines that haven't ended."""
        opened: Flows = []
        for number, (chain, place) in enumerate(zip(self.chains, entry[2:], strict=True)):
            if place:
                own_key = derive_key(key, _BRANCH, number, self.seeds[number] or 0)
                branch = chain.open(place, states, run, own_key)
                opened.append(flows.told(branch, f"{self.join.describe()}, pipeline {number}"))
            else:
                for _ in chain.source_numbers(chain.beginning):
                    next(states, None)
                    run.note_source()
                for line in chain.describe():
                    if line.lstrip().startswith("map "):
                        run.policy(line, None, skips=True)  # takes what the state has of the ended stage
                opened.append(None)
        for policy in run.tally.policies:
            policy.places = None  # they say nothing about places of all
        return self.join.open(opened, entry, run, key)

    def check(self, entry: Any) -> None:
        """Check the number of pipelines, and each one's place."""
        if not isinstance(entry, tuple) or len(entry) != 2 + len(self.chains):
            raise StateMismatch(f"the state's place {entry!r} isn't one of {len(self.chains)} pipelines")
        for chain, place in zip(self.chains, entry[2:], strict=True):
            if place != ():
                chain.check(place)

    def check_states(self, states: Iterator[Any]) -> None:
        """Check those of all pipelines, in their order."""
        for chain in self.chains:
            chain.origin.check_states(states)

    def source_numbers(self, entry: Any) -> list[int | None]:
        """Return those of all pipelines, in their order."""
        numbers: list[int | None] = []
        for chain, place in zip(self.chains, entry[2:], strict=True):
            here = chain.source_numbers(place or chain.beginning)
            numbers += here if place else [None] * len(here)
        return numbers

    def set_epoch(self, epoch: int) -> None:
        """Tell the sources of all pipelines."""
        for chain in self.chains:
            chain.origin.set_epoch(epoch)

    @property
    def has_epochs(self) -> bool:
        """Whether a source of a pipeline has `set_epoch`."""
        return any(chain.origin.has_epochs for chain in self.chains)

    def describe(self) -> list[str]:
        """Return a line for the join, then those of each pipeline."""
        return [self.join.describe(), *(f"  {line}" for chain in self.chains for line in chain.describe())]
