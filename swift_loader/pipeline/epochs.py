"""The epochs of one pipeline: its runs one after the other, the iterator over each, and where the loop is in them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from swift_loader.engine.iterator import IteratorState, LoopIterator, ShownIterator, Turn
from swift_loader.errors import LoaderClosed, StateMismatch, SwiftLoaderError, warn
from swift_loader.executors.calls import CoroutineLoop
from swift_loader.options import default_seed
from swift_loader.pipeline.run import PipelineRun, SourceBegin, SourceStates
from swift_loader.pipeline.sources import WHOLE, Chain, ShardPlace
from swift_loader.pipeline.stage import Item, Place
from swift_loader.pipeline.tally import Tally
from swift_loader.ranks.agreement import RankVotes
from swift_loader.ranks.ranks import find_ranks
from swift_loader.runtime import ProcessOwner, is_interrupt, run_finalizer
from swift_loader.sampling.integers import MAX_BITS, TEXT, Form, check_same, from_state, in_state, integer, to_state
from swift_loader.sampling.plan import MAX_EPOCH
from swift_loader.sampling.progress import Progress
from swift_loader.sampling.run import EpochRule, Pass, PassState
from swift_loader.scheduler.delivery import Delivery

VERSION = 1

_CLOSED = "the pipeline was closed; make a new one"

# Where a run is, as plain types.


def _as_lists(place: Any) -> Any:
    return [_as_lists(part) for part in place] if isinstance(place, (list, tuple)) else place


def _as_tuples(place: Any) -> Any:
    return tuple(_as_tuples(part) for part in place) if isinstance(place, (list, tuple)) else place


def _read_pair(given: Any) -> tuple[Any, Any]:
    first, second = given
    return first, second


_EPOCH, _KEY = integer(0, MAX_EPOCH), integer(0, 2**MAX_BITS)
_PAIRS = Form("a pair", _read_pair, list).or_none().several()


@dataclass(frozen=True, slots=True)
class PipelineState:
    """What a pipeline needs to continue."""

    epoch: int = in_state(_EPOCH)
    place: Place | None = in_state(Form("a place", lambda place: (*_as_tuples(place),), _as_lists).or_none())
    """Of the next item; None: the beginning of the epoch."""
    seed: int = in_state(_KEY)
    parameters: Sequence[str] = in_state(TEXT.several())
    """What the meaning of the place depends on: `Chain.parameters`."""
    # In a tuple: torch.distributed.checkpoint would take dicts in a list apart.
    sources: Sequence[Any] = in_state(_PAIRS._replace(write=tuple))
    """For each source: (number of items, its own state) or None."""
    told: int | None = in_state(_EPOCH.or_none(), older=None)
    """The epoch that the sources were told; None: none."""
    failures: Sequence[int] = in_state(_EPOCH.several(), older=())
    """How many items each `map` has left out in the epoch, in the order of the pipeline."""
    lengths: Sequence[int | None] = in_state(_KEY.or_none().several(), older=())
    """Of each source that has an index, if the place is in the middle of an epoch."""
    shards: Sequence[ShardPlace] | None = in_state(_PAIRS.or_none(), older=None)
    """Of each `shard`: which ranks can continue at the place. None: an older state doesn't say it."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types, if the sources' states are."""
        return to_state(self, {"version": VERSION})

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> PipelineState:
        """Return a state that `to_dict` gave. Raises as `check_state` does, or names a field."""
        return from_state(cls, state, "Pipeline", VERSION)


@dataclass
class PipelinePosition(Progress):
    """Where a loop is in its epoch."""

    chain: Chain
    begun: PipelineState
    """Where its run began."""
    sources: Sequence[SourceStates]
    """Of the run."""
    passes_end: bool
    """Whether the next epoch follows if nothing is left of this one at the place."""
    place: Place | None
    """After the last result that the loop got; None: before the first."""

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in."""
        return self.begun.epoch

    def _count(self, got: Delivery) -> None:
        """Move to the place after what the loop has got. Source states before it aren't needed any more."""
        place: Any = got.work
        places = self.chain.origin.sources_at(place[0], self.epoch)
        for states, (epoch, number) in zip(self.sources, places, strict=True):
            if states and number is not None:
                states.latest((epoch, number))
        self.place, self.passes_end = place, False

    def to_state(self) -> PipelineState:
        """Return the state of this position."""
        begun, epoch = self.begun, self.epoch + self.is_over
        if self.chain.origin.is_endless and begun.told is not None:
            begun = replace(begun, told=epoch)
        if self.is_over or self.place is None:
            known = _if_any(states.latest((epoch, 0)) for states in self.sources)
            return replace(begun, epoch=epoch, place=None, sources=known or (() if self.is_over else begun.sources))
        pairs = [*zip(self.sources, self.chain.origin.sources_at(self.place[0], epoch), strict=True)]
        found = tuple(None if number is None else states.latest((own, number)) for states, (own, number) in pairs)
        lengths = tuple(states.lengths.get(own) for states, (own, _) in pairs)
        return replace(begun, place=self.place, sources=found, lengths=lengths)

    def begins(self) -> tuple[SourceBegin | None, ...]:
        """Return the states of the sources at the beginning of the next epoch, if the loop got all of this one."""
        return _if_any(states.latest((self.epoch + 1, 0)) for states in self.sources) if self.is_over else ()


