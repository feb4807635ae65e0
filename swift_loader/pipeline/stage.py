"""What flows between stages, how threads hand it over, and a stage that works on several items at once.

    upstream ──Filler──► Feed ──► Engine (scheduler, executor) ──► Stage.passes ──► downstream's thread
    upstream ──Filler──► Relay ────────────────────────────────────────────────────► downstream's thread

The first is a stage with workers, where the same scheduler as the loader's decides about order, limits and failures.
The second is `prefetch`, and `merge` as items come. Stages that need no workers run on the thread of whoever pulls.

What flows are passes: an iterator over the items of each epoch. Whoever takes them asks for the next epoch once there
are no more items of this one. Only a continuous source has more than one.

An item is a value, and the place where a run continues after it. A place is a tuple. Its first entry says where the
source is, the others how many results of each counting stage came since then. A counting stage gives several results
for one item (a generator, `unbatch`), or mixes items (`shuffle`):

    source            (n,)           continues with item n
    a generator       (n, k)         runs item n again, and leaves out the first k results
    shuffle           (n, k)         fills its buffer from item n on, and leaves out the first k results
    merge, mix        ((n, place of each pipeline), ...)

Other stages pass places on: a batch has the place of its last item. So continuing costs no more than what a counting
stage leaves out.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from swift_loader.engine.engine import Engine
from swift_loader.errors import WorkerStalled
from swift_loader.executors.base import Executor
from swift_loader.executors.calls import CallExecutor, call_soon
from swift_loader.metrics.metrics import Metrics
from swift_loader.pipeline.tally import Calls, FailurePolicy, StageStats, Wait, explained, in_stage_words
from swift_loader.runtime import LoaderThread
from swift_loader.sampling.permutation import derive_key
from swift_loader.sampling.plan import PlanSettings
from swift_loader.sampling.work import IndexWork, WorkSource
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.scheduler import SchedulerSettings

Place = tuple[Any, ...]
"""See above."""


class Item(NamedTuple):
    """A value between two stages."""

    value: Any
    after: Place
    """Where a run continues once this item was delivered. No two items of an epoch have the same."""


Passes = Iterator[Iterator[Item]]
"""See above."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Where a stage begins."""

    start: Place
    """The place of what comes in."""
    num_skipped: int = 0
    """How many results a counting stage leaves out."""
    key: int = 0
    """Of what it draws."""
    epoch: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Of the items that come in, over all epochs, for errors."""

    def following(self) -> Opening:
        """Return where the next epoch begins."""
        return replace(self, start=_beginning(self.start), num_skipped=0, epoch=self.epoch + 1)


def _beginning(place: Place) -> Place:
    """Return the place of the same form at the beginning of an epoch."""
    return tuple(_beginning(part) if isinstance(part, tuple) else 0 for part in place)


class Marker(Enum):
    """What threads hand over in place of an item."""

    EPOCH_END = "the end of an epoch"
    """Comes after all items of the epoch, and before those of the next one."""


# Hands things over from one thread to another.

Thing = TypeVar("Thing")


class _End(NamedTuple):
    """Nothing more comes."""

    error: BaseException | None
    """Why, if that isn't the regular end."""


_ENDS = (_End, Marker)


