"""A stage that works on several items at once: a scheduler and an executor over what comes from upstream.

    upstream ──Filler──► Feed ──► Dispatcher (scheduler, executor) ──► results ──► downstream's thread

The same scheduler as the loader's decides about order, limits and failures.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from swift_loader.delivery.dispatcher import Dispatcher
from swift_loader.executors.base import Executor
from swift_loader.metrics.metrics import Metrics
from swift_loader.pipeline.failures import FailurePolicy, explained
from swift_loader.pipeline.feed import Feed, ItemWork
from swift_loader.pipeline.flows import beginning
from swift_loader.pipeline.items import Item, Marker, Place
from swift_loader.pipeline.jobs import Rest
from swift_loader.pipeline.relay import Relay
from swift_loader.pipeline.stats import Calls, StageStats, Wait
from swift_loader.pipeline.wording import in_stage_words
from swift_loader.sampling.plan import PlanSettings
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.scheduler import SchedulerSettings
from swift_loader.threads import LoaderThread

# A thread that pulls items from upstream and hands them over.


class Filler:
    """Pulls until upstream ends, fails, or nobody wants the items any more.

    It closes upstream when it ends, so generators of the user's are closed by the thread that ran them.
    """

    def __init__(
        self,
        upstream: Iterator[Item],
        put: Callable[[Item], bool],
        end: Callable[[BaseException | None], None],
        stats: StageStats,
    ) -> None:
        """Only this thread uses `upstream`. `put` blocks while there is no room; False: nobody wants the item.

        `end` gets the error that ended upstream, or None.
        """
        self._upstream = upstream
        self._put = put
        self._end = end
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
        self._end(error)

    def _fill(self) -> None:
        upstream, put, stats = self._upstream, self._put, self._stats
        clock, num_in = time.perf_counter, 0
        try:
            stats.note_wait(clock(), Wait.INPUT)
            for item in upstream:
                stats.note_wait(clock(), Wait.OUTPUT)
                stats.num_in = num_in = num_in + 1
                if not put(item):
                    return
                stats.note_wait(clock(), Wait.INPUT)
                del item
        finally:
            stats.note_wait(clock(), Wait.NOTHING)
            getattr(upstream, "close", lambda: None)()


class Stage:
    """One function, at work on several items."""

    def __init__(
        self,
        upstream: Iterator[Item],
        executor: Executor,
        settings: SchedulerSettings,
        policy: FailurePolicy,
        stats: StageStats,
        epoch: int,
        concurrency: int,
        *,
        goes_on: bool = False,
    ) -> None:
        """Start nothing. A thread of the stage uses `upstream`. `epoch`: of the first items.

        `settings`: how far ahead of downstream it may work, and in which order results come. `policy`: what becomes of
        items that fail. `goes_on`: an item is worked on again after each of its results; `any_results` gives them.
        """
        limits = settings.limits
        self._feed = Feed(max(1, limits.max_in_flight // 2), epoch, puts_back=goes_on)
        max_fed = self._feed.relay.max_things
        self._calls = stats.calls = Calls(
            concurrency, limits.max_in_flight, limits.max_in_flight - concurrency + max_fed
        )
        self._dispatcher = Dispatcher(executor, settings, Metrics(enabled=False), deque())
        self._policy = policy
        self._stats = stats
        self._filler = Filler(upstream, self._put, self._feed.end, stats)

    def start(self, plan: PlanSettings) -> None:
        """Start the executor, and begin to pull from upstream. `plan`: what workers know about the items.

        Raises what starting the executor raised.
        """
        try:
            self._dispatcher.start()
        except Exception as error:
            raise explained(in_stage_words(error), f"In stage {self._policy.stage!r}, as its workers started")  # noqa: B904 - it has its causes
        self._dispatcher.begin(self._feed, plan)
        self._filler.thread.start()

    def _put(self, item: Item) -> bool:
        if not self._feed.put(item):
            return False
        self._dispatcher.act()
        self._feed.ring()
        return True

    # Results, in the three forms in which jobs give them. One thread of downstream's iterates over one of these.

    def results(self) -> Iterator[Item]:
        """Return one result for each item. Blocks while there is none."""
        for delivery, work in self._deliveries():
            if work.indices is Marker.EPOCH_END:
                yield Item(Marker.EPOCH_END, ())
            elif self._is_wanted(delivery, work):
                yield self._count(delivery.batch, work.after)

    def all_results(self, start: Place, num_skipped: int) -> Iterator[Item]:
        """Return all results of each item's generator, in order.

        `start`: where upstream began. `num_skipped`: how many results of the first item are left out.
        """
        before = start
        for delivery, work in self._deliveries():
            if work.indices is Marker.EPOCH_END:
                before = beginning(start)
                yield Item(Marker.EPOCH_END, ())
                continue
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

    def any_results(self, start: Place) -> Iterator[Item]:
        """Return all results of all items' generators, as they come.

        `start`: where upstream began; no place says more.
        """
        num_results = 0
        for delivery, work in self._deliveries():
            if work.indices is Marker.EPOCH_END:
                start, num_results = beginning(start), 0
                yield Item(Marker.EPOCH_END, ())
                continue
            rest: Rest | None = delivery.batch
            if rest is None or rest.is_over:
                self._is_wanted(delivery, work)
                self._feed.note_done()
                self._dispatcher.act()  # the end of the epoch may have waited for this
            else:
                value, rest.value = rest.value, None
                self._feed.put_back(work, rest)
                self._dispatcher.act()
                num_results += 1
                yield self._count(value, (*start, num_results))

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
        """Return what the workers answer. Blocks while there is nothing.

        Raises the executor's error if it failed, or upstream's, after all results.
        """
        feed, calls, num_taken = self._feed, self._calls, 0
        while True:
            delivery = self._dispatcher.next_batch()
            if delivery.work is not None:
                assert isinstance(delivery.work, ItemWork), "a feed hands out items"
                num_taken += 1
                delivery.keep()
                calls.note_queues(feed.num_put - num_taken, self._dispatcher.num_ready)
                if delivery.work.indices is Marker.EPOCH_END:
                    self._policy.end()
                    self._policy.places = None  # a state in such a run has no counts
                if not isinstance(delivery.batch, Relay):
                    calls.note(delivery.build_s)
                yield delivery, delivery.work
                del delivery
            elif delivery.error is not None:
                raise delivery.error
            elif feed.is_over(num_taken):
                if feed.relay.error is not None:
                    raise feed.relay.error
                self._policy.end()
                return
            else:
                feed.wait(num_taken)

    def stop(self) -> None:
        """Let upstream's thread end. Any thread. Idempotent. Returns at once."""
        self._feed.close()

    def close(self, limit_s: float) -> None:
        """End all threads and processes. Waits for upstream's thread at most `limit_s`. Idempotent."""
        self.stop()
        self._dispatcher.close()
        self._filler.thread.join(limit_s)
