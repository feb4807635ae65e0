"""Where items come from, from any one on: any source, or other pipelines. And the chain of a pipeline's stages."""

from __future__ import annotations

import asyncio
import copy
import itertools
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from inspect import GEN_CREATED, getgeneratorstate
from types import GeneratorType
from typing import Any, NamedTuple

from swift_loader.batch.digests import digest_of, leaves_of
from swift_loader.errors import LoaderClosed, StateMismatch
from swift_loader.pipeline.functions import name_of
from swift_loader.pipeline.nodes import Node, ShardNode, ShuffleNode, gives_names
from swift_loader.pipeline.run import PipelineRun, SourceBegin, SourceStates
from swift_loader.pipeline.stage import Filler, Item, LoopRelay, Opening, Passes, Place, Relay
from swift_loader.pipeline.tally import explained
from swift_loader.sampling.mixture import Changes, MixPhase
from swift_loader.sampling.permutation import derive_key
from swift_loader.worker.mapped import read_in_order
from swift_loader.worker.stream import forget_state, has_exact_state, is_huggingface
from swift_loader.worker.torch_worker import is_stateful

_NOTHING = object()

_BRANCH = 0xB
"""What a key is for."""

STATE_EVERY = 16
"""The source's state is taken before each so many items. The items after it are drawn again on a resume."""

MAX_DRAWN = 16
"""How many items of an async source are drawn ahead."""


def length_of(source: Any) -> int | None:
    """Return the length of a source that has an index, so that continuing is O(1); None for others.

    One that is also iterated over continues by its index only if `begins_alike`.
    """
    torch = sys.modules.get("torch.utils.data")
    streams = Iterator if torch is None else (Iterator, torch.IterableDataset)  # this one inherits `__getitem__`
    is_stream = isinstance(source, streams) or hasattr(source, "keys") or has_exact_state(source)
    is_iterated = isinstance(source, Iterable) and not isinstance(source, Sequence)
    if (is_iterated and is_stream) or not hasattr(source, "__getitem__"):
        return None
    try:
        return len(source)
    except Exception:  # whoever needs it meets the error again
        return None


def begins_alike(source: Any) -> bool:
    """Return whether iterating over a source gives what its index does, as far as the first two items tell."""
    try:
        items = (itertools.islice(source, 2), (source[number] for number in range(min(2, len(source)))))
        first, same = ([[(path, digest_of(leaf)) for path, leaf in leaves_of(item)] for item in some] for some in items)
    except Exception:  # it isn't an index of numbers
        return False
    return first == same


def state_of(source: Any) -> Any:
    """Return the source's state, which stays as it is now."""
    return copy.deepcopy(source.state_dict())


@dataclass(slots=True)
class Past:
    """What earlier passes over a source gave. The source's thread writes."""

    has_given: bool = False
    """Whether one of them gave items."""
    has_loaded: bool = False
    """Whether the source was given a state."""
    is_used_up: bool = False
    """Whether the source didn't begin anew since."""