class Relay(Generic[Thing]):
    """Things that were given and not taken yet, at most `max_things`. One thread takes; any thread may stop it.

        giver ──add──► things ──iterate──► taker        the taker waits while it is empty
              ◄─reserve─ room ◄─────────                reserve waits while it is full, before add

    It holds no lock in Python code. `end` and `stop` end every wait.
    """

    def __init__(
        self,
        max_things: int,
        *,
        num_givers: int = 1,
        timeout_s: float | None = None,
        late: str = "",
        state: object = None,
    ) -> None:
        """Begin empty. `num_givers`: how many threads give, each of which calls `end`.

        `timeout_s`: how long the taker waits for one; None: no limit. Then it raises an error that says `late`, the
        timeout and what `state` is by then; None: nothing.
        """
        self.max_things = max_things
        self._things: queue.SimpleQueue[Thing | Marker | _End] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        """An entry for each thing that may be added."""
        for _ in range(max_things):
            self._room.put(None)
        self._num_givers = num_givers
        """Those whose end the taker hasn't met."""
        self._timeout_s = timeout_s
        self._late = late
        self._state = state
        self._is_stopped = False
        self._has_ended = False
        """Whether the taker has met the end."""
        self.is_over = False
        """Whether nothing more will be added."""
        self.source: Any = ()
        """What `pour` gives: an iterable, for a coroutine an asynchronous one."""
        self.busy_s: float | None = None
        """How long the giver was at the things, if it says so."""
        self.error: BaseException | None = None
        """Why nothing more is added, if that isn't the regular end."""

    def reserve(self) -> bool:
        """Wait for room for one thing, to `add` it then. Return False if nobody wants it any more."""
        self._room.get()
        if self._is_stopped:
            self._room.put(None)  # for the next call
        return not self._is_stopped

    def add(self, thing: Thing | Marker) -> None:
        """Add a thing for which room is reserved."""
        self._things.put(thing)

    def end(self, error: BaseException | None = None) -> None:
        """Say that this giver has no more. The taker gets the error after all things before it."""
        self.error = self.error or error
        self.is_over = True
        self._things.put(_End(error))

    def pour(self) -> None:
        """Put all that the source gives, then end."""
        error: BaseException | None = None
        began_s = time.perf_counter()
        try:
            for thing in self.source:
                full_s = time.perf_counter()
                if not self.reserve():
                    break
                self.add(thing)
                began_s += time.perf_counter() - full_s
        except BaseException as raised:
            error = raised
        self._note_poured(began_s, error)

    def _note_poured(self, began_s: float, error: BaseException | None) -> None:
        self.source, self.busy_s = (), time.perf_counter() - began_s
        self.end(error)

    def poll(self) -> Thing | None:
        """Return the next thing, or None if there is none now. It keeps its room until `free`."""
        try:
            thing = self._things.get_nowait()
        except queue.Empty:
            return None
        if isinstance(thing, _End):
            self._things.put(thing)
            return None
        assert not isinstance(thing, Marker), "a feed makes work of it"
        return thing

    def free(self) -> None:
        """Make room for another thing."""
        self._room.put(None)

    def __iter__(self) -> Iterator[Thing]:
        """Take all things of an epoch. Blocks while there is none.

        Raises the giver's error, or `WorkerStalled`.
        """
        things, room = self._things, self._room
        while True:
            try:
                thing = things.get(timeout=self._timeout_s)
            except queue.Empty:
                state = "" if self._state is None else f":\n{self._state}"
                raise WorkerStalled(f"{self._late} within timeout={self._timeout_s:g} s{state}") from None
            if isinstance(thing, _ENDS):
                if isinstance(thing, Marker):
                    room.put(None)
                    return
                self._num_givers -= 1
                if self._num_givers > 0 and thing.error is None and not self._is_stopped:
                    continue
                things.put(thing)
                self._has_ended = True
                if thing.error is not None:
                    raise thing.error
                return
            room.put(None)
            yield thing
            del thing

    def passes(self) -> Iterator[Iterator[Thing]]:
        """Return the things of each epoch."""
        while not self._has_ended:
            yield iter(self)

    def stop(self) -> None:
        """Let nobody wait any more. Idempotent."""
        self._is_stopped = True
        self._room.put(None)
        self._things.put(_End(None))


class LoopRelay(Relay[Thing]):
    """A relay into which a coroutine pours, without blocking its event loop."""

    def __init__(
        self, max_things: int, loop: asyncio.AbstractEventLoop, *, timeout_s: float | None = None, late: str = ""
    ) -> None:
        super().__init__(0, timeout_s=timeout_s, late=late)
        self._free = asyncio.Semaphore(max_things)
        self._room = _LoopRoom(loop, self._free)  # type: ignore[assignment]  # only `put` is called

    async def pour_async(self) -> None:
        """Put all that the source gives, then end. Closes the source."""
        error: BaseException | None = None
        began_s = time.perf_counter()
        try:
            try:
                async for thing in self.source:
                    self.note(thing)
                    full_s = time.perf_counter()
                    await self._free.acquire()
                    began_s += time.perf_counter() - full_s
                    self._things.put(thing)
            finally:
                if hasattr(self.source, "aclose"):
                    await self.source.aclose()
        except BaseException as raised:  # even a CancelledError: the user's code may have raised it by itself
            error = raised
        self._note_poured(began_s, error)

    def note(self, thing: Thing) -> None:
        """Do nothing. A subclass notes that a thing came, before others come."""