def _if_any(states: Iterable[SourceBegin | None]) -> tuple[SourceBegin | None, ...]:
    """Return all states if there is one, else none."""
    states = tuple(states)
    return states if any(state is not None for state in states) else ()


class PipelineIterator(LoopIterator):
    """One epoch's results. Closes its run at the end, at an error, and when nobody refers to it any more.

    The first `next` begins the epoch: frameworks call `iter` early, and then load a state or set the epoch.
    """

    _progress: PipelinePosition

    def __init__(self, epochs: Epochs) -> None:
        """Begin nothing yet."""
        super().__init__(Turn())
        self._epochs = epochs
        self.run: PipelineRun | None = None
        """What runs; None before the first `next`, and once it was closed or handed over."""
        self._owned: PipelineRun | None = None
        """What is to be closed: the same, and a run that is being handed over."""
        self.idle: list[PipelineRun] = []
        """Gets the run at the end of the epoch, if it goes on with the next one."""
        self.position_before = epochs.position
        """That of the last iterator when this one was to begin."""
        self._votes: RankVotes | None = None
        self._num_votes = 0
        self._closing: weakref.finalize[..., PipelineIterator] | None = None

    def _begin(self) -> None:
        was_dirty, self._is_dirty = self._is_dirty, True
        try:
            if was_dirty:  # an exception has ended the call before, which may have begun the epoch
                self._seek()
            if self._state is IteratorState.FRESH:
                self._votes, self.position_before = self._epochs.votes(), self._epochs.position
                self._open()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or is_interrupt(error):
                raise
            self._end_run()
            self._fail(error)
        self._is_dirty = False

    def _open(self) -> None:
        """Begin the next epoch."""
        try:
            run, position, self.idle = self._epochs.open_next(self)
        except Exception as error:
            self._tell(error)
            raise
        self._go_on(run, position)

    def _go_on(self, run: PipelineRun | None, position: PipelinePosition) -> None:
        self.run, self._progress = run, position
        self._owner = None if run is None else run.owner
        if self._error is not None:  # another thread closed the pipeline, when not all of it was there
            self._end_run()
            raise self._error
        self._state = IteratorState.ACTIVE

    def _seek(self) -> None:
        """Have another run go on where the loop is: an exception may have ended this one's generators."""
        self._end_run()
        if (position := self._epochs.reopen(self)) is not None:
            self._go_on(self.run, position)

    def own(self, run: PipelineRun) -> None:
        """Use this run, and close it at the end. Called before it starts anything."""
        self._closing = weakref.finalize(self, run.close)
        self.run = self._owned = run

    def _take(self) -> Delivery:
        try:
            item = self._pull()
            if item is None and self._progress.passes_end:
                self._num_votes = 0
                self._open()
                item = self._pull()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or is_interrupt(error):
                raise
            return Delivery(error=error)
        if item is None:
            return Delivery(is_end=True)
        place: Any = item.after
        return Delivery(place, batch=item.value)

    def _pull(self) -> Item | None:
        """Return the next item; None at the end of the epoch, or if another rank that ends with this one has none."""
        votes = self._votes
        try:
            item = self._next_item()
        except Exception as error:
            self._tell(error)
            raise
        if votes is not None and not votes.all_have(item is not None, self._num_votes) and item is not None:
            self._progress.is_over, item = True, None  # this rank's item isn't lost: all end here
        self._num_votes += 1
        return item

    def _next_item(self) -> Item | None:
        position, run = self._progress, self.run  # another thread may close it meanwhile
        item = None if run is None else next(run.items, None)
        if item is None and run is not None and self._state is IteratorState.ACTIVE:
            goes_on = run.has_next()
            position.is_over = True
            _warn_of_used_up(position.chain)
            if goes_on and self._closing is not None:  # keep it for the next epoch
                self.run = None
                self.idle.append(run)
                self._closing.detach()
            else:
                self._end_run()
        return item

    def _tell(self, error: Exception) -> None:
        """Tell the other ranks that end with this one that it has failed, so that they don't wait."""
        if self._votes is not None and not is_interrupt(error):
            with suppress(Exception):  # they may have gone
                self._votes.all_have(None, self._num_votes)

    def _give(self, delivery: Delivery) -> NoReturn:
        assert delivery.error is not None
        self._end_run()
        self._fail(delivery.error)

    def _end(self) -> None:
        self._stop(IteratorState.DONE)
        self._end_run()

    def close(self) -> None:
        """End all threads and processes. Idempotent. Later calls of `next` raise `StopIteration` or the error."""
        if self._state in (IteratorState.FRESH, IteratorState.ACTIVE):
            self._stop(IteratorState.FAILED, LoaderClosed(_CLOSED))
        self._end_run()

    def _end_run(self) -> None:
        run, self.run = self._owned, None
        if run is not None and self._closing is not None and run in self.idle:
            self._closing.detach()  # it is the next epoch's
        elif run is not None and self._closing is not None:
            run_finalizer(self._closing)
            run.items, run.passes = iter(()), iter(())  # an error's traceback may keep the run
        self._owned = None

    def __repr__(self) -> str:
        is_begun = hasattr(self, "_progress")
        state = "running" if self.run is not None else "closed" if is_begun else "fresh"
        return f"<PipelineIterator: {state}{f', epoch {self._progress.epoch}' if is_begun else ''}>"


