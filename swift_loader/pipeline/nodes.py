"""What a pipeline is made of, after its sources: frozen descriptions that check themselves, and open as parts of a run.

Those here need no workers: they run on the thread of whoever pulls. `maps` has the one with workers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from swift_loader.checks import check_flag, check_integer, check_optional_integer
from swift_loader.pipeline.functions import Function, Kind, awaited
from swift_loader.pipeline.run import PipelineRun, counted
from swift_loader.pipeline.stage import Filler, Item, Opening, Passes, Place, Relay
from swift_loader.pipeline.tally import StageStats, explained
from swift_loader.ranks.ranks import Ranks, find_ranks
from swift_loader.sampling.permutation import derive_key

_SHUFFLE = 0x5F
"""What draws are for."""


class Node:
    """A part of a pipeline, after its source."""

    is_parameter = False
    """Whether places mean something else with other parameters of this node."""
    counts = False
    """Whether places have an entry for its results; see `stage`."""
    is_exact = True
    """Whether results come in the order of the items."""
    keeps_number = False
    """Whether there are as many results as items."""
    is_even = False
    """Whether as many items give as many results on each rank. Then all ranks are at the same place."""

    def open(self, passes: Passes, opening: Opening, run: PipelineRun) -> Passes:
        """Return its results in a run. Its threads begin to work."""
        return self.flows(passes, opening, run.tally.note(self.describe()))

    def flows(self, passes: Passes, opening: Opening, stats: StageStats | None = None) -> Passes:
        """Return its results, epoch by epoch. They are counted, unless `stats` is None."""
        for items in passes:
            flow = self.flow(items, opening)
            yield flow if stats is None else counted(flow, stats)
            opening = opening.following()

    def flow(self, items: Iterable[Item], opening: Opening) -> Iterator[Item]:
        """Return its results for the items of an epoch."""
        raise NotImplementedError

    def num_results(self, num_items: int) -> int | None:
        """Return how many results so many items have, at most; None if that isn't known."""
        return num_items if self.keeps_number else None

    def describe(self) -> str:
        """Return its line in the graph: what it does, and with which parameters."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FilterNode(Node):
    """Keeps the items for which a function returns true."""

    predicate: Function

    def __post_init__(self) -> None:
        name, kind = self.predicate.name, self.predicate.kind
        if kind is not Kind.FUNCTION:  # what it returns would be true for each item
            raise TypeError(
                f"filter needs a plain function, but {name} is a {kind.value}; use map() with one that returns None "
                f"for what is to be left out, and drop_none()"
            )

    def flow(self, items: Iterable[Item], opening: Opening) -> Iterator[Item]:
        """An error of the function names the stage and the item."""
        for item, number in zip(items, opening.numbers, strict=False):
            try:
                is_kept = awaited(self.predicate.call(item.value))
            except Exception as error:
                raise explained(error, self.describe(), number)  # noqa: B904 - it has its causes
            if is_kept:
                yield item

    def describe(self) -> str:
        """Return the function's name."""
        return f"filter {self.predicate.name}"


@dataclass(frozen=True, slots=True)
class DropNoneNode(Node):
    """Leaves out items that are None: what a function returned that has no result for its item."""

    keeps_number = True

    def open(self, passes: Passes, opening: Opening, run: PipelineRun) -> Passes:  # noqa: ARG002
        """It isn't counted: it belongs to the stage before it."""
        return self.flows(passes, opening)

    def flow(self, items: Iterable[Item], opening: Opening) -> Iterator[Item]:  # noqa: ARG002
        """Look at each value."""
        return (item for item in items if item.value is not None)

    def describe(self) -> str:
        """Return the same for all: it has no parameters."""
        return "leave out None"


@dataclass(frozen=True, slots=True)
class BatchNode(Node):
    """Collects items in lists. With `drop_last`, leaves out a list that isn't full."""

    batch_size: int
    drop_last: bool
    is_even = True

    def __post_init__(self) -> None:
        check_integer("batch_size", self.batch_size, 1)
        check_flag("drop_last", self.drop_last)

    def flow(self, items: Iterable[Item], opening: Opening) -> Iterator[Item]:  # noqa: ARG002
        """A list has the place of its last item."""
        values: list[Any] = []
        after: Place = ()
        for value, after in items:
            values.append(value)
            if len(values) == self.batch_size:
                yield Item(values, after)
                values = []
        if values and not self.drop_last:
            yield Item(values, after)

    def num_results(self, num_items: int) -> int | None:
        """Full batches, and maybe one more."""
        return num_items // self.batch_size if self.drop_last else math.ceil(num_items / self.batch_size)

    def describe(self) -> str:
        """Return the length of the lists."""
        return f"batch {self.batch_size}{', drop last' if self.drop_last else ''}"


def gives_names(value: Any) -> bool:
    """Return whether iterating over a value gives letters, keys, or columns: of pandas, polars and pyarrow."""
    is_frame = any(hasattr(value, name) for name in ("iterrows", "iter_rows", "itercolumns"))
    return is_frame or isinstance(value, (Mapping, str, bytes))


@dataclass(frozen=True, slots=True)
class UnbatchNode(Node):
    """Gives the elements of each item. The items' values are iterables, whose errors name the item."""

    counts = True

    def flow(self, items: Iterable[Item], opening: Opening) -> Iterator[Item]:
        """The first `opening.num_skipped` elements of the first item are left out."""
        before, num_skipped = opening.start, opening.num_skipped
        for item, position in zip(items, opening.numbers, strict=False):
            try:
                is_iterable = isinstance(item.value, Iterable) or hasattr(item.value, "__getitem__")
                if not is_iterable or gives_names(item.value):
                    raise TypeError(
                        f"unbatch() needs items that are lists or other iterables of elements, but item {position} is "
                        f"a {type(item.value).__name__}; make a list of it with map() before"
                    )
                for number, value in enumerate(item.value, 1):
                    if number > num_skipped:
                        yield Item(value, (*before, number))
            except Exception as error:
                raise explained(error, "unbatch", position)  # noqa: B904 - it has its causes
            before, num_skipped = item.after, 0

    def describe(self) -> str:
        """Return the same for all: it has no parameters."""
        return "unbatch"


