"""One run of a pipeline: its stages, relays and event loop, from the first pull to `close`."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from swift_loader.errors import NoProcessesLeft
from swift_loader.executors.calls import CoroutineLoop
from swift_loader.pipeline.functions import FunctionJob
from swift_loader.pipeline.stage import Filler, Item, Passes, Relay, Stage
from swift_loader.pipeline.tally import StageStats, Tally
from swift_loader.runtime import LoaderThread, ProcessOwner
from swift_loader.sampling.plan import PlanSettings

RUN_CLOSE_LIMIT_S = 4.0
"""How long `close` waits for threads in all. One that hangs in the user's code is left alone."""


MAX_STATES = 1024
"""How many states are kept. Only a stage that restarts with the epoch, as `shuffle`, needs items from that far back."""

SourcePlace = tuple[int, int]
"""(epoch, number of items before it)."""

SourceBegin = tuple[int, Any]
"""(number of items before it, what the source's `state_dict` gave there)."""


class SourceStates:
    """The states of a source at the items that are on their way. The source's thread adds, the loop's removes."""

    def __init__(self, epoch: int, length: int | None, at_start: SourceBegin | None, begin: SourceBegin | None) -> None:
        """Begin with an epoch. `length`: the source's. `at_start`: the state at its beginning, if it is known.

        `begin`: the state from which the run continues, if it doesn't begin at the beginning.
        """
        self.begin = begin
        self.lengths = {epoch: length}
        """Of the source in each epoch. None: items can't be had by their numbers."""
        self._states: deque[tuple[SourcePlace, Any]] = deque()
        """In the order of the items."""
        for known in (at_start, begin):
            if known is not None:
                self.note((epoch, known[0]), known[1])

    def note(self, where: SourcePlace, state: Any) -> None:
        """Record the state at an item."""
        self._states.append((where, state))
        if len(self._states) > MAX_STATES:
            self._states = deque([*self._states][::2])  # with fewer of them, more items are drawn again

    def latest(self, where: SourcePlace) -> SourceBegin | None:
        """Return the last state that isn't after an item, with its number. Forgets those before it."""
        states = self._states  # the other thread may replace it
        while len(states) > 1 and states[1][0] <= where:
            states.popleft()
        if not states or states[0][0] > where or states[0][0][0] != where[0]:
            return None
        (_, number), state = states[0]
        return number, state

    def __bool__(self) -> bool:
        return bool(self._states)


class _LoopUser:
    """A run among the users of the event loop."""

    def __init__(self, shared: CoroutineLoop) -> None:
        self._shared = shared
        self.has_entered = False

    def enter(self) -> asyncio.AbstractEventLoop:
        """Return the loop, which runs until `close`."""
        self.has_entered = True
        return self._shared.enter(self)

    def close(self, limit_s: float) -> None:
        """Use it no more, see `CoroutineLoop.leave`. Idempotent."""
        self._shared.leave(self, limit_s)


class PipelineRun:
    """What runs for one iterator over a pipeline. One thread opens it; any thread may close it."""

    def __init__(
        self, tally: Tally, sources: Sequence[SourceStates], event_loop: CoroutineLoop, *, tells_epochs: bool
    ) -> None:
        self.sources = sources
        """Of each plain source, in the order of the pipeline."""
        self.epoch = tally.epoch
        """Of the next item."""
        self.tells_epochs = tells_epochs
        """Whether sources are told the epochs that follow."""
        self.tally = tally
        """Outlives the run."""
        self.items: Iterator[Item] = iter(())
        """What still comes out of this epoch."""
        self.passes: Passes = iter(())
        """The epochs after it."""
        self.event_loop = _LoopUser(event_loop)
        """Runs in a thread of its own from the first `enter` on, until the run is closed."""
        self._parts: list[Stage | Relay[Item] | FunctionJob] = []
        """What is stopped, before any thread is waited for."""
        self._fillers: list[Filler] = []
        self.owner = ProcessOwner()
        """Another process can't use the run."""

    def start(self, stage: Stage, plan: PlanSettings, *jobs: FunctionJob) -> None:
        """Start a stage. `plan`: what its workers know about the items. `jobs` are stopped with it."""
        self._parts += (*jobs, stage)
        stage.start(plan)

    def fill(self, relay: Relay[Item], fillers: Sequence[Filler]) -> None:
        """Begin to pull into a relay, in these threads."""
        self._parts.append(relay)
        self._fillers += fillers
        for filler in fillers:
            filler.thread.start()

    def has_next(self) -> bool:
        """Go on to the next epoch, once the items of this one came. Return whether there is one."""
        following = next(self.passes, None)
        self.items = following or iter(())
        self.epoch += 1
        return following is not None

    def close(self) -> None:
        """End all threads and processes. Idempotent. Any thread. Does nothing in a fork, which has none of them."""
        if not self.owner.is_here():
            return
        deadline_s = time.monotonic() + RUN_CLOSE_LIMIT_S
        self.tally.ended_s = self.tally.ended_s or time.perf_counter()
        for part in self._parts:
            part.stop()
        stages = [part for part in self._parts if isinstance(part, Stage)]
        try:
            close_together([*stages, self.event_loop] if self.event_loop.has_entered else stages, deadline_s)
        finally:
            for filler in self._fillers:
                filler.thread.join(_left_s(deadline_s))


def counted(items: Iterable[Item], stats: StageStats) -> Iterator[Item]:
    """Pass items on, and count them as a stage's results."""
    for item in items:
        stats.num_out += 1
        yield item


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())


def close_together(parts: Sequence[Stage | _LoopUser], deadline_s: float) -> None:
    """Close all of these at the same time, each but the last in a thread of its own.

    Each gets for how many seconds it may wait, and returns by itself after a while. One that needs longer is left
    alone. Raises the first error, once all were called.
    """
    errors: list[BaseException] = []
    threads: list[LoaderThread] = []

    def close(part: Stage | _LoopUser) -> None:
        try:
            part.close(_left_s(deadline_s))
        except BaseException as error:
            errors.append(error)

    for part in parts[:-1]:
        thread = LoaderThread(close, "close", part)
        try:
            thread.start()
            threads.append(thread)
        except NoProcessesLeft:  # the interpreter may be ending
            close(part)
    for part in parts[-1:]:
        close(part)
    for thread in threads:
        thread.join(_left_s(deadline_s))
    if errors:
        raise errors[0]