class ShownPipelineIterator(ShownIterator, PipelineIterator):
    """The same with a bar."""

    _unit = "result"

    def _place(self) -> tuple[int, int, int | None, int]:
        if self._state is not IteratorState.FRESH:
            return 0, self._progress.present().num_got, None, 0  # the bar is there
        loaded, num_results = self._epochs.loaded, self._epochs.chain.num_results
        return self._epochs.next().epoch, 0, num_results if loaded is None or loaded.place is None else None, 0


class Epochs(EpochRule):
    """Begins the epochs of a chain, and knows the state. The loop's thread uses it; any thread may close it."""

    def __init__(self, chain: Chain, seed: int | None) -> None:
        """Begin with epoch 0. `seed`: the user's."""
        super().__init__(is_of_loader=True)
        self.chain = chain
        self._given_seed = seed
        self._seed = default_seed() if seed is None else seed
        self._votes: RankVotes | None = None
        self._told: int | None = None
        """The epoch that the sources were told last; None: none."""
        self._loaded: PipelineState | None = None
        self._ranks: list[str] | None = None
        """Of the passes since the state was loaded, see `find_ranks`. None: there were none."""
        self._begun: list[weakref.ref[PipelineIterator]] = []
        """All iterators that have begun, and live. Any thread adds, and removes."""
        self._latest: weakref.ref[PipelineIterator] | None = None
        self.position: PipelinePosition | None = None
        """Of the latest iterator."""
        self.tally = Tally()
        """The counts of the latest run; empty before the first."""
        self._is_closed = False
        self._settle()

    def _settle(self) -> None:
        """Have a run and a loop of this process. In a fork, those there are belong to the parent."""
        self._maker = ProcessOwner()
        self._idle: list[PipelineRun] = []
        """The run of a continuous source, between two epochs."""
        self._event_loop = CoroutineLoop()
        """Stays from one epoch to the next: sessions of the user's belong to it."""
        weakref.finalize(self, _free, self._idle, self._event_loop)

    @property
    def last(self) -> Pass:
        """See `EpochRule`."""
        if (position := self.position) is None:
            return self._last
        return Pass(position.epoch, 0, PassState.OVER if position.is_over else PassState.RUNNING)

    @property
    def loaded(self) -> PipelineState | None:
        """The loaded state, if the next epoch continues there."""
        return self._loaded if self._loaded is not None and self._loaded.epoch == self.next().epoch else None

    def open_next(self, iterator: PipelineIterator) -> tuple[PipelineRun, PipelinePosition, list[PipelineRun]]:
        """Begin the next epoch for an iterator.

        Return what runs, a position that the iterator moves, and the list that gets the run at the end of the epoch, if
        it goes on with the next one.
        """
        if not self._maker.is_here():
            self._settle()
        state = self.loaded or self._at_start(self.next().epoch)
        ranks = self.find_ranks()
        if self._ranks not in (None, ranks):
            raise RuntimeError(
                f"this pipeline had a pass as {self._ranks}, but torch.distributed or the launcher says {ranks} now; "
                f"begin the first pass after init_process_group(), or make another pipeline"
            )
        if state.place is not None and state.shards is not None:
            splits, shards = self.chain.splits, [*state.shards]
            shards += [(None, 1)] * (len(splits) - len(shards))
            for split, saved in zip(splits + [WHOLE] * (len(shards) - len(splits)), shards, strict=True):
                split.check(saved)
        self._ranks = ranks
        for plain in self.chain.origin.plains:
            plain.past.is_used_up |= plain.past.has_given and plain.is_iterator
        _warn_of_used_up(self.chain)
        self._latest = weakref.ref(iterator, self._begun.remove)
        self._begun.append(self._latest)  # first, because another thread may close it while it opens
        self._check_open()
        run = next((run for run in self._idle if state is not self._loaded and run.epoch == state.epoch), None)
        if run is not None:  # it goes on with this epoch
            iterator.own(run)
            self._idle.remove(run)
        _close_all(self._idle)
        if run is None:
            run = self._open(state, iterator)
        ends_together = self.chain.equal_batches or all(split.ends_together for split in self.chain.splits)
        passes_end = state.place is not None and self._chosen is None and ends_together
        position = self._position_of(run, state, passes_end=passes_end)
        # No handler runs between these.
        self._loaded = self._chosen = None
        self.position, self.tally = position, run.tally
        return run, position, self._idle

    def _position_of(self, run: PipelineRun, state: PipelineState, *, passes_end: bool) -> PipelinePosition:
        shards = [split.place for split in self.chain.splits]
        begun = replace(state, told=self._told, parameters=self.chain.parameters, lengths=(), shards=shards)
        return PipelinePosition(self.chain, begun, run.sources, passes_end, state.place)

    def reopen(self, iterator: PipelineIterator) -> PipelinePosition | None:
        """Open another run for an iterator, where its loop is. Return the position; None if it hasn't begun.

        Raises `SwiftLoaderError` if an item may be lost, because the source or the order of the results can't be
        repeated.
        """
        before = self.position
        if before is None or before is iterator.position_before:
            return None
        if any(plain.is_iterator and plain.past.has_given for plain in self.chain.origin.plains):
            reason = "the source gives its items only once"
        elif not self.chain.is_exact:
            reason = "results come in the order of completion"
        elif self._latest is None or self._latest() is not iterator:
            reason = "another iterator has begun"
        else:
            chosen, self._chosen = self._chosen, None  # of a later epoch
            try:
                state = self.state()
                run = self._open(state, iterator)
            finally:
                self._chosen = chosen
            position = self._position_of(run, state, passes_end=before.passes_end)
            position.num_got = before.num_got
            self.position, self.tally, iterator.idle = position, run.tally, self._idle
            return position
        raise SwiftLoaderError(
            f"the loop was interrupted while it took an item, which may be lost because {reason}; iterate over the "
            f"pipeline again"
        )

    def votes(self) -> RankVotes | None:
        """Return what lets the ranks end together; None if they needn't. The first time, it waits for all of them."""
        if self._votes is None and self.chain.equal_batches:
            every = (find_ranks(None, None), *(split.shard.ranks for split in self.chain.splits))
            self._votes = RankVotes(max(every, key=lambda ranks: ranks.world_size))
        return self._votes

    def find_ranks(self) -> list[str]:
        """Return which part of its items each `shard` keeps. Raises `ValueError` if ranks shuffle without a seed."""
        splits = self.chain.splits
        num = max((split.shard.ranks.world_size for split in splits if split.is_shuffled), default=1)
        if num > 1 and self._given_seed is None:
            raise ValueError(
                f"shard() to {num} ranks after shuffle() needs a seed, or each rank has its own order, and samples are "
                f"lost and repeated. Give all ranks the same: Pipeline(source, seed=0) or mix(..., seed=0); or call "
                f"shard() first"
            )
        return [split.shard.describe() for split in splits]

    def _at_start(self, epoch: int, sources: Sequence[Any] = (), told: int | None = None) -> PipelineState:
        return PipelineState(epoch, None, self._seed, self.chain.parameters, sources, told, shards=())

    def _open(self, state: PipelineState, iterator: PipelineIterator) -> PipelineRun:
        """Open a run. The sources are told their epoch, if they were told it where the state was taken.

        Raises `StateMismatch` for a source of another length, and what starting its processes raised. Leaves nothing
        behind then.
        """
        if state.told is not None and self._chosen is None:  # else the user has told them since
            self._tell(state.told, state.place)
        elif self._told is not None and self.chain.origin.is_endless:
            self._tell(state.epoch, state.place)  # the run before has told them later ones
        chain, kept = self.chain, self.tally.failures
        tally = Tally(state.epoch, chain.max_errors, iter(state.failures), failures=kept)
        plains = chain.origin.plains
        unknown = (None,) * len(plains)
        at_start = (() if self.position is None else self.position.begins()) or unknown
        place = state.place or chain.beginning
        wheres = chain.origin.sources_at(place[0], state.epoch)
        known = zip(plains, wheres, (*state.lengths, *unknown), at_start, (*state.sources, *unknown), strict=False)
        sources = [SourceStates(own, plain.length(saved), *states) for plain, (own, _), saved, *states in known]
        run = PipelineRun(tally, sources, self._event_loop, tells_epochs=self._told is not None)
        iterator.own(run)
        try:
            run.passes = chain.open(place, iter(run.sources), run, state.seed, state.epoch)
            run.items = next(run.passes)
            if chain.max_errors is not None and not any(policy.skips for policy in tally.policies):
                raise ValueError(f"max_errors={chain.max_errors} has no effect without a stage with on_error='skip'")
        except BaseException:
            run.close()
            raise
        return run

    def _tell(self, epoch: int, place: Place | None = None) -> None:
        origin = self.chain.origin
        wheres = origin.sources_at((place or self.chain.beginning)[0], epoch)
        for plain, (own, _) in zip(origin.plains, wheres, strict=True):
            if hasattr(plain.source, "set_epoch"):
                plain.source.set_epoch(own)
        self._told = epoch

    def seek(self, epoch: int) -> None:
        """Begin with this epoch next. A loaded state of another epoch doesn't count then."""
        self.choose(epoch)
        if self._idle and all(run.epoch == epoch and run.tells_epochs for run in self._idle):
            self._told = epoch  # the run has gone on with this epoch, and told the sources
            return
        if any(hasattr(plain.source, "set_epoch") for plain in self.chain.origin.plains):
            _close_all(self._idle)  # it has gone on with an order that isn't this epoch's
        self._tell(epoch, self.loaded.place if self.loaded else None)

    # Resuming ---------------------------------------------------------------------------------------------------------

    def state(self) -> PipelineState:
        """Return where the loop is: after the last item that it got.

        Raises `StateMismatch` in the middle of an epoch, if a stage hands results on as they come.
        """
        if self.loaded is not None:
            return self.loaded
        position = self.position
        if position is None:
            return self._at_start(self.next().epoch, told=self._told)
        position, chosen = position.present(), self._choice
        if chosen is not None and self.run is None and (position.is_over or chosen != position.epoch):
            return self._at_start(chosen, position.begins(), self._told)
        if not (self.chain.is_exact or position.is_over or position.place is None):
            raise StateMismatch(
                "state_dict() doesn't work in the middle of an epoch with output_order='completion', because no place "
                "says which items are left. Call it at the end of an epoch, or give output_order='input'"
            )
        state, place = position.to_state(), position.place
        counts = place is not None and not position.is_over and not self.chain.origin.is_endless
        return replace(state, failures=tuple(policy.num_at(place or ()) for policy in self.tally.policies if counts))

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue at a state with the next epoch that begins.

        Raises `TypeError` if it isn't a dict, `StateMismatch` if it isn't a state of a pipeline with these stages;
        nothing has changed then.
        """
        self._check_open()
        loaded = PipelineState.from_dict(state)
        if self._given_seed is not None:
            check_same({"seed": loaded.seed}, {"seed": self._given_seed}, "this pipeline was given")
        if loaded.place is not None:
            self.chain.check(loaded.place)
            if tuple(loaded.parameters) != self.chain.parameters:
                raise StateMismatch(
                    f"the state is of a pipeline with {_listed(loaded.parameters)}, but this one has "
                    f"{_listed(self.chain.parameters)}; with others, the place means other items"
                )
        for plain, saved in zip(self.chain.origin.plains, loaded.sources, strict=False):
            plain.check_state(saved)
        _close_all(self._idle)
        self._loaded, self._seed, self.position, self._ranks = loaded, loaded.seed, None, None
        self.restore(loaded.epoch, 0)

    # What they do -----------------------------------------------------------------------------------------------------

    @property
    def run(self) -> PipelineRun | None:
        """What runs for the latest iterator; None if nothing does."""
        iterator = None if self._latest is None else self._latest()
        return None if iterator is None else iterator.run

    def close(self) -> None:
        """End all iterations, with all threads and processes. No other one begins. Idempotent."""
        self._is_closed = True
        for iterator in [reference() for reference in self._begun]:
            if iterator is not None:
                iterator.close()
        _free(self._idle, self._event_loop)

    def _check_open(self) -> None:
        if self._is_closed:
            raise LoaderClosed(_CLOSED)


def _warn_of_used_up(chain: Chain) -> None:
    """Warn of each source that doesn't begin anew. On the loop's thread."""
    for plain in chain.origin.plains:
        if plain.past.is_used_up:
            plain.past.is_used_up = False
            warn(
                f"the source, a {type(plain.source).__name__}, gives its items only once, and has none left for "
                f"another epoch; give a list, or an object whose __iter__ begins anew"
            )


def _listed(parameters: Sequence[str]) -> str:
    return ", ".join(repr(text) for text in parameters) or "no stage that mixes items"


def _free(idle: list[PipelineRun], event_loop: CoroutineLoop) -> None:
    _close_all(idle)
    event_loop.close()


def _close_all(idle: list[PipelineRun]) -> None:
    while idle:
        idle.pop().close()