@dataclass(frozen=True, slots=True)
class ShuffleNode(Node):
    """Gives each time a random one of the next `buffer_size` items."""

    buffer_size: int
    counts = True
    is_parameter = True
    keeps_number = True
    is_even = True

    def __post_init__(self) -> None:
        check_integer("buffer_size", self.buffer_size, 1)

    def flow(self, items: Iterable[Item], opening: Opening) -> Iterator[Item]:
        """It always starts where the epoch began, because what waits depends on all items before."""
        base = derive_key(derive_key(opening.key, opening.epoch), _SHUFFLE)
        for number, value in enumerate(self._drawn(items, base), 1):
            if number > opening.num_skipped:
                yield Item(value, (*opening.start, number))

    def _drawn(self, items: Iterable[Item], base: int) -> Iterator[Any]:
        waiting: list[Any] = []
        num_results = 0
        for item in items:
            if len(waiting) < self.buffer_size:
                waiting.append(item.value)
                continue
            chosen = derive_key(base, num_results) % self.buffer_size
            value, waiting[chosen] = waiting[chosen], item.value
            num_results += 1
            yield value
        while waiting:
            chosen = derive_key(base, num_results) % len(waiting)
            waiting[chosen], waiting[-1] = waiting[-1], waiting[chosen]
            num_results += 1
            yield waiting.pop()

    def describe(self) -> str:
        """Return the size of the buffer."""
        return f"shuffle, buffer of {self.buffer_size}"


@dataclass(frozen=True, slots=True)
class PrefetchNode(Node):
    """Works ahead of downstream, in a thread."""

    num_items: int
    timeout_s: float | None
    keeps_number = True
    is_even = True

    def __post_init__(self) -> None:
        check_integer("buffer_size", self.num_items, 1)

    def open(self, passes: Passes, opening: Opening, run: PipelineRun) -> Passes:
        """Begin to pull. At most `num_items` wait for downstream."""
        stats = run.tally.note("prefetch")
        relay: Relay[Item] = Relay(self.num_items, timeout_s=self.timeout_s, late="no item came", state=run.tally)
        run.fill(relay, [Filler(passes, relay, stats)])
        return self.flows(relay.passes(), opening, stats)

    def flow(self, items: Iterable[Item], opening: Opening) -> Iterator[Item]:  # noqa: ARG002
        """Pass them on."""
        return iter(items)

    def describe(self) -> str:
        """Return how many items wait."""
        return f"prefetch {self.num_items}"


@dataclass(frozen=True, slots=True)
class CacheNode(Node):
    """Gives the first items again and again. Upstream isn't pulled any more once `num_items` came."""

    num_items: int
    stop_after: int | None
    """How many results there are; None: without end."""
    counts = True
    is_parameter = True
    is_even = True

    def __post_init__(self) -> None:
        check_integer("num_items", self.num_items, 1)
        check_optional_integer("stop_after", self.stop_after, 0)

    def flows(self, passes: Passes, opening: Opening, stats: StageStats | None = None) -> Passes:
        """Of all epochs, it makes one."""
        return Node.flows(self, iter((itertools.chain.from_iterable(passes),)), opening, stats)

    def flow(self, items: Iterable[Item], opening: Opening) -> Iterator[Item]:
        """Keep items in memory."""
        kept = list(itertools.islice((item.value for item in items), self.num_items))
        values = itertools.islice(itertools.cycle(kept), opening.num_skipped, self.stop_after)
        for number, value in enumerate(values, opening.num_skipped + 1):
            yield Item(value, (*opening.start, number))

    def num_results(self, num_items: int) -> int | None:
        """As many as asked for."""
        return 0 if not num_items else self.stop_after

    def describe(self) -> str:
        """Return how many items are kept."""
        return f"cache of {self.num_items}"


@dataclass(frozen=True, slots=True)
class ShardNode(Node):
    """Keeps the items of one rank: every `world_size`-th one. The items are the same ones on all ranks."""

    rank: int | None
    """None: as torch.distributed or the launcher says when a pass begins. So is the world size."""
    world_size: int | None
    is_equal: bool
    """The items after the last full round are left out, so that all ranks get the same number."""
    is_even = True

    @property
    def ranks(self) -> Ranks:
        """The rank and the world size now."""
        found = find_ranks(self.rank, self.world_size)
        return found if None in (self.rank, self.world_size) else replace(found, source="shard()")

    def flow(self, items: Iterable[Item], opening: Opening) -> Iterator[Item]:  # noqa: ARG002
        """Wait for the last item of a round, so that all ranks go on."""
        held: Any = None
        number, ranks = 0, self.ranks
        after: Place = ()
        for value, after in items:
            if number == ranks.rank:
                held = value
            number += 1
            if number == ranks.world_size:
                yield Item(held, after)
                held, number = None, 0
        if number > ranks.rank and not self.is_equal:
            yield Item(held, after)

    def num_results(self, num_items: int) -> int | None:
        """Its share."""
        rounds, rest = divmod(num_items, self.ranks.world_size)
        return rounds + (not self.is_equal and rest > self.ranks.rank)

    def describe(self) -> str:
        """Return the rank, and whether all ranks get equally many."""
        return f"shard {self.ranks.rank} of {self.ranks.world_size}{', equal' if self.is_equal else ''}"
