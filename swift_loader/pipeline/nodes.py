"""What a pipeline is made of: frozen descriptions that check themselves, and open as parts of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from swift_loader.checks import check_flag, check_integer, check_optional_integer
from swift_loader.pipeline import flows
from swift_loader.pipeline.functions import Kind, kind_of, name_of
from swift_loader.pipeline.items import Item, Place
from swift_loader.pipeline.run import Run
from swift_loader.sampling.permutation import derive_key


@dataclass(frozen=True, slots=True)
class Opening:
    """Where a node begins."""

    start: Place
    """The place of what comes in."""
    num_skipped: int = 0
    """How many results a counting node leaves out."""
    key: int = 0
    """Of what it draws."""


class Node:
    """A part of a pipeline, after its source."""

    is_parameter = False
    """Whether places mean something else with other parameters of this node."""

    @property
    def counts(self) -> bool:
        """Whether places have an entry for its results; see `items`."""
        return False

    @property
    def is_exact(self) -> bool:
        """Whether results come in the order of the items."""
        return True

    def open(self, items: Iterator[Item], opening: Opening, run: Run) -> Iterator[Item]:
        """Return its results in a run. Its threads begin to work."""
        raise NotImplementedError

    def num_results(self, num_items: int) -> int | None:  # noqa: ARG002
        """Return how many results so many items have; None if that isn't known."""
        return None

    def describe(self) -> str:
        """Return its line in the graph: what it does, and with which parameters."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Filter(Node):
    """Keeps the items for which a function returns true."""

    predicate: Callable[[Any], bool]

    def __post_init__(self) -> None:
        if not callable(self.predicate):
            raise TypeError(f"filter needs a function, but {self.predicate!r} can't be called")
        kind = kind_of(self.predicate)
        if kind is not Kind.FUNCTION:  # what it returns would be true for each item
            raise TypeError(
                f"filter needs a plain function, but {name_of(self.predicate)} is a {kind.value}; use map() with one "
                f"that returns None for what is to be left out, and drop_none()"
            )

    def open(self, items: Iterator[Item], opening: Opening, run: Run) -> Iterator[Item]:  # noqa: ARG002
        """Filter on the thread that pulls."""
        return run.counted(flows.filtered(items, self.predicate, self.describe()), self.describe())

    def describe(self) -> str:
        """Return the predicate's name."""
        return f"filter {name_of(self.predicate)}"


@dataclass(frozen=True, slots=True)
class DropNone(Node):
    """Leaves out items that are None: what a function returned that has no result for its item."""

    def open(self, items: Iterator[Item], opening: Opening, run: Run) -> Iterator[Item]:  # noqa: ARG002
        """Filter on the thread that pulls."""
        return flows.filtered(items, lambda value: value is not None, self.describe())

    def num_results(self, num_items: int) -> int | None:
        """As many as items, at most."""
        return num_items

    def describe(self) -> str:
        """Return the same for all: it has no parameters."""
        return "leave out None"


@dataclass(frozen=True, slots=True)
class Batch(Node):
    """Collects items in lists."""

    batch_size: int
    drop_last: bool

    def __post_init__(self) -> None:
        check_integer("batch_size", self.batch_size, 1)
        check_flag("drop_last", self.drop_last)

    def open(self, items: Iterator[Item], opening: Opening, run: Run) -> Iterator[Item]:  # noqa: ARG002
        """Collect on the thread that pulls."""
        return run.counted(flows.batched(items, self.batch_size, drop_last=self.drop_last), self.describe())

    def num_results(self, num_items: int) -> int | None:
        """Full batches, and maybe one more."""
        return num_items // self.batch_size if self.drop_last else math.ceil(num_items / self.batch_size)

    def describe(self) -> str:
        """Return the length of the lists."""
        return f"batch {self.batch_size}{', drop last' if self.drop_last else ''}"


@dataclass(frozen=True, slots=True)
class Unbatch(Node):
    """Gives the elements of each item."""

    counts = True

    def open(self, items: Iterator[Item], opening: Opening, run: Run) -> Iterator[Item]:
        """Unpack on the thread that pulls."""
        return run.counted(flows.unbatched(items, opening.start, opening.num_skipped), self.describe())

    def describe(self) -> str:
        """Return the same for all: it has no parameters."""
        return "unbatch"


@dataclass(frozen=True, slots=True)
class Shuffle(Node):
    """Gives items in a random order, by way of a buffer."""

    buffer_size: int
    counts = True
    is_parameter = True

    def __post_init__(self) -> None:
        check_integer("buffer_size", self.buffer_size, 1)

    def open(self, items: Iterator[Item], opening: Opening, run: Run) -> Iterator[Item]:
        """Shuffle on the thread that pulls."""

        def key(epoch: int) -> int:
            return derive_key(opening.key, epoch)

        mixed = flows.shuffled(items, self.buffer_size, key, run.epoch, opening.start, opening.num_skipped)
        return run.counted(mixed, self.describe())

    def num_results(self, num_items: int) -> int | None:
        """As many as items."""
        return num_items

    def describe(self) -> str:
        """Return the size of the buffer."""
        return f"shuffle, buffer of {self.buffer_size}"


@dataclass(frozen=True, slots=True)
class Prefetch(Node):
    """Works ahead of downstream."""

    num_items: int
    timeout_s: float | None

    def __post_init__(self) -> None:
        check_integer("buffer_size", self.num_items, 1)

    def open(self, items: Iterator[Item], opening: Opening, run: Run) -> Iterator[Item]:  # noqa: ARG002
        """Pull ahead in a thread."""
        return run.prefetched(items, self.num_items, self.timeout_s)

    def num_results(self, num_items: int) -> int | None:
        """As many as items."""
        return num_items

    def describe(self) -> str:
        """Return how many items wait."""
        return f"prefetch {self.num_items}"


@dataclass(frozen=True, slots=True)
class Cache(Node):
    """Gives the first items again and again."""

    num_items: int
    stop_after: int | None
    counts = True
    is_parameter = True

    def __post_init__(self) -> None:
        check_integer("num_items", self.num_items, 1)
        check_optional_integer("stop_after", self.stop_after, 0)

    def open(self, items: Iterator[Item], opening: Opening, run: Run) -> Iterator[Item]:
        """Keep items in memory."""
        kept = flows.cached(items, self.num_items, self.stop_after, opening.start, opening.num_skipped)
        return run.counted(kept, self.describe())

    def num_results(self, num_items: int) -> int | None:
        """As many as asked for."""
        return 0 if not num_items else self.stop_after

    def describe(self) -> str:
        """Return how many items are kept."""
        return f"cache of {self.num_items}"


@dataclass(frozen=True, slots=True)
class Shard(Node):
    """Keeps the items of one rank."""

    rank: int
    world_size: int
    is_equal: bool

    def __post_init__(self) -> None:
        check_integer("world_size", self.world_size, 1)
        check_integer("rank", self.rank, 0, self.world_size - 1)

    def open(self, items: Iterator[Item], opening: Opening, run: Run) -> Iterator[Item]:  # noqa: ARG002
        """Leave items out on the thread that pulls."""
        kept = flows.of_rank(items, self.rank, self.world_size, is_equal=self.is_equal)
        return run.counted(kept, self.describe())

    def num_results(self, num_items: int) -> int | None:
        """Its share."""
        rounds, rest = divmod(num_items, self.world_size)
        return rounds + (not self.is_equal and rest > self.rank)

    def describe(self) -> str:
        """Return the rank, and whether all ranks get equally many."""
        return f"shard {self.rank} of {self.world_size}{', equal' if self.is_equal else ''}"
