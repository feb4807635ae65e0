"""Where a pipeline's items come from: one source, or other pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from swift_loader.errors import StateMismatch
from swift_loader.pipeline import flows
from swift_loader.pipeline.functions import name_of
from swift_loader.pipeline.items import Item, Place
from swift_loader.pipeline.run import Run
from swift_loader.pipeline.sources import SourceStart, has_state, length_of, source_items
from swift_loader.sampling.permutation import derive_key

if TYPE_CHECKING:
    from swift_loader.pipeline.chain import Chain

__all__ = ["Gathered", "Merged", "Mixed", "Origin", "Plain"]


_BRANCH = 0xB
"""What a key is for."""


class Origin(Protocol):
    """Gives the items that go through the nodes."""

    @property
    def beginning(self) -> Any:
        """The first entry of the place where an epoch begins."""
        ...

    @property
    def num_items(self) -> int | None:
        """How many items an epoch has; None if that isn't known."""
        ...

    @property
    def is_exact(self) -> bool:
        """As `Chain.is_exact`."""
        ...

    @property
    def parameters(self) -> tuple[str, ...]:
        """As `Chain.parameters`."""
        ...

    def open(self, entry: Any, states: Iterator[Any], run: Run, key: int) -> Iterator[Item]:
        """Return the items from a place on, of which this is the first entry. `states` as in `Chain.open`."""
        ...

    def check(self, entry: Any) -> None:
        """Check the first entry of a place.

        Raises:
            StateMismatch: It isn't one of this origin.
        """
        ...

    def check_states(self, states: Iterator[Any]) -> None:
        """Check the states of the sources, as `open` takes them.

        Raises:
            StateMismatch: A source can't take its state.
        """
        ...

    def source_numbers(self, entry: Any) -> list[int | None]:
        """As `Chain.source_numbers`."""
        ...

    def describe(self) -> list[str]:
        """Return it in words."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """One source."""

    source: Any
    is_endless: bool

    beginning = 0
    is_exact = True
    parameters = ()

    @property
    def num_items(self) -> int | None:
        """The source's length, if it has one."""
        return length_of(self.source)

    def open(self, entry: Any, states: Iterator[Any], run: Run, key: int) -> Iterator[Item]:  # noqa: ARG002
        """Return the source's items. Pulls nothing yet."""
        start = SourceStart(entry, next(states, None))
        noted = run.note_source()
        items = source_items(self.source, start, run.epoch, is_endless=self.is_endless, states=noted, use_loop=run.loop)
        return run.counted(items, self.describe()[0])

    def check(self, entry: Any) -> None:
        """Check that it is a count."""
        if not isinstance(entry, int) or entry < 0:
            raise StateMismatch(f"the state says that {entry!r} items of the source came; that must be a count")

    def check_states(self, states: Iterator[Any]) -> None:
        """Check that the source has a way to take its state."""
        state = next(states, None)
        if state is not None and not has_state(self.source):
            kind = type(self.source).__name__
            raise StateMismatch(f"the state has one of the source, but a {kind} has no load_state_dict() to take it")

    def source_numbers(self, entry: Any) -> list[int | None]:
        """The entry is the number."""
        return [entry]

    def describe(self) -> list[str]:
        """Return it in words."""
        name = name_of(self.source) if callable(self.source) else type(self.source).__name__
        return [f"source {name}{', continuous' if self.is_endless else ''}"]