class SourceReader:
    """Reads a source in a run, on the thread that pulls. An async source is drawn by the event loop's thread."""

    def __init__(self, plain: Plain, states: SourceStates, run: PipelineRun, epoch: int) -> None:
        """Read this source. `states` get the source's states."""
        self._plain = plain
        self._source = source = plain.source
        self._past = plain.past
        (self._name,) = plain.describe()
        self._states = states
        self._has_state = has_exact_state(source)
        self._is_endless = plain.is_endless
        self._tells_epochs = plain.is_endless and run.tells_epochs and hasattr(source, "set_epoch")
        self._epoch = epoch
        self._stats = run.tally.note(self._name)
        self._loop = run.event_loop.enter() if hasattr(source, "__aiter__") else None
        self._number = 0
        """Of the item that comes next, for errors."""
        self._is_iterated = False
        """Whether an epoch went over the source by `iter`, and not by its index."""
        self._num_drawn = 0
        """How many items of the epoch were drawn."""
        self._num_left_out = 0
        """How many of them are left out."""

    def passes(self, num_before: int) -> Passes:
        """Return the items. `num_before`: how many of the first epoch are left out."""
        begin, has_more = self._states.begin, True
        try:
            while has_more:
                yield self._items(num_before, begin)
                self._epoch += 1
                if self._tells_epochs:
                    self._source.set_epoch(self._epoch)
                if self._has_state and self._is_iterated:
                    self._states.note((self._epoch, 0), state_of(self._source))
                num_before, begin, has_more = 0, None, self._is_endless
        except Exception as error:
            raise explained(error, self._name, self._number)  # noqa: B904 - it has its causes

    def _items(self, num_before: int, begin: SourceBegin | None) -> Iterator[Item]:
        self._number = num_before
        try:
            for number, value in self._numbered(num_before, begin):
                self._number = number
                self._stats.num_out += 1
                self._past.has_given = True
                yield Item(value, (number,))
            if not self._number and self._past.has_given and not self._plain.is_iterator:  # else it has been told
                self._past.is_used_up = self._states.lengths[self._epoch] is None
        except Exception as error:
            raise explained(error, self._name, self._number)  # noqa: B904 - it has its causes
        finally:
            if isinstance(self._source, GeneratorType):  # else it ends when its references do
                self._source.close()

    def _numbered(self, num_before: int, begin: SourceBegin | None) -> Iterator[tuple[int, Any]]:
        """Return the items after so many, with their numbers from 1 on. `begin`: a state before one of them."""
        source, num_drawn, lengths = self._source, 0, self._states.lengths
        length = lengths[self._epoch] = lengths.get(self._epoch) or length_of(source)
        is_iterated = (isinstance(source, Iterable) or self._loop is not None) and not isinstance(source, Sequence)
        if not is_iterated or (length is not None and num_before and begins_alike(source)):
            return enumerate(read_in_order(source, range(num_before, length or len(source))), num_before + 1)
        self._is_iterated = True
        begin = begin if self._has_state else None  # an older state may have one that isn't exact
        if num_before and begin is None and self._past.has_given and self._plain.is_iterator:
            raise StateMismatch(
                f"the source is an iterator ({type(source).__name__}) that has given items already, and it can't go "
                f"back to a state; load the state into a new pipeline with a new iterator"
            )
        if begin is not None and (begin[0] or not is_huggingface(source)):  # else it is that of the end of an epoch
            num_drawn, state = begin
            self._past.has_loaded = True
            source.load_state_dict(state)
        elif self._past.has_loaded:
            forget_state(source)
        self._num_drawn, self._num_left_out = num_drawn, num_before
        values = self._values()
        if begin is not None and not num_drawn:  # the source gave that state between two epochs
            first = next(values, _NOTHING)
            # Some begin the next epoch with it; others say that nothing is left, and begin it with the next pass.
            values = self._values() if first is _NOTHING else itertools.chain([first], values)
        return itertools.islice(enumerate(values, num_drawn + 1), max(0, num_before - num_drawn), None)

    def _values(self) -> Iterator[Any]:
        """Return what one pass over the source gives."""
        says_place = self._has_state and getattr(self._source, "is_exact", True)
        if self._loop is not None:
            return self._drawn(self._loop, self if says_place else None)
        values = iter(self._source)
        if isinstance(values, GeneratorType) and getgeneratorstate(values) != GEN_CREATED and self._past.has_given:
            self._past.is_used_up = True
        return self._noted(values) if says_place else values

    def _noted(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.note_drawn()
            yield value

    def _drawn(self, loop: asyncio.AbstractEventLoop, noting: SourceReader | None) -> Iterator[Any]:
        relay = _SourceRelay(loop, noting)
        relay.source = aiter(self._source)
        drawing = asyncio.run_coroutine_threadsafe(relay.pour_async(), loop)
        closed = LoaderClosed("the pipeline was closed while its source began an epoch")
        drawing.add_done_callback(lambda _: relay.end(closed))  # a task that is cancelled before it begins ends nothing
        if self._stats.tally.ended_s:  # the loop may have stopped before
            relay.end(closed)
        try:
            yield from relay
        finally:
            drawing.cancel()

    def note_drawn(self) -> None:
        """Count an item, and take the state behind it if it is time to. On the thread that draws."""
        self._num_drawn += 1
        num_new = self._num_drawn - self._num_left_out
        if num_new > 0 and not (num_new - 1) % STATE_EVERY:
            self._states.note((self._epoch, self._num_drawn), state_of(self._source))


class _SourceRelay(LoopRelay[Any]):
    """What the event loop draws of an async source. The source is ahead of what is taken out of here."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reader: SourceReader | None) -> None:
        super().__init__(MAX_DRAWN, loop)
        self._reader = reader

    def note(self, thing: Any) -> None:  # noqa: ARG002
        """Count an item."""
        if self._reader is not None:
            self._reader.note_drawn()


def check_source(source: Any) -> None:
    """Check that items can come from it. Raises `TypeError` if they can't."""
    has_index = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if not (isinstance(source, Iterable) or hasattr(source, "__aiter__") or has_index):
        raise TypeError(
            f"the source is a {type(source).__name__}; it must be an iterable, an async iterable, or have "
            f"__getitem__ and __len__"
        )
    if gives_names(source) and not isinstance(source, Mapping):  # whoever gives a dict may want its keys
        raise TypeError(
            f"the source is a {type(source).__name__}, which gives letters or columns, and no samples; give a list of "
            f"what the items are, such as paths or rows"
        )


# What a pipeline begins with: a source, or other pipelines. And all that it is made of.


ShardPlace = tuple[int | None, int] | None
"""The ranks that have a place in common: the rank (None: all of them) of how many. None: any ranks."""


class Split(NamedTuple):
    """A `shard`, and what the stages around it do."""

    shard: ShardNode
    is_shuffled: bool = False
    """Whether they shuffle before it."""
    is_even: bool = True
    """Whether ranks that gave equally many results are at the same place."""
    counts: bool = False
    """Whether places count results of a rank."""

    @property
    def place(self) -> ShardPlace:
        """Which ranks can continue at a place of this one."""
        ranks = self.shard.ranks
        if self.is_even and not self.counts:
            return None
        return None if self.is_even else ranks.rank, ranks.world_size

    @property
    def ends_together(self) -> bool:
        """Whether nothing is left for any rank if nothing is left for this one."""
        return (self.is_even and self.shard.is_equal) or self.shard.ranks.world_size == 1

    def check(self, saved: ShardPlace) -> None:
        """Check that this rank can continue at a place."""
        own = self.place
        if saved is None or own is None or saved in (own, (None, own[1])):
            return
        if saved[1] > 1 or self.counts:  # else all items before the place came
            each = "" if saved[0] is None else ", each with the state that it saved,"
            raise StateMismatch(
                f"the state was saved on rank {saved[0] or 0} of {saved[1]}, but this is {self.shard.describe()}. Its "
                f"place is one of that rank only, because there are stages after shard() that mix items, leave some "
                f"out or give several. Continue on as many ranks{each} or at the end of an epoch, or call shard() "
                f"after these stages"
            )


WHOLE = Split(ShardNode(0, 1, is_equal=True), counts=True)
"""A pipeline without a `shard`."""


@dataclass(frozen=True, slots=True)
class Plain:
    """One source."""

    source: Any
    is_endless: bool
    past: Past = field(default_factory=Past, compare=False)

    beginning = 0
    parameters = ()

    @property
    def splits(self) -> list[Split]:
        """Those of a pipeline that is the source, of which places count the results."""
        chain = getattr(self.source, "_chain", None)
        return [split._replace(counts=True) for split in chain.splits] if isinstance(chain, Chain) else []

    @property
    def is_exact(self) -> bool:
        """Whether it gives the same items in the same order each time. A pipeline as a source knows."""
        return bool(getattr(self.source, "is_exact", True))

    @property
    def is_iterator(self) -> bool:
        """Whether the source can be iterated over only once."""
        return isinstance(self.source, (Iterator, AsyncIterator))

    @property
    def num_items(self) -> int | None:
        """The source's length, if it has one."""
        try:
            return len(self.source)
        except (TypeError, NotImplementedError):
            return None

    @property
    def plains(self) -> list[Plain]:
        """Itself."""
        return [self]

    def open(self, entry: Any, states: Iterator[SourceStates], run: PipelineRun, key: int, epoch: int) -> Passes:  # noqa: ARG002
        """Return the source's items. Pulls nothing yet."""
        return SourceReader(self, next(states), run, epoch).passes(entry)

    def check(self, entry: Any) -> None:
        """Check that it is a count."""
        if not isinstance(entry, int) or entry < 0:
            raise StateMismatch(f"the state says that {entry!r} items of the source came; that must be a count")

    def check_state(self, state: Any) -> None:
        """Check that the source has a way to take its state, if there is one."""
        if state is not None and not is_stateful(self.source):
            kind = type(self.source).__name__
            raise StateMismatch(f"the state has one of the source, but a {kind} has no load_state_dict() to take it")

    def length(self, saved: int | None) -> int | None:
        """Return the source's length, if items can be had by their numbers. It must be the saved one; None: any."""
        present = length_of(self.source)
        if None not in (saved, present) and saved != present:
            raise StateMismatch(
                f"the state is of a source with {saved} items, but this {type(self.source).__name__} has {present}, so "
                f"the run can't continue exactly. Give the same source, or start a new run without load_state_dict()"
            )
        return present

    def sources_at(self, entry: Any, epoch: int) -> list[tuple[int, int | None]]:
        """Return each plain source's epoch, and how many of its items come before an entry; None: it has ended."""
        return [(epoch, entry)]

    def describe(self) -> list[str]:
        """Return one line: the source's class, or the function's name."""
        name = name_of(self.source) if callable(self.source) else type(self.source).__name__
        return [f"source {name}{', continuous' if self.is_endless else ''}"]


class Join(Enum):
    """Says whose item is next."""

    IN_TURN = "merge, in turn"
    """One item of each pipeline in turn, on the thread that pulls."""
    AS_READY = "merge, as items come"
    """Each pipeline has a thread of its own."""
    BY_WEIGHT = "mix"
    """Each pipeline has its share of any number of items. On the thread that pulls."""


class OnEnd(Enum):
    """Says what a mix does when a pipeline ends."""

    CONTINUE = "continue"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Gathered:
    """An origin that is made of pipelines.

    The first entry of a place is (number of items before it, turn, a place of each pipeline or () if it has ended).
    The turn is whose is next. In a mix, it is the segment of constant weights: (number of items before it, weights,
    what each pipeline should have had more before it). A pipeline's place begins with how often it was repeated.
    """

    chains: tuple[Chain, ...]
    seeds: tuple[int | None, ...]
    """The seed that the user gave to each."""
    join: Join
    names: tuple[str, ...]
    changes: Changes = ()
    """The weights of a mix, by the number of items before."""
    on_end: OnEnd = OnEnd.CONTINUE

    @property
    def is_endless(self) -> bool:
        """Whether one of them begins again and again."""
        return any(chain.origin.is_endless for chain in self.chains)

    @property
    def is_exact(self) -> bool:
        """Whether the order is the same each time, in all pipelines and among them."""
        return self.join is not Join.AS_READY and all(chain.is_exact for chain in self.chains)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Those of the join and of all pipelines."""
        own = f"mix of {', '.join(self.names)}, {self.on_end.value} at an end" if self.changes else "merge"
        return (own, *(text for chain in self.chains for text in chain.parameters))

    @property
    def beginning(self) -> Place:
        """Nothing came, and all begin."""
        turn = (0, self.changes[0][1], (0.0,) * len(self.chains)) if self.changes else 0
        return (0, turn, *((0, *chain.beginning) for chain in self.chains))

    @property
    def num_items(self) -> int | None:
        """The sum; None if one of them isn't known, or if not all come."""
        numbers = [chain.num_results for chain in self.chains]
        is_all = self.on_end is OnEnd.CONTINUE and all(all(weights) for _, weights in self.changes[-1:])
        return None if None in numbers or not is_all or self.is_endless else sum(number or 0 for number in numbers)

    @property
    def splits(self) -> list[Split]:
        """Those of all pipelines, in their order. If one ends early on a rank, the others' turns are earlier there."""
        splits = (split for chain in self.chains for split in chain.splits)
        return [split._replace(is_even=split.is_even and split.shard.is_equal) for split in splits]

    @property
    def plains(self) -> list[Plain]:
        """The sources of all pipelines, in their order."""
        return [plain for chain in self.chains for plain in chain.origin.plains]

    def open(self, entry: Any, states: Iterator[SourceStates], run: PipelineRun, key: int, epoch: int) -> Passes:
        """Open the pipelines that haven't ended."""
        opened: list[Iterator[Item]] = []
        for number, (chain, place) in enumerate(zip(self.chains, entry[2:], strict=True)):
            if place:
                own_key = derive_key(key, _BRANCH, number, self.seeds[number] or 0)
                branch = chain.open(place[1:], states, run, own_key, epoch + place[0])
                opened.append(_repeated(branch, place[0], f"{self.join.value}, pipeline {self.names[number]}"))
            else:
                for _ in chain.origin.plains:
                    next(states)
                for line in chain.describe():
                    if line.lstrip().startswith("map "):
                        run.tally.policy(line, None, skips=True)  # takes what the state has of the ended stage
                opened.append(iter(()))
        for policy in run.tally.policies:
            policy.places = None  # they say nothing about places of all
        if self.join is Join.BY_WEIGHT:
            return iter((mixed(opened, entry, self.changes, self.on_end),))
        if self.join is Join.IN_TURN:
            return iter((in_turn(opened, entry),))
        flows = [flow for flow, place in zip(opened, entry[2:], strict=True) if place]
        relay: Relay[Item] = Relay(2 * len(flows), num_givers=len(flows))
        run.fill(relay, [Filler(iter((flow,)), relay, run.tally.note("merge")) for flow in flows])
        return iter(((Item(item.value, ((number, *entry[1:]),)) for number, item in enumerate(relay, entry[0] + 1)),))

    def check(self, entry: Any) -> None:
        """Check the number of pipelines, and each one's place."""
        is_place = isinstance(entry, tuple) and len(entry) == 2 + len(self.chains)
        if not is_place or isinstance(entry[1], tuple) != bool(self.changes):
            raise StateMismatch(f"the state's place {entry!r} isn't one of {len(self.chains)} pipelines")
        for chain, place in zip(self.chains, entry[2:], strict=True):
            if place != ():
                chain.check(place[1:])

    def sources_at(self, entry: Any, epoch: int) -> list[tuple[int, int | None]]:
        """Return those of all pipelines, in their order."""
        found: list[tuple[int, int | None]] = []
        for chain, place in zip(self.chains, entry[2:], strict=True):
            origin = chain.origin
            found += origin.sources_at(place[1], epoch + place[0]) if place else [(epoch, None)] * len(origin.plains)
        return found

    def describe(self) -> list[str]:
        """Return a line for the join, then those of each pipeline."""
        shares = zip(self.names, self.changes[0][1], strict=True) if self.changes else ()
        title = ", ".join([self.join.value, *(f"{name} {weight:g}" for name, weight in shares)])
        return [title, *(f"  {line}" for chain in self.chains for line in chain.describe())]


def _repeated(passes: Passes, num_before: int, stage: str) -> Iterator[Item]:
    """Pass on the items of a pipeline, also those of later epochs. Its errors name the join and the item."""
    number = 0
    try:
        for num_repeats, items in enumerate(passes, num_before):
            first = number
            for item in items:
                number += 1
                yield Item(item.value, (num_repeats, *item.after))
            if number == first and num_repeats > num_before:
                raise ValueError("the pipeline is continuous, but an epoch of it has no items")
    except Exception as error:
        raise explained(error, stage, number)  # noqa: B904 - it has its causes


def in_turn(flows: Sequence[Iterator[Item]], entry: Any) -> Iterator[Item]:
    """Give an item of each flow in turn, until all have ended. `entry`: see `Gathered`."""
    number, turn, *places = entry
    while any(places):
        chosen, turn = turn, (turn + 1) % len(places)
        item = next(flows[chosen], None)
        if item is None:
            places[chosen] = ()
            continue
        places[chosen] = item.after
        number += 1
        yield Item(item.value, ((number, turn, *places),))


def mixed(flows: Sequence[Iterator[Item]], entry: Any, changes: Changes, on_end: OnEnd) -> Iterator[Item]:
    """Give items of flows by weight. `entry`: see `Gathered`. What comes depends on it and on the weights, no more."""
    number, (begin, weights, owed), *places = entry
    while True:
        before = sum(change <= number for change, _ in changes)
        given = [
            tuple(weight if place else 0.0 for weight, place in zip(weights, places, strict=True))
            for _, weights in changes[before - 1 :]
        ]
        present = next(filter(any, given), given[0])  # if all that had a weight have ended, later weights hold
        if present != weights:
            begin, weights, owed = number, present, MixPhase(weights, owed).owed_after(number - begin)
        if not any(weights):
            return
        until = next((change for change, _ in changes if change > number), None)
        for chosen in MixPhase(weights, owed).sources(number - begin):
            item = next(flows[chosen], None)
            if item is None:
                if on_end is OnEnd.STOP:
                    return
                places[chosen] = ()
                break
            places[chosen] = item.after
            number += 1
            yield Item(item.value, ((number, (begin, weights, owed), *places),))
            if number == until:
                break


@dataclass(frozen=True, slots=True)
class Chain:
    """A linear graph. Merged pipelines are chains inside an origin."""

    origin: Plain | Gathered
    nodes: tuple[Node, ...] = ()
    max_errors: float | None = None
    """How many items all stages may leave out together in an epoch; below 1: which share of them."""
    equal_batches: bool = False
    """Whether an epoch is over on all ranks as soon as it is over on one of them."""
    progress: bool = False
    """Whether each epoch has a bar."""

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

    @property
    def splits(self) -> list[Split]:
        """Each `shard` in it, with what other stages do."""
        splits, is_shuffled = self.origin.splits, any(text.startswith("shuffle,") for text in self.origin.parameters)
        for node in self.nodes:
            is_shuffled |= isinstance(node, ShuffleNode)
            even, counts = node.is_even, node.counts
            splits = [one._replace(is_even=one.is_even and even, counts=one.counts or counts) for one in splits]
            splits += [Split(node, is_shuffled)] if isinstance(node, ShardNode) else []
        return splits

    def open(self, place: Place, states: Iterator[SourceStates], run: PipelineRun, key: int, epoch: int) -> Passes:
        """Return the results from a place on. Threads begin to work.

        `place`: from `Item.after`, or `beginning`. `states`: of each plain source in turn. `run` owns what is opened.
        `key`: of what the nodes draw.
        """
        passes, length = self.origin.open(place[0], states, run, key, epoch), 1
        for number, node in enumerate(self.nodes):
            skipped = place[length] if node.counts else 0
            passes = node.open(passes, Opening(place[:length], skipped, derive_key(key, number), epoch), run)
            length += node.counts
        return passes

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
