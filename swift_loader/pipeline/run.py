"""One run of a pipeline: its stages, relays and event loop, from the first pull to `close`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from swift_loader.errors import NoProcessesLeft, WorkerStalled
from swift_loader.executors.base import Executor
from swift_loader.executors.calls import CoroutineLoop
from swift_loader.pipeline.failures import FailurePolicy
from swift_loader.pipeline.items import Item, Place
from swift_loader.pipeline.relay import Relay
from swift_loader.pipeline.sources import SourceBegin, SourceStates
from swift_loader.pipeline.stage import Filler, Stage
from swift_loader.pipeline.state import PipelineState
from swift_loader.pipeline.stats import StageStats, Tally
from swift_loader.process_owner import ProcessOwner
from swift_loader.sampling.plan import PlanSettings
from swift_loader.scheduler.scheduler import SchedulerSettings
from swift_loader.threads import LoaderThread

CLOSE_LIMIT_S = 4.0
"""How long `close` waits for threads in all. One that hangs in the user's code is left alone."""


class Run:
    """What runs for one iterator over a pipeline. One thread opens it; any thread may close it."""

    def __init__(
        self,
        state: PipelineState,
        event_loop: CoroutineLoop,
        max_errors: float | None,
        *,
        tells_epochs: bool,
        begins: Iterable[SourceBegin | None],
    ) -> None:
        self.epoch = state.epoch
        """The first one."""
        self.tells_epochs = tells_epochs
        """Whether sources are told the epochs that follow."""
        self._begins = iter(begins)
        """For each plain source, the state at the beginning of the epoch, if it is known."""
        self._max_errors = max_errors
        self._failures = iter(state.failures)
        """For each stage that has a policy, how many items were left out before the run was resumed."""
        self._event_loop = event_loop
        self._uses_loop = False
        self.sources: list[SourceStates] = []
        """Of each plain source, in the order of the pipeline."""
        self.tally = Tally()
        """Outlives the run."""
        self._stages: list[Stage] = []
        self._relays: list[Relay[Item]] = []
        self._fillers: list[Filler] = []
        self._stops: list[Callable[[], None]] = []
        self.owner = ProcessOwner()
        """Another process can't use the run."""

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop, which runs in a thread of its own until the run is closed."""
        loop = self._event_loop.enter()
        if self._uses_loop:
            self._event_loop.leave(0)  # it counts once
        self._uses_loop = True
        return loop

    def note_source(self) -> SourceStates:
        """Return the states of another source."""
        states = SourceStates()
        begin = next(self._begins, None)
        if begin is not None:
            states.note((self.epoch, begin[0]), begin[1])
        self.sources.append(states)
        return states

    def policy(self, stage: str, max_errors: float | None, *, skips: bool) -> FailurePolicy:
        """Return what decides about the failures of another stage."""
        num_before, others = next(self._failures, 0), self.tally.policies
        others.append(FailurePolicy(stage, skips, max_errors, others, self._max_errors, num_before, self.epoch))
        return others[-1]

    def counted(self, items: Iterable[Item], name: str) -> Iterator[Item]:
        """Pass items on, and count them as another stage's results."""
        return _counted(items, self.tally.note(name))

    def stage(
        self,
        upstream: Iterator[Item],
        executor: Executor,
        settings: SchedulerSettings,
        plan: PlanSettings,
        policy: FailurePolicy,
        concurrency: int,
        stops: Iterable[Callable[[], None]] = (),
        *,
        goes_on: bool = False,
    ) -> Stage:
        """Start a stage. `stops` are called when the run is closed, before any thread is waited for."""
        stats = self.tally.note(policy.stage)
        stage = Stage(upstream, executor, settings, policy, stats, self.epoch, concurrency, goes_on=goes_on)
        self._stages.append(stage)
        self._stops += stops
        stage.start(plan)
        stats.began_s = time.perf_counter()  # starting processes takes a while
        return stage

    def prefetched(self, upstream: Iterator[Item], num_items: int, timeout_s: float | None) -> Iterator[Item]:
        """Pull ahead, in a thread. At most `num_items` wait for downstream."""
        stats = self.tally.note("prefetch")
        relay: Relay[Item] = Relay(num_items, timeout_s=timeout_s, on_timeout=lambda: self._stalled(timeout_s))
        filler = Filler(upstream, relay.put, relay.end, stats)
        self._relays.append(relay)
        self._fillers.append(filler)
        filler.thread.start()
        return _counted(relay, stats)

    def gathered(self, flows: list[Iterator[Item]], entry: Place) -> Iterator[Item]:
        """Pull from all flows at the same time, in a thread each. Items come as they get ready."""
        relay: Relay[Item] = Relay(2 * len(flows))
        lock, num_left, has_told = threading.Lock(), len(flows), False

        def end(error: BaseException | None) -> None:
            """Tell of the end of all threads once: at the last one's, or at the first error."""
            nonlocal num_left, has_told
            with lock:
                num_left -= 1
                tells = not has_told and (error is not None or not num_left)
                has_told |= tells
            if tells:
                relay.end(error)

        self._relays.append(relay)
        fillers = [Filler(flow, relay.put, end, self.tally.note("merge")) for flow in flows]
        self._fillers += fillers
        for filler in fillers:
            filler.thread.start()
        for number, item in enumerate(relay, entry[0] + 1):
            yield Item(item.value, ((number, *entry[1:]),))

    def _stalled(self, timeout_s: float | None) -> WorkerStalled:
        return WorkerStalled(f"no item came within timeout={timeout_s:g} s:\n{self.tally.describe()}")

    def close(self) -> None:
        """End all threads and processes. Idempotent. Any thread. Does nothing in a fork, which has none of them."""
        if not self.owner.is_here():
            return
        deadline_s = time.monotonic() + CLOSE_LIMIT_S
        self.tally.ended_s = self.tally.ended_s or time.perf_counter()
        for stop in (*self._stops, *(stage.stop for stage in self._stages), *(relay.close for relay in self._relays)):
            stop()

        def left_s() -> float:
            return max(0.0, deadline_s - time.monotonic())

        closes: list[Callable[[], None]] = [lambda stage=stage: stage.close(left_s()) for stage in self._stages]  # type: ignore[misc]
        if self._uses_loop:
            self._uses_loop = False
            closes.append(lambda: self._event_loop.leave(left_s()))
        try:
            close_together(closes, left_s)
        finally:
            for filler in self._fillers:
                filler.thread.join(left_s())


def _counted(items: Iterable[Item], stats: StageStats) -> Iterator[Item]:
    for item in items:
        stats.num_out += 1
        yield item


def close_together(closes: Sequence[Callable[[], None]], left_s: Callable[[], float]) -> None:
    """Call all of these at the same time, each but the last in a thread of its own.

    Each returns by itself after a while. `left_s` returns for how many more seconds threads are waited for. One that
    needs longer is left alone. Raises the first error, once all were called.
    """
    errors: list[BaseException] = []
    threads: list[LoaderThread] = []

    def run(close: Callable[[], None]) -> None:
        try:
            close()
        except BaseException as error:
            errors.append(error)

    for close in closes[:-1]:
        thread = LoaderThread(run, "close", close)
        try:
            thread.start()
            threads.append(thread)
        except NoProcessesLeft:  # the interpreter may be ending
            run(close)
    for close in closes[-1:]:
        run(close)
    for thread in threads:
        thread.join(left_s())
    if errors:
        raise errors[0]