class _LoopRoom:
    """Makes room in a relay whose giver is a coroutine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, free: asyncio.Semaphore) -> None:
        self._loop = loop
        self._free = free

    def put(self, _: None) -> None:
        """Make room for another thing. Any thread."""
        call_soon(self._loop, self._free.release)


class Filler:
    """A thread that pulls until upstream ends, fails, or nobody wants the items any more.

    It closes upstream when it ends, so generators of the user's are closed by the thread that ran them.
    """

    def __init__(self, upstream: Passes, sink: Relay[Item], stats: StageStats) -> None:
        """Only this thread uses `upstream`. The sink gets its items, and its end or error."""
        self._upstream = upstream
        self._sink = sink
        self._stats = stats
        stats.num_in = 0
        self.thread = LoaderThread(self._run, f"fill-{stats.name}")
        """It isn't started."""

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._fill()
        except BaseException as raised:  # even SystemExit of the user's source: the loop must hear of it
            error = raised
        self._sink.end(error)

    def _fill(self) -> None:
        reserve, add, stats = self._sink.reserve, self._sink.add, self._stats
        clock, num_in = time.perf_counter, 0
        items: Iterator[Item] = iter(())
        try:
            for number, items in enumerate(self._upstream):
                if number:
                    add(Marker.EPOCH_END)  # the room for an item that didn't come
                while True:
                    stats.note_wait(clock(), Wait.OUTPUT)
                    if not reserve():  # first, so that no more is pulled than there is room for
                        return
                    stats.note_wait(clock(), Wait.INPUT)
                    item = next(items, None)
                    if item is None:
                        break
                    stats.num_in = num_in = num_in + 1
                    add(item)
                    del item
        finally:
            stats.note_wait(clock(), Wait.NOTHING)
            for one in (items, self._upstream):
                getattr(one, "close", lambda: None)()


# The work of a stage.

_MAX_STEP = 2**31 - 1
"""`KeyedSamples` makes 64 bits of it."""


class ItemWork(IndexWork):
    """The work on an item, or the end of an epoch."""

    number: int
    """Which item of its stage it is, from 0. A run that continues begins at 0, too."""
    after: Place
    """Where a run continues after it."""

    @classmethod
    def of(cls, epoch: int, step: int, value: Any, number: int, after: Place) -> ItemWork:
        """Return the work on an item."""
        work = cls(epoch, step, value)
        work.number, work.after = number, after
        return work


