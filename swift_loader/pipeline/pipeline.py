"""Pipeline: stages over any source, in threads, coroutines and processes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from swift_loader.checks import check_flag, check_integer, check_optional_integer, check_seconds
from swift_loader.errors import StateMismatch
from swift_loader.executors.calls.event_loop import EventLoop
from swift_loader.notices import warn
from swift_loader.options import default_seed
from swift_loader.pipeline.chain import Chain
from swift_loader.pipeline.iterator import OpenRun, PipelineIterator, Position
from swift_loader.pipeline.maps import Map, OutputOrder
from swift_loader.pipeline.nodes import (
    Batch,
    Cache,
    DropNone,
    Filter,
    Node,
    Prefetch,
    Shard,
    Shuffle,
    Unbatch,
)
from swift_loader.pipeline.origins import Gathered, Merged, Mixed, Origin, Plain
from swift_loader.pipeline.sources import check_source
from swift_loader.pipeline.state import PipelineState
from swift_loader.pipeline.stats import Tally
from swift_loader.process_owner import ProcessOwner
from swift_loader.ranks.ranks import find_ranks

__all__ = ["Pipeline"]


class Pipeline:
    """Items from a source, through stages that work at the same time.

        pipe = (
            Pipeline(urls)
            .map(fetch, concurrency=16)                 # a coroutine function: on an event loop
            .map(decode, concurrency=8)                 # a function: in threads
            .map(augment, concurrency=4, on="process")  # in worker processes
            .batch(32)
            .prefetch(3)
        )
        for batch in pipe:
            train(batch)

    Each method returns a new pipeline, and leaves this one as it is. Each iteration is an epoch. Each stage works ahead
    of the next one as far as its buffer reaches, then it waits. Leaving the loop ends all threads and processes.
    """

    def __init__(self, source: Any, *, continuous: bool = False, seed: int | None = None) -> None:
        """Take items from a source. Pulls nothing yet.

        Args:
            source: An iterable, an async iterable, or anything with `__getitem__` and `__len__`. Each epoch iterates
                over it anew. One with `state_dict` and `load_state_dict`, or with an index, continues where it was on a
                resume; others are iterated over again up to there.
            continuous: True begins to work on the next epoch while the loop is still at the end of this one.
            seed: Of what stages draw. Default: torch's, or one from the clock.

        Raises:
            TypeError: The source can't be iterated over.
        """
        check_source(source)
        self._set_up(
            Chain(Plain(source, check_flag("continuous", continuous))), check_optional_integer("seed", seed, 0)
        )

    def _set_up(self, chain: Chain, seed: int | None) -> None:
        self._chain = chain
        self._given_seed = seed
        self._seed = default_seed() if seed is None else seed
        self._next_epoch = 0
        self._loaded: PipelineState | None = None
        self._latest: weakref.ref[PipelineIterator] | None = None
        self._position: Position | None = None
        """Of the latest iterator."""
        self._tally: Tally | None = None
        """Of its run."""
        self._idle: list[OpenRun] = []
        """The run of a continuous source, between two epochs."""
        self._event_loop = EventLoop()
        """Stays from one epoch to the next: sessions of the user's belong to it."""
        self._maker = ProcessOwner()
        weakref.finalize(self, _free, self._idle, self._event_loop)

    def _with(self, node: Node) -> Pipeline:
        return self._made(self._chain.then(node), self._given_seed)

    @classmethod
    def _made(cls, chain: Chain, seed: int | None) -> Pipeline:
        pipeline = cls.__new__(cls)
        pipeline._set_up(chain, seed)  # noqa: SLF001 - of this class
        return pipeline

    # Stages -----------------------------------------------------------------------------------------------------------

    def map(
        self,
        function: Callable[[Any], Any],
        *,
        concurrency: int = 1,
        on: str | None = None,
        output_order: str = "input",
        on_error: str = "raise",
        max_errors: int | None = None,
        timeout: float | None = None,
        buffer_size: int | None = None,
        name: str | None = None,
    ) -> Pipeline:
        """Call a function with each item.

        Args:
            function: Returns the result. A generator yields any number of results. A coroutine function or an async
                generator runs on an event loop.
            concurrency: How many items are worked on at the same time.
            on: "thread" or "process". Processes need a function and items that can be serialised; a generator's
                results come all at once from them. None: an event loop for async functions, else threads.
            output_order: "input" keeps the order. "completion" hands results on as they come, so a slow item holds up
                nobody; then a run can't be resumed in the middle of an epoch.
            on_error: "raise" ends the iteration at an item whose function raises. "skip" leaves the item out.
            max_errors: With "skip": how many items may be left out. None: any number.
            timeout: Seconds that an item may take. A process that takes longer is replaced. A thread can't be killed:
                the iteration ends with `WorkerStalled`. None: no limit.
            buffer_size: How many more items may wait at the workers or for downstream. Default: as many as
                `concurrency`.
            name: Of the stage, in errors and pictures. Default: the function's.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: A value is out of its range, or two exclude each other.
        """
        return self._with(
            Map.of(
                function,
                concurrency=concurrency,
                on=on,
                output_order=output_order,
                on_error=on_error,
                max_errors=max_errors,
                timeout=timeout,
                buffer_size=buffer_size,
                name=name,
            )
        )

    def filter(self, predicate: Callable[[Any], bool]) -> Pipeline:
        """Keep the items for which the function returns true. It runs on one thread."""
        return self._with(Filter(predicate))

    def drop_none(self) -> Pipeline:
        """Leave out items that are None, as a function returns that has no result for its item."""
        return self._with(DropNone())

    def batch(self, batch_size: int, *, drop_last: bool = False) -> Pipeline:
        """Collect items in lists of this length. The last one may be shorter, unless `drop_last` leaves it out."""
        return self._with(Batch(batch_size, drop_last))

    def unbatch(self) -> Pipeline:
        """Give the elements of each item one by one."""
        return self._with(Unbatch())

    def shuffle(self, buffer_size: int) -> Pipeline:
        """Give each time a random one of the next `buffer_size` items. Other ones in each epoch, by the seed.

        A resume pulls the epoch's items up to the place again, so put it before expensive stages.
        """
        return self._with(Shuffle(buffer_size))

    def prefetch(self, buffer_size: int, *, timeout: float | None = None) -> Pipeline:
        """Work ahead of the loop: up to so many items wait for it.

        Args:
            buffer_size: How many items.
            timeout: Seconds after which a wait for the next item raises `WorkerStalled`. None: no limit.
        """
        return self._with(Prefetch(buffer_size, check_seconds("timeout", timeout)))

    def cache(self, num_items: int, *, stop_after: int | None = None) -> Pipeline:
        """Keep the first items, and give them again and again. It shows how fast a loop were if data were free.

        Args:
            num_items: How many items are kept. Then upstream isn't asked any more.
            stop_after: How many items an epoch has. None: without end.
        """
        return self._with(Cache(num_items, stop_after))

    def shard(self, rank: int | None = None, world_size: int | None = None, *, equal: bool = True) -> Pipeline:
        """Keep every `world_size`-th item, beginning with number `rank`.

        Args:
            rank: This process. Default: as torch.distributed or the launcher says.
            world_size: The number of processes. Default: the same.
            equal: True leaves out the items after the last full round, so that all ranks get equally many.
        """
        ranks = find_ranks(rank, world_size)
        return self._with(Shard(ranks.rank, ranks.world_size, check_flag("equal", equal)))

    def merge(self, *others: Pipeline, output_order: str = "input") -> Pipeline:
        """Join this pipeline and others.

        Args:
            others: Their items come, too.
            output_order: "input" takes one item of each in turn. "completion" takes what is there first.
        """
        in_turn = OutputOrder(output_order) is OutputOrder.INPUT
        return self._joined(Merged(self._gathered(others), in_turn))

    @classmethod
    def mix(
        cls, pipelines: Sequence[Pipeline], weights: Sequence[float] | None = None, *, seed: int | None = None
    ) -> Pipeline:
        """Take each item of a random pipeline, until all have ended.

        Args:
            pipelines: What is mixed.
            weights: How often each is chosen, relative to the others. Default: equally often.
            seed: Of the draws.

        Raises:
            ValueError: There are no pipelines, or a weight isn't positive.
        """
        if not pipelines:
            raise ValueError("there are no pipelines to mix")
        chosen = [1.0] * len(pipelines) if weights is None else [float(weight) for weight in weights]
        if len(chosen) != len(pipelines) or not all(0 < weight < math.inf for weight in chosen):
            raise ValueError(f"weights={weights!r} must have a positive number for each of {len(pipelines)} pipelines")
        first, *others = pipelines
        origin = Mixed(first._gathered(others), tuple(chosen))  # noqa: SLF001 - of this class
        return first._joined(origin, seed)  # noqa: SLF001

    def _gathered(self, others: Iterable[Pipeline]) -> Gathered:
        others = list(others)
        for other in others:
            if not isinstance(other, Pipeline):
                raise TypeError(f"a {type(other).__name__} can't be merged or mixed; make a Pipeline of it")
        chains = (self._chain, *(other._chain for other in others))  # noqa: SLF001 - of this class
        if any(isinstance(chain.origin, Plain) and chain.origin.is_endless for chain in chains):
            raise ValueError("a continuous pipeline can't be merged or mixed, because its epochs have no end")
        seeds = (self._given_seed, *(other._given_seed for other in others))  # noqa: SLF001 - of this class
        return Gathered(chains, seeds)

    def _joined(self, origin: Origin, seed: int | None = None) -> Pipeline:
        return self._made(Chain(origin), self._given_seed if seed is None else check_integer("seed", seed, 0))

    # Iteration --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch: the next one, or the one of a state that was loaded."""
        if not self._maker.is_here():  # in a fork, the run and the loop are the parent's
            self._maker, self._event_loop, self._idle = ProcessOwner(), EventLoop(), []
        chain, state = self._chain, self._loaded or PipelineState(self._next_epoch, None, self._seed)
        self._warn_of_iterator()
        if self._loaded is None and self._idle and self._idle[0].epoch == state.epoch:
            opened = self._idle.pop()
        else:
            _close_all(self._idle)
            opened = OpenRun.open(chain, state, self._event_loop)
        self._loaded = None
        sources = opened.run.sources
        self._position = position = Position(state.epoch, state.place, sources=sources, source_starts=state.sources)
        self._tally = opened.run.tally
        iterator = PipelineIterator(chain, opened, position, self._idle)
        self._next_epoch = state.epoch + 1
        self._latest = weakref.ref(iterator)
        return iterator

    def _warn_of_iterator(self) -> None:
        """Warn if the source gives its items only once, and has been iterated over."""
        origin = self._chain.origin
        if isinstance(origin, Plain) and self._position is not None and isinstance(origin.source, Iterator):
            warn(
                f"the source is an iterator, a {type(origin.source).__name__}, which gives its items only once; give a "
                f"list, or an object whose __iter__ begins anew"
            )

    def __len__(self) -> int:
        """Return the number of results of an epoch.

        Raises:
            TypeError: It isn't known: the source has no length, or a stage gives any number of results.
        """
        number = self._chain.num_results
        if number is None:
            raise TypeError("the length of this pipeline isn't known")
        return number

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Passes it on to the source, if that has `set_epoch`.

        After `load_state_dict`, the saved epoch still continues at its place; another one begins anew.
        """
        self._next_epoch = check_integer("epoch", epoch, 0)
        if self._loaded is not None and self._loaded.epoch != epoch:
            self._loaded = None
        origin = self._chain.origin
        if isinstance(origin, Plain) and hasattr(origin.source, "set_epoch"):
            origin.source.set_epoch(epoch)

    # Resuming ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is: after the last item that it got.

        Raises:
            StateMismatch: The loop is in the middle of an epoch, and a stage hands results on as they come.
        """
        if self._loaded is not None:
            return self._loaded.to_dict()
        position = self._position
        if position is None:
            return PipelineState(self._next_epoch, None, self._seed, self._chain.parameters).to_dict()
        if not (self._chain.is_exact or position.is_over or position.place is None):
            raise StateMismatch(
                "state_dict() doesn't work in the middle of an epoch with output_order='completion', because no place "
                "says which items are left. Call it at the end of an epoch, or give output_order='input'"
            )
        return position.to_state(self._chain, self._seed).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called, with the next iteration.

        Raises:
            TypeError: The state isn't a dict.
            StateMismatch: It isn't a state of a pipeline with these stages. Nothing has changed.
        """
        loaded = PipelineState.from_dict(state)
        if self._given_seed is not None and loaded.seed != self._given_seed:
            raise StateMismatch(
                f"the state has seed={loaded.seed}, but this pipeline was made with seed={self._given_seed}"
            )
        if loaded.place is not None:
            self._chain.check(loaded.place)
            if loaded.parameters != self._chain.parameters:
                raise StateMismatch(
                    f"the state is of a pipeline with {_listed(loaded.parameters)}, but this one has "
                    f"{_listed(self._chain.parameters)}; with others, the place means other items"
                )
        self._chain.origin.check_states(iter(loaded.sources))
        _close_all(self._idle)
        self._loaded, self._seed, self._position = loaded, loaded.seed, None

    # What it does -----------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return what each stage of the latest iteration has done: items, rates, shares of its time that it waited."""
        return {"stages": [], "num_failures": 0, "failures": []} if self._tally is None else self._tally.report()

    def close(self) -> None:
        """End the current iteration, with all threads and processes. Idempotent."""
        iterator = None if self._latest is None else self._latest()
        if iterator is not None:
            iterator.close()
        _free(self._idle, self._event_loop)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return the graph; while it runs, with what each stage is doing."""
        iterator = None if self._latest is None else self._latest()
        run = None if iterator is None else iterator.run
        lines = [f"  {line}" for line in self._chain.describe()] if run is None else run.tally.describe().split("\n")
        return "\n".join(["Pipeline", *lines])


def _listed(parameters: tuple[str, ...]) -> str:
    return ", ".join(repr(text) for text in parameters) or "no stage that mixes items"


def _free(idle: list[OpenRun], event_loop: EventLoop) -> None:
    _close_all(idle)
    event_loop.close()


def _close_all(idle: list[OpenRun]) -> None:
    while idle:
        idle.pop().run.close()
