"""Pipeline: stages over any source, in threads, coroutines and processes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, Generic, Literal, Protocol, TypeVar, overload

from swift_loader.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_max_errors,
    check_optional_integer,
    check_progress,
    check_seconds,
    check_skips,
)
from swift_loader.pipeline import nodes
from swift_loader.pipeline.epochs import Epochs, PipelineIterator, ShownPipelineIterator
from swift_loader.pipeline.functions import Function, Kind, Retried, RetriedCoroutine, Submitted, kind_of
from swift_loader.pipeline.maps import MAX_CONCURRENCY, MapNode, OutputOrder, Where
from swift_loader.pipeline.sources import Chain, Gathered, Join, OnEnd, Plain, check_source
from swift_loader.pipeline.tally import ItemFailure
from swift_loader.report.report import Report, html_table
from swift_loader.runtime import Closing
from swift_loader.sampling.mixture import Changes, changes_of

_Item_co = TypeVar("_Item_co", covariant=True)
_Other = TypeVar("_Other")
_GivenWeights = Sequence[float] | Mapping[str, float]


class _Indexed(Protocol[_Item_co]):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> _Item_co: ...


class Pipeline(Closing, Generic[_Item_co]):
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
    of the next one until its buffer is full. Leaving the loop ends all threads and processes.
    """

    def __init__(
        self,
        source: Iterable[_Item_co] | AsyncIterable[_Item_co] | _Indexed[_Item_co],
        *,
        continuous: bool = False,
        seed: int | None = None,
        max_errors: float | None = None,
        equal_batches: bool = False,
        progress: bool = False,
    ) -> None:
        """Take items from a source. This pulls no item yet.

        Args:
            source: An iterable, an async iterable, or anything with `__getitem__` and `__len__`. Each epoch iterates
                over it again, so make a list of a generator or of `Path.glob()`. A source that has an index, or
                `state_dict` and `load_state_dict`, resumes at once. Any other source is read again, up to the saved
                place.
            continuous: True starts to work on the next epoch while the loop is still at the end of this one. If it is
                merged or mixed, its epochs follow one another without end.
            seed: Integer of at least 0: base of all random draws, also by `sample_rng()`. Default: torch's seed, or one
                from the clock.
            max_errors: How many items all stages with `on_error="skip"` may leave out together in an epoch: an integer,
                or a float between 0 and 1 as a fraction of the items, as in `map`. None: no limit. If pipelines are
                joined, the first one's limit holds.
            equal_batches: True ends an epoch on all ranks after the same number of results. See
                [several ranks](stages.md#on-several-ranks). If pipelines are joined, it holds if one of them has it.
            progress: True shows a bar of each epoch on rank 0: results, speed, time left, and the share of the time in
                which the loop waited for data. It needs tqdm. If pipelines are joined, it holds if one of them has it.

        Raises:
            TypeError: The source can't be iterated over.
        """
        check_source(source)
        plain = Plain(source, check_flag("continuous", continuous))
        limit, is_equal = check_max_errors("max_errors", max_errors), check_flag("equal_batches", equal_batches)
        chain = Chain(plain, (), limit, is_equal, check_progress("progress", progress))
        self._set_up(chain, check_optional_integer("seed", seed, 0))

    def _set_up(self, chain: Chain, seed: int | None) -> None:
        self._chain = chain
        self._seed = seed
        """The user's; None: none was given."""
        self._epochs = Epochs(chain, seed)

    @classmethod
    def _made(cls, chain: Chain, seed: int | None) -> Pipeline[Any]:
        pipeline = cls.__new__(cls)
        pipeline._set_up(chain, seed)  # noqa: SLF001 - of this class
        return pipeline

    def _with(self, node: nodes.Node) -> Pipeline[Any]:
        return Pipeline._made(replace(self._chain, nodes=(*self._chain.nodes, node)), self._seed)

    # Stages -----------------------------------------------------------------------------------------------------------

    @overload
    def map(
        self,
        function: Callable[[_Item_co], Coroutine[Any, Any, _Other] | AsyncIterator[_Other] | Iterator[_Other]],
        *,
        concurrency: int = 1,
        on: Literal["thread", "process", "loop"] | None = None,
        output_order: Literal["input", "completion"] = "input",
        on_error: Literal["raise", "skip"] = "raise",
        max_errors: float | None = None,
        timeout: float | None = None,
        retries: int = 0,
        buffer_size: int | None = None,
        name: str | None = None,
    ) -> Pipeline[_Other]: ...
    @overload
    def map(
        self,
        function: Callable[[_Item_co], _Other] | Mapping[Any, _Other],
        *,
        concurrency: int = 1,
        on: Literal["thread", "process", "loop"] | None = None,
        executor: Executor | None = None,
        output_order: Literal["input", "completion"] = "input",
        on_error: Literal["raise", "skip"] = "raise",
        max_errors: float | None = None,
        timeout: float | None = None,
        retries: int = 0,
        buffer_size: int | None = None,
        name: str | None = None,
    ) -> Pipeline[_Other]: ...
    def map(
        self,
        function: Callable[[Any], Any] | Mapping[Any, Any],
        *,
        concurrency: int = 1,
        on: Literal["thread", "process", "loop"] | None = None,
        executor: Executor | None = None,
        output_order: Literal["input", "completion"] = "input",
        on_error: Literal["raise", "skip"] = "raise",
        max_errors: float | None = None,
        timeout: float | None = None,
        retries: int = 0,
        buffer_size: int | None = None,
        name: str | None = None,
    ) -> Pipeline[Any]:
        """Call a function with each item.

        Args:
            function: Called with each item, and returns the result. A generator may yield any number of results. A
                coroutine function or an async generator runs on an event loop. A dict maps items to results.
            concurrency: How many calls run at the same time.
            on: [Where it runs](stages.md#in-which-place-should-a-function-run): `"thread"`, `"process"`, or `"loop"`,
                an event loop. Processes need a function and items that can be serialised, and a generator's results
                come from them all at once. Default: an event loop for async functions, else threads.
            executor: An executor of `concurrent.futures`, instead of `on`: a thread pool with an initialiser, a process
                pool, or one of yours. It gets at most `concurrency` calls at a time, and stays open. The function must
                be a plain one. A wait in the executor's queue counts for `timeout`. `sample_rng()` isn't seeded there.
            output_order: `"input"` keeps the order of the items. `"completion"` delivers results as they come, so a
                slow item holds up no other. Then a run can't be resumed in the middle of an epoch.
            on_error: `"raise"` ends the iteration at an item whose function
                [raises](stages.md#what-happens-when-something-fails). `"skip"` leaves the item out.
            max_errors: With `on_error="skip"`: how many items may be left out in an epoch. An integer counts them over
                a resume, too. A float between 0 and 1 is a fraction of the items since the epoch began or was resumed,
                checked from the 100th item on and at the end. None: no limit.
            timeout: Seconds that a call may take. With `on_error="raise"`, the iteration then ends with
                `WorkerStalled`. Before that, a process is replaced once, and the item is tried again. With `"skip"`,
                the item is left out: its process is killed or its coroutine cancelled. A thread can't be killed, so
                another one takes its place. A generator in threads or coroutines, with `output_order="input"`, always
                ends the iteration. None or 0: no limit.
            retries: How often a call that raises is repeated, after about 0.1 s, 0.2 s, 0.4 s and so on, as with
                `mapped`. Then `on_error` holds. `timeout` is for all of them together. Not for generators.
            buffer_size: How many more items may wait, for a call or for the next stage. Default: as many as
                `concurrency`.
            name: The stage's name in errors and reports. Default: the function's.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: A value is out of its range, or two exclude each other.
        """
        chosen = Function.of(function, name)
        name, kind = chosen.name, chosen.kind
        workers = check_integer("concurrency", concurrency, 1, MAX_CONCURRENCY)
        default = Where.LOOP if kind.is_async else Where.THREAD
        where = default if on is None else check_choice("on", on, Where)
        if executor is not None:
            if on is not None or kind is not Kind.FUNCTION or not isinstance(executor, Executor):
                raise ValueError(
                    f"executor={executor!r} must be one of concurrent.futures, for a plain function and without on=; "
                    f"{name} is a {kind.value}, and on={on!r}"
                )
            chosen, where = Function(Submitted(chosen, executor), Kind.COROUTINE, name), Where.LOOP
        kind = chosen.kind
        if check_integer("retries", retries, 0):
            if kind.is_generator:
                raise ValueError(f"retries={retries} can't repeat a {kind.value}, which may have given results")
            again = RetriedCoroutine if kind.is_async else Retried
            chosen = replace(chosen, call=again(chosen.call, retries))
        if kind.is_async != (where is Where.LOOP):
            allowed = "'loop' or None" if kind.is_async else "'thread' or 'process'"
            raise ValueError(f"on={where.value!r} can't run a {kind.value}; give {allowed}")
        limit = check_skips(on_error, max_errors)
        waiting = check_optional_integer("buffer_size", buffer_size, 0)
        return self._with(
            MapNode(
                chosen,
                workers,
                where,
                check_choice("output_order", output_order, OutputOrder),
                skips_failures=on_error == "skip",
                max_errors=limit,
                timeout_s=check_seconds("timeout", timeout),
                max_in_flight=workers + (workers if waiting is None else waiting),
            )
        )

    def filter(self, predicate: Callable[[_Item_co], bool]) -> Pipeline[_Item_co]:
        """Keep the items for which the function returns true. It runs on one thread."""
        return self._with(nodes.FilterNode(Function.of(predicate)))

    def drop_none(self: Pipeline[_Other | None]) -> Pipeline[_Other]:
        """Leave out items that are None: a function may return None if it has no result for an item."""
        return self._with(nodes.DropNoneNode())

    def batch(self, batch_size: int, *, drop_last: bool = False) -> Pipeline[list[_Item_co]]:
        """Collect items in lists of this length. The last one may be shorter, unless `drop_last` leaves it out."""
        return self._with(nodes.BatchNode(batch_size, drop_last))

    def unbatch(self: Pipeline[Iterable[_Other]]) -> Pipeline[_Other]:
        """Deliver the elements of each item one by one."""
        return self._with(nodes.UnbatchNode())

    def shuffle(self, buffer_size: int) -> Pipeline[_Item_co]:
        """Draw each item at random from the next `buffer_size` items. Seed and epoch determine the draws.

        A resume pulls the items before the saved place again, so put this stage before expensive ones.
        """
        return self._with(nodes.ShuffleNode(buffer_size))

    def prefetch(self, buffer_size: int, *, timeout: float | None = None) -> Pipeline[_Item_co]:
        """Work ahead of the loop, until `buffer_size` items wait for it.

        Args:
            buffer_size: How many items may wait for the loop.
            timeout: Seconds that the loop waits for an item before it gets `WorkerStalled`. None or 0: no limit.
        """
        return self._with(nodes.PrefetchNode(buffer_size, check_seconds("timeout", timeout)))

    def cache(self, num_items: int, *, stop_after: int | None = None) -> Pipeline[_Item_co]:
        """Keep the first items, and repeat them. It shows how fast the loop is if data costs nothing.

        Args:
            num_items: How many items are kept. After them, the source isn't asked any more.
            stop_after: How many items an epoch has. None: it has no end.
        """
        return self._with(nodes.CacheNode(num_items, stop_after))

    def shard(
        self, rank: int | None = None, world_size: int | None = None, *, equal: bool = True
    ) -> Pipeline[_Item_co]:
        """Keep every `world_size`-th item, beginning with number `rank`.

        Args:
            rank: The number of this process. Default: that of torch.distributed or of the launcher, when a pass begins.
            world_size: How many processes there are. Default: as for `rank`.
            equal: True leaves out the items after the last full round, so that all ranks get the same number.

        Raises:
            ValueError: Items were shuffled before without a seed, so each rank has another order.
        """
        if rank is not None and world_size is not None:
            check_integer("rank", rank, 0, check_integer("world_size", world_size, 1) - 1)
        pipeline = self._with(nodes.ShardNode(rank, world_size, check_flag("equal", equal)))
        pipeline._epochs.find_ranks()  # noqa: SLF001 - of this class
        return pipeline

    def merge(
        self, *others: Pipeline[_Other], output_order: Literal["input", "completion"] = "input"
    ) -> Pipeline[_Item_co | _Other]:
        """Join this pipeline and others.

        Args:
            others: Pipelines whose items come, too.
            output_order: `"input"` takes one item of each in turn. `"completion"` takes items as they come.
        """
        in_turn = check_choice("output_order", output_order, OutputOrder) is OutputOrder.INPUT
        join = Join.IN_TURN if in_turn else Join.AS_READY
        return self._joined(dict(enumerate((self, *others))), join, (), OnEnd.CONTINUE, None)

    @classmethod
    def mix(
        cls,
        pipelines: Sequence[Pipeline[_Other]] | Mapping[str, Pipeline[_Other]],
        weights: _GivenWeights | Mapping[int, _GivenWeights] | None = None,
        *,
        temperature: float = 1.0,
        ramp: bool = False,
        on_end: Literal["continue", "stop"] = "continue",
        seed: int | None = None,
    ) -> Pipeline[_Other]:
        """Join pipelines by weight: of any number of items, each has had its share within one or two.

            Pipeline.mix({"web": web, "code": code}, {"web": 0.7, "code": 0.3})

        The order depends on the weights alone. A state may be loaded with other weights: what came counts with those
        of then, and the items after it come by the new ones.

        Args:
            pipelines: The pipelines to mix, in a list or by name.
            weights: How often items of each come, relative to the others; 0 leaves it out. In a list, or by name if the
                pipelines are. Or several of them, by the number of items in the epoch from which on they hold:
                `{0: {"web": 1, "code": 0}, 10_000: {"web": 2, "code": 1}}`. Default: equally often.
            temperature: Each weight is raised to the power `1 / temperature`. More than 1 makes rare ones come more
                often.
            ramp: True changes the weights linearly from each given number to the next, in 64 steps.
            on_end: What happens when a pipeline ends that isn't continuous. `"continue"` goes on with the others, until
                all have ended whose weight isn't 0. `"stop"` ends the epoch.
            seed: Integer of at least 0: base of all random draws, also in the pipelines. Default: the first
                pipeline's.

        Raises:
            TypeError: What is to be mixed isn't a pipeline.
            ValueError: There are no pipelines, or weights don't name each of them.
        """
        named = _by_name(pipelines)
        if not named or not all(isinstance(name, str) for name in named):
            raise ValueError("there are no pipelines to mix, or names that aren't texts")
        given = _by_name(dict.fromkeys(named, 1.0) if weights is None else weights)
        given = {key: _by_name(one) if isinstance(one, Sequence) else one for key, one in given.items()}
        changes = changes_of(given, tuple(named), temperature, ramp=check_flag("ramp", ramp))
        end, seed = check_choice("on_end", on_end, OnEnd), check_optional_integer("seed", seed, 0)
        return cls._joined(named, Join.BY_WEIGHT, changes, end, seed)

    @classmethod
    def _joined(
        cls, pipelines: Mapping[Any, Pipeline[Any]], join: Join, changes: Changes, on_end: OnEnd, seed: int | None
    ) -> Pipeline[Any]:
        for pipeline in pipelines.values():
            if not isinstance(pipeline, Pipeline):
                raise TypeError(f"a {type(pipeline).__name__} can't be merged or mixed; make a Pipeline of it")
        chains = tuple(pipeline._chain for pipeline in pipelines.values())  # noqa: SLF001 - of this class
        seeds = tuple(pipeline._seed for pipeline in pipelines.values())  # noqa: SLF001
        origin = Gathered(chains, seeds, join, tuple(map(str, pipelines)), changes, on_end)
        is_equal, progress = any(one.equal_batches for one in chains), any(one.progress for one in chains)
        joined = Chain(origin, (), chains[0].max_errors, is_equal, progress)
        return Pipeline._made(joined, seeds[0] if seed is None else seed)

    # Iteration --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[_Item_co]:
        """Return an iterator over the next epoch, or over the rest of a loaded one. Its first `next` begins it."""
        return (ShownPipelineIterator if self._chain.progress else PipelineIterator)(self._epochs)

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
        """Set the epoch of the next iteration, also of each source that has `set_epoch`.

        After `load_state_dict`, the saved epoch still continues at its place, even if nothing is left there. Any
        other epoch starts from its beginning. The epoch that runs is repeated only if the loop leaves it.
        """
        self._epochs.seek(check_integer("epoch", epoch, 0))

    @property
    def sampler(self) -> Pipeline[_Item_co]:
        """The pipeline itself: Lightning looks for `set_epoch` only on a loader's `sampler`."""
        return self

    @property
    def batch_sampler(self) -> None:
        """None: there is no batch sampler. Lightning reads this attribute."""

    # Resuming ---------------------------------------------------------------------------------------------------------

    @property
    def is_exact(self) -> bool:
        """Whether `state_dict` works in the middle of an epoch: all stages keep the order."""
        return self._chain.is_exact

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is: after the last item that it got.

        Raises:
            StateMismatch: The loop is in the middle of an epoch, and a stage has `output_order="completion"`.
        """
        return self._epochs.state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called, with the next iteration.

        If the saved epoch has no items left, the next one begins, unless `set_epoch` asks for the saved one. The first
        `next` raises `StateMismatch` if an epoch can't continue because its source has an index and another length.

        Raises:
            LoaderClosed: The pipeline was closed.
            TypeError: The state isn't a dict.
            StateMismatch: It isn't a state of a pipeline with these stages. Nothing has changed.
        """
        self._epochs.load(state)

    # What it does -----------------------------------------------------------------------------------------------------

    @property
    def failures(self) -> list[ItemFailure]:
        """The last 1,000 items that were left out, oldest first, with `on_error="skip"`.

        A failure counts once its stage has left out the item, which may be some items ahead of the loop.
        """
        return [*self._epochs.tally.failures.copy()]

    def report(self) -> Report:
        """Return a report of what each stage of the latest iteration has done, and the items that were left out.

        `print` it. As a mapping, it has "stages", which has for each stage "items_in", "items_out", "items_per_s", and
        the shares of its time (0 to 1) that are "waiting_for_input" and "waiting_for_output". For one with workers:
        "busy" (a share), the seconds of its last 1,000 calls ("call_s_p50", "call_s_p99"), and how full the queues
        before and after the workers were on average ("queue_in_front", "queue_behind").
        [Which stage is slow?](stages.md#which-stage-is-slow)

        "num_failures" counts the items that were left out. "failures" lists the
        [first ones](stages.md#what-happens-when-something-fails) as `ItemFailure`.
        """
        tally = self._epochs.tally
        return Report(counts=tally.report(), stages=str(tally))

    def close(self) -> None:
        """Stop all processes and threads and free all resources, within 5 s.

        Any thread may call it, more than once. Results that you keep stay valid. An iterator in use raises
        `LoaderClosed` at its next result. The pipeline is over: so does each later iteration.
        """
        self._epochs.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle where it is, too. What runs stays here.

        Raises what `state_dict` raises, and `TypeError` if a stage has `executor=`.
        """
        made = ("_chain", "_seed", "_epochs", "__orig_class__")
        own = {name: value for name, value in vars(self).items() if name not in made}
        # Without lengths: the sources go along as they are now.
        return _restored, (type(self), self._chain, self._seed, {**self.state_dict(), "lengths": []}), own

    def __repr__(self) -> str:
        """Return the graph; while it runs, with what each stage is doing."""
        run, position = self._epochs.run, self._epochs.position
        lines = [f"  {line}" for line in self._chain.describe()] if run is None else str(run.tally).split("\n")
        state = "running" if run is not None else "stopped" if position is not None else "not started"
        # Other lengths run the user's code, which may read files or start processes.
        is_free = all(type(plain.source) in (list, tuple, range) for plain in self._chain.origin.plains)
        if is_free and (number := self._chain.num_results) is not None:
            state = f"{number:,} results, {state}"
        where = "" if position is None else f", epoch {position.epoch}{' is over' if position.is_over else ''}"
        return "\n".join([f"{type(self).__name__}: {state}{where}", *lines])

    def _repr_html_(self) -> str:
        title, *lines = repr(self).split("\n")
        return html_table(title, [re.split(" {2,}", line.strip()) for line in lines])


def _by_name(given: Any) -> Mapping[Any, Any]:
    """Return what is in a dict, or of a list one by the numbers."""
    return given if isinstance(given, Mapping) else {str(number): one for number, one in enumerate(given)}


def _restored(kind: type[Pipeline[Any]], chain: Chain, seed: int | None, state: dict[str, Any]) -> Pipeline[Any]:
    pipeline = kind._made(chain, seed)  # noqa: SLF001 - of this module
    pipeline.load_state_dict(state)
    return pipeline


# StageLoader: source, preprocessing, aggregation, transfer, buffer.


class StageLoader(Pipeline[Any]):
    """Batches from any source, through functions that run at the same time.

        loader = StageLoader(paths, preprocessor=decode, batch_size=32, aggregator=batchify, transfer_fn=to_gpu)
        for batch in loader:
            train(batch)

    It is a `Pipeline`. Each iteration is an epoch.
    """

    def __init__(
        self,
        src: Any,
        *,
        preprocessor: Callable[[Any], Any] | Mapping[Any, Any] | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        aggregator: Callable[[list[Any]], Any] | None = None,
        transfer_fn: Callable[[Any], Any] | None = None,
        buffer_size: int = 3,
        num_threads: int = 8,
        timeout: float | None = None,
        output_order: Literal["input", "completion"] = "completion",
        on_error: Literal["raise", "skip"] = "raise",
        max_errors: float | None = None,
        seed: int | None = None,
        equal_batches: bool = False,
        progress: bool = False,
    ) -> None:
        """Check the arguments. This starts nothing.

        Args:
            src: An iterable or async iterable, often of paths or URLs. Each epoch iterates over it again, so make a
                list of a generator or of `Path.glob()`.
            preprocessor: Called with each item. A function, a generator (any number of results), an async function or
                generator, or a dict that maps items to results. A result that is None is left out.
            batch_size: How many results form a list. None: no lists are made.
            drop_last: True leaves out the last list if it isn't full.
            aggregator: Function or coroutine function that is called with each list.
            transfer_fn: Function that moves each batch to a device. It is always called on the same thread.
            buffer_size: How many batches may wait for the loop.
            num_threads: How many calls of the preprocessor run at the same time, and how many of the aggregator.
            timeout: Seconds that the loop waits for a batch before it gets `WorkerStalled`. None or 0: no limit.
            output_order: `"completion"` delivers results as they come. `"input"` keeps the order of the source, which a
                resume in the middle of an epoch needs.
            on_error: `"raise"` ends the iteration at an item whose function
                [raises](stages.md#what-happens-when-something-fails). `"skip"` leaves the item out.
            max_errors: With `on_error="skip"`: how many items of each function may be left out, as in `Pipeline.map`.
                None: no limit.
            seed: Integer of at least 0: base of random draws by `sample_rng()`. Default: torch's seed, or one from the
                clock.
            equal_batches: True ends an epoch on all ranks after the same number of results, as in `Pipeline`.
            progress: True shows a bar of each epoch on rank 0, as in `Pipeline`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: A value is out of its range.
        """
        threads = check_integer("num_threads", num_threads, 1, MAX_CONCURRENCY)
        order = check_choice("output_order", output_order, OutputOrder).value
        errors: dict[str, Any] = {"output_order": order, "on_error": on_error, "max_errors": max_errors}
        pipeline: Pipeline[Any] = Pipeline(src, seed=seed, equal_batches=equal_batches, progress=progress)
        if preprocessor is not None:
            pipeline = pipeline.map(preprocessor, concurrency=threads, **errors).drop_none()
        if batch_size is not None:
            pipeline = pipeline.batch(batch_size, drop_last=drop_last)
        if aggregator is not None:
            pipeline = pipeline.map(aggregator, concurrency=threads, **errors).drop_none()
        if transfer_fn is not None:
            if kind_of(transfer_fn) is not Kind.FUNCTION:
                raise TypeError(f"transfer_fn is a {kind_of(transfer_fn).value}; it must be a plain function")
            pipeline = pipeline.map(transfer_fn, buffer_size=0)
        pipeline = pipeline.prefetch(buffer_size, timeout=timeout)
        self._set_up(pipeline._chain, pipeline._seed)  # noqa: SLF001 - of its own class