class Feed(Relay[Any], WorkSource):
    """Items that wait to be worked on. The scheduler takes them, under the engine's lock.

    The stage waits in `wait` while there is nothing to do.
    """

    def __init__(self, max_items: int, epoch: int, engine: Engine, *, puts_back: bool) -> None:
        """Begin empty. `max_items`: how many may wait here. `epoch`: of the first items.

        `engine`: is told of each item. `puts_back`: the stage puts work back, and calls `note_done` at the end of
        each item.
        """
        super().__init__(max_items)
        self._engine = engine
        self._returned: deque[ItemWork] = deque()
        """To be continued, before anything new."""
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._puts_back = puts_back
        self._held: ItemWork | None = None
        """The end of an epoch, until all of its items are done. As `_num_begun`, only `next` writes it."""
        self._num_begun = 0
        self._num_done = 0
        """By the stage's thread. It alone writes this."""
        self._num_items = 0
        self._num_put = 0
        """By the filling thread. It alone writes this."""
        self._num_put_back = 0
        """By the stage's thread. It alone writes this."""
        self._epoch = epoch
        self._is_awaited = False

    @property
    def num_put(self) -> int:
        """How many pieces of work were added."""
        return self._num_put + self._num_put_back

    # The filling thread's side

    def add(self, item: Item | Marker) -> None:
        """Add an item for which room is reserved."""
        if isinstance(item, Marker):
            # An epoch of its own: out of order, it waits for all items before it, and those after it wait for it.
            work = ItemWork.of(2 * self._epoch + 1, 0, item, self._num_items, ())
            self._epoch += 1
        else:
            work = ItemWork.of(2 * self._epoch, _step_of(item.after), item.value, self._num_items, item.after)
            self._num_items += 1
        self._num_put += 1
        super().add(work)
        self._engine.act()
        if self._is_awaited:  # after the scheduler was told
            self._bell.put(None)

    def end(self, error: BaseException | None = None) -> None:
        """Say that no more items come."""
        super().end(error)
        self._bell.put(None)

    # The stage's side

    def put_back(self, work: ItemWork, value: Any) -> None:
        """Add work that goes on from a result, with this value. It goes first."""
        self._num_put_back += 1
        self._returned.append(ItemWork.of(work.epoch, work.step, value, work.number, work.after))

    def note_done(self) -> None:
        """Record that nothing more comes of an item that was put back. The scheduler is to ask again then."""
        self._num_done += 1
        self.free()

    def next(self) -> ItemWork | None:
        """Return the next work; None if there is none now."""
        if self._returned:
            return self._returned.popleft()
        work: ItemWork | None = self._held or self.poll()
        self._held = None
        if work is None or not self._puts_back:
            return work
        if work.indices is not Marker.EPOCH_END:
            self._num_begun += 1
        elif self._num_done < self._num_begun:
            self._held, work = work, None
        return work

    def wait(self, num_taken: int) -> bool:
        """Block until there is more work than this number of results. Return False if none comes any more."""
        self._is_awaited = True
        while self.num_put <= num_taken and not self.is_over:
            self._bell.get()
        self._is_awaited = False
        return self.num_put > num_taken

    def stop(self) -> None:
        """Let nobody wait any more. Any thread. Idempotent."""
        self.is_over = True
        super().stop()
        self._bell.put(None)


def _step_of(after: Place) -> int:
    """Return a number of 31 bits for the item with this place, by which its draws are keyed."""
    first = after[0] if isinstance(after[0], int) else after[0][0]  # of what is joined, this number says which item
    if len(after) == 1 and first <= _MAX_STEP:
        return int(first) - 1
    return derive_key(len(after), first, *after[1:]) & _MAX_STEP


@dataclass(slots=True)
class StartedGenerator:
    """A generator that has given some of its results. As a value, it is to be continued."""

    results: Any
    """The iterator."""
    fetching: Any = None
    """Keys `sample_rng()` in it. None on an event loop."""
    value: Any = None
    """The result that it gave last."""
    is_over: bool = False
    """Whether it has no more results. Then `value` is none of them."""