@dataclass(frozen=True, slots=True)
class Gathered:
    """What origins have in common that are made of pipelines.

    The first entry of a place is (number of items before it, whose turn is next, place of each pipeline or () if it
    has ended).
    """

    chains: tuple[Chain, ...]
    seeds: tuple[int | None, ...]
    """The seed that the user gave to each."""

    @property
    def is_exact(self) -> bool:
        """Whether all are."""
        return all(chain.is_exact for chain in self.chains)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Those of all."""
        return tuple(text for chain in self.chains for text in chain.parameters)

    @property
    def beginning(self) -> Place:
        """Nothing came, and all begin."""
        return (0, 0, *(chain.beginning for chain in self.chains))

    @property
    def num_items(self) -> int | None:
        """The sum."""
        total = 0
        for chain in self.chains:
            number = chain.num_results
            if number is None:
                return None
            total += number
        return total

    def open(self, entry: Any, states: Iterator[Any], run: Run, key: int) -> list[Iterator[Item] | None]:
        """Open all that haven't ended."""
        flows_of: list[Iterator[Item] | None] = []
        for number, (chain, place) in enumerate(zip(self.chains, entry[2:], strict=True)):
            if place:
                own_key = derive_key(key, _BRANCH, number, self.seeds[number] or 0)
                flows_of.append(chain.open(place, states, run, own_key))
            else:
                for _ in chain.source_numbers(chain.beginning):
                    next(states, None)
                    run.note_source()
                flows_of.append(None)
        return flows_of

    def check(self, entry: Any) -> None:
        """Check the counts, and each pipeline's place."""
        if not isinstance(entry, tuple) or len(entry) != 2 + len(self.chains):
            raise StateMismatch(f"the state's place {entry!r} isn't one of {len(self.chains)} pipelines")
        for chain, place in zip(self.chains, entry[2:], strict=True):
            if place != ():
                chain.check(place)

    def check_states(self, states: Iterator[Any]) -> None:
        """Check those of all pipelines."""
        for chain in self.chains:
            chain.origin.check_states(states)

    def source_numbers(self, entry: Any) -> list[int | None]:
        """Those of all pipelines."""
        numbers: list[int | None] = []
        for chain, place in zip(self.chains, entry[2:], strict=True):
            here = chain.source_numbers(place or chain.beginning)
            numbers += here if place else [None] * len(here)
        return numbers

    def describe(self, how: str) -> list[str]:
        """Return it in words."""
        lines = [how]
        for chain in self.chains:
            lines += [f"  {line}" for line in chain.describe()]
        return lines


@dataclass(frozen=True, slots=True)
class Merged:
    """One item of each pipeline in turn, or whatever comes first."""

    parts: Gathered
    in_turn: bool

    @property
    def is_exact(self) -> bool:
        """Whether the order is that of the pipelines."""
        return self.in_turn and self.parts.is_exact

    @property
    def parameters(self) -> tuple[str, ...]:
        """Those of the pipelines."""
        return ("merge", *self.parts.parameters)

    @property
    def beginning(self) -> Any:
        """See `Gathered`."""
        return self.parts.beginning

    @property
    def num_items(self) -> int | None:
        """The sum."""
        return self.parts.num_items

    def open(self, entry: Any, states: Iterator[Any], run: Run, key: int) -> Iterator[Item]:
        """Open the pipelines."""
        opened = self.parts.open(entry, states, run, key)
        if self.in_turn:
            return flows.in_turn(opened, list(entry[2:]), entry[1], entry[0])
        return run.gathered([flow for flow in opened if flow is not None], entry)

    def check(self, entry: Any) -> None:
        """See `Gathered`."""
        self.parts.check(entry)

    def check_states(self, states: Iterator[Any]) -> None:
        """See `Gathered`."""
        self.parts.check_states(states)

    def source_numbers(self, entry: Any) -> list[int | None]:
        """See `Gathered`."""
        return self.parts.source_numbers(entry)

    def describe(self) -> list[str]:
        """Return it in words."""
        return self.parts.describe("merge, in turn" if self.in_turn else "merge, as items come")


@dataclass(frozen=True, slots=True)
class Mixed:
    """A random pipeline's item each time."""

    parts: Gathered
    weights: tuple[float, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the pipelines are."""
        return self.parts.is_exact

    @property
    def parameters(self) -> tuple[str, ...]:
        """The weights, and those of the pipelines."""
        return (self.describe()[0], *self.parts.parameters)

    @property
    def beginning(self) -> Any:
        """See `Gathered`."""
        return self.parts.beginning

    @property
    def num_items(self) -> int | None:
        """The sum."""
        return self.parts.num_items

    def open(self, entry: Any, states: Iterator[Any], run: Run, key: int) -> Iterator[Item]:
        """Open the pipelines."""
        opened = self.parts.open(entry, states, run, key)
        return flows.mixed(opened, self.weights, derive_key(key, run.epoch), list(entry[2:]), entry[0])

    def check(self, entry: Any) -> None:
        """See `Gathered`."""
        self.parts.check(entry)

    def check_states(self, states: Iterator[Any]) -> None:
        """See `Gathered`."""
        self.parts.check_states(states)

    def source_numbers(self, entry: Any) -> list[int | None]:
        """See `Gathered`."""
        return self.parts.source_numbers(entry)

    def describe(self) -> list[str]:
        """Return it in words."""
        shares = ", ".join(f"{weight:g}" for weight in self.weights)
        return self.parts.describe(f"mix, weights {shares}")