class Stage:
    """One function, at work on several items. Its workers answer with a result for each."""

    puts_back = False
    """Whether work that isn't done yet goes back to the workers."""

    def __init__(
        self, upstream: Passes, executor: Executor, settings: SchedulerSettings, policy: FailurePolicy, concurrency: int
    ) -> None:
        """Start nothing. A thread of the stage uses `upstream`.

        `settings`: how far ahead of downstream it may work, and in which order results come. `policy`: what becomes of
        items that fail.
        """
        max_in_flight = settings.limits.max_in_flight
        self._engine = Engine(executor, settings, Metrics(enabled=False), deque())
        epoch = policy.tally.epoch + policy.epoch
        self._feed = Feed(max_in_flight, epoch, self._engine, puts_back=self.puts_back)
        self._stats = policy.tally.note(policy.stage)
        self._calls = self._stats.calls = Calls(concurrency, max_in_flight, max(1, max_in_flight - concurrency))
        self._executor = executor
        self._policy = policy
        self._num_taken = 0
        """How much work came back."""
        self._is_over = False
        self._filler = Filler(upstream, self._feed, self._stats)

    def start(self, plan: PlanSettings) -> None:
        """Start the executor, and begin to pull from upstream. `plan`: what workers know about the items.

        Raises what starting the executor raised.
        """
        try:
            self._engine.start()
        except Exception as error:
            raise explained(in_stage_words(error), self._policy.stage, None)  # noqa: B904 - it has its causes
        self._engine.begin(self._feed, plan)
        self._filler.thread.start()
        self._stats.began_s = time.perf_counter()  # starting processes takes a while

    # Results. One thread of downstream's iterates.

    def passes(self, opening: Opening) -> Passes:
        """Return the results of each epoch. Blocks while there is none. `opening`: where upstream began."""
        while not self._is_over:
            yield self._results(opening)
            opening = opening.following()

    def _results(self, _: Opening) -> Iterator[Item]:
        for delivery, work in self._deliveries():
            if self._is_wanted(delivery, work):
                yield self._count(delivery.batch, work.after)

    def _is_wanted(self, delivery: Delivery, work: ItemWork) -> bool:
        self._policy.seen[self._policy.epoch] += 1
        if delivery.error is None:
            return True
        self._policy.note(work.number, delivery.error, work.after)
        return False

    def _count(self, value: Any, after: Place) -> Item:
        self._stats.num_out += 1
        return Item(value, after)

    def _deliveries(self) -> Iterator[tuple[Delivery, ItemWork]]:
        """Return what the workers answer for the items of an epoch. Blocks while there is nothing.

        Raises the executor's error if it failed, or upstream's, after all results.
        """
        feed, calls = self._feed, self._calls
        while True:
            delivery = self._engine.take()
            if delivery.work is not None:
                assert isinstance(delivery.work, ItemWork), "a feed hands out items"
                self._num_taken += 1
                if not self.puts_back or delivery.work.indices is Marker.EPOCH_END:
                    feed.free()
                delivery.keep()
                calls.note_queues(feed.num_put - self._num_taken, self._engine.num_ready)
                if delivery.work.indices is Marker.EPOCH_END:
                    self._policy.places = None  # a state in such a run has no counts
                    break
                if not isinstance(delivery.batch, Relay):
                    calls.note(delivery.build_s)
                yield delivery, delivery.work
                del delivery
            elif delivery.error is not None:
                raise delivery.error
            elif not feed.wait(self._num_taken):
                if feed.error is not None:
                    raise feed.error
                self._is_over = True
                break
        self._policy.end()

    def stop(self) -> None:
        """Let upstream's thread and the workers end. Any thread. Idempotent. Returns at once."""
        self._feed.stop()
        if isinstance(self._executor, CallExecutor):
            self._executor.stop_workers()

    def close(self, limit_s: float) -> None:
        """End all threads and processes. Waits for upstream's thread at most `limit_s`. Idempotent."""
        deadline_s = time.monotonic() + limit_s
        self.stop()
        self._engine.close()
        self._filler.thread.join(max(0.0, deadline_s - time.monotonic()))


class RelayStage(Stage):
    """One whose workers answer with a relay of all results of an item, filled while it takes from it; in order."""

    def _results(self, opening: Opening) -> Iterator[Item]:
        before, num_skipped = opening.start, opening.num_skipped
        for delivery, work in self._deliveries():
            if self._is_wanted(delivery, work):
                for num_results, value in enumerate(self._poured(delivery.batch, work), 1):
                    if num_results > num_skipped:
                        yield self._count(value, (*before, num_results))
            before, num_skipped = work.after, 0

    def _poured(self, relay: Relay[Any], work: ItemWork) -> Iterator[Any]:
        try:
            yield from relay
        except BaseException as error:
            if relay.error is not error:  # thrown in by who iterates
                raise
            self._policy.note(work.number, error, work.after)
        self._calls.note(relay.busy_s)


class RestStage(Stage):
    """One whose workers answer with a result of a generator, and the generator, to be continued; out of order."""

    puts_back = True

    def _results(self, opening: Opening) -> Iterator[Item]:
        num_results = 0
        for delivery, work in self._deliveries():
            rest: StartedGenerator | None = delivery.batch
            if rest is None or rest.is_over:
                self._is_wanted(delivery, work)
                self._feed.note_done()
                self._engine.act()  # the end of the epoch may have waited for this
            else:
                value, rest.value = rest.value, None
                self._feed.put_back(work, rest)
                self._engine.act()
                num_results += 1
                yield self._count(value, (*opening.start, num_results))  # no place says more
