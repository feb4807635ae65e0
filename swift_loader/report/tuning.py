"""Decides how many workers a loader should have: windows come in, numbers go out. Pure. Reports advise by its formula.

    Tuner        SEARCHING ──found──► SETTLED ──the load changed──► SEARCHING
    Autotuner    WARMING ──the new workers are at work──► MEASURING ──a window is full──► the tuner decides ──► either

A search begins with the number that a model of the loader gives: enough workers for the loop's own time, or for all
cores. The model doesn't know what else workers compete for, such as memory bandwidth or a disk. So the search continues
by trying: more workers while that raises the rate, else fewer while that doesn't lower it. It ends when the loop hardly
waits, or when the neighbours of the best number were tried.

A settled tuner compares each window with the one that it settled with. A search that ends where it began was a false
alarm, and makes the tuner twice as patient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from swift_loader.metrics.observations import Observations, Setup, stage_times, steps_ns

CHECK_NS = 250_000_000
"""How often it looks."""

WINDOW_S = 3.0
"""A window is at least so long: shorter ones are too noisy for gains of 2 %."""

MIN_WINDOW_BATCHES = 8
MAX_WINDOW_BATCHES = 4096
BATCHES_PER_WORKER = 2
"""A window has at least so many batches: each worker has then built some."""

TYPICAL_STEP_S = 0.05
"""Of a loop, for the first number."""

LITTLE_WAIT = 0.02
"""A loop that waits for less than this share of its time needs no more workers."""

MUCH_WAIT = 0.1
"""A settled loop that suddenly waits for more than this has another load."""

GAIN = 0.02
"""A rate that is higher by less than this is the same rate."""

CHANGE = 0.25
"""How much the time of a batch or a step changes if the load is another one."""

GROWTH = 1.5
"""How far up the next try is. Where workers compete, small steps bring so little that noise hides it."""

SHRINKAGE = 1.25
"""How far down the next try is."""

HEADROOM = 1.2
"""Workers for a loop that doesn't wait: a fifth more than needed on average, because times vary."""

TOO_MANY = 2.0
"""A loop that doesn't wait gives workers back if it has this many times what it needs."""

MAX_TRIES = 10
"""Of one search."""

PATIENCE = 2
"""How many windows in a row must differ before a settled tuner searches again."""

MAX_PATIENCE = 32

NEARLY = 0.99
"""So much of the highest rate is enough, for fewer workers."""

PAUSE_S = 1.0
PAUSE_FACTOR = 20
"""A loop that takes at least so long between two batches, and so many times as long as usually, did something else: it
evaluated, or saved a checkpoint."""

MAX_TUNED_WORKERS = 64
MIN_LIMIT = 4
"""A machine with one core may still have so many: they may wait for a disk or a network."""

WORKERS_PER_CORE = 8

MEMORY_SHARE = 0.5
"""Of the free memory, for further workers."""

WORKER_NBYTES = 64 << 20
"""A worker's own memory. It is forked, so it shares the dataset."""

BATCHES_IN_FLIGHT = 3
"""Of each further worker."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the workers of this rank may use."""

    num_cores: float
    """Cores for the trainer and its workers."""
    max_workers: int
    """No more workers than that: memory, and the user's limit."""


@dataclass(frozen=True, slots=True)
class Window:
    """The means of a window of time. Times are per batch."""

    num_workers: int
    waited_s: float
    """How long the loop waited for a batch."""
    step_s: float
    """The loop's own time: from one batch to when it asks for the next."""
    service_s: float
    """How long a worker takes for a batch, without waiting for a core."""
    cpu_s: float
    """How much of that a core is busy."""
    trainer_cpu_s: float
    """How long the trainer keeps cores busy per batch."""

    @property
    def rate(self) -> float:
        """Batches per second."""
        return 1 / max(self.waited_s + self.step_s, 1e-9)

    @property
    def wait_share(self) -> float:
        """Which share of the loop's time is waiting."""
        return self.waited_s * self.rate

    def expected_rate(self, num_workers: int, num_cores: float) -> float:
        """Return the most batches per second that so many workers may bring.

        It is the least of three limits: the loop's, the workers', and that of the cores.
        """
        by_cores = num_cores / max(self.cpu_s + self.trainer_cpu_s, 1e-9)
        return min(1 / max(self.step_s, 1e-9), num_workers / max(self.service_s, 1e-9), by_cores)

    def needed_workers(self, machine: Machine) -> int:
        """Return the fewest workers that bring nearly the highest rate that the machine allows."""
        best = self.expected_rate(machine.max_workers, machine.num_cores)
        return next(
            number
            for number in range(1, machine.max_workers + 1)
            if self.expected_rate(number, machine.num_cores) >= NEARLY * best
        )


def window_of(batches: NDArray[np.void], num_workers: int, trainer_cpu_s: float) -> Window | None:
    """Return the means over these batches, oldest first; None if there are fewer than two."""
    if len(batches) < 2:  # noqa: PLR2004 - the loop's own time is that between two batches
        return None
    times, steps = stage_times(batches), steps_ns(batches)
    if steps.size:
        steps = steps[steps < max(PAUSE_S * 1e9, PAUSE_FACTOR * float(np.median(steps)))]
    waited_s, build_s = float(times["wait"].mean()) / 1e9, float(times["build"].mean()) / 1e9
    step_s = float(steps.mean()) / 1e9 if steps.size else 0.0
    delays = batches["run_delay_ns"]
    was_measured = delays >= 0
    delay_s = float(delays[was_measured].mean()) / 1e9 if was_measured.any() else 0.0
    cpu_s = float(batches["cpu_ns"].mean()) / 1e9
    return Window(
        num_workers=num_workers,
        waited_s=waited_s,
        step_s=step_s,
        service_s=max(build_s - delay_s, min(cpu_s, build_s)),
        cpu_s=cpu_s,
        trainer_cpu_s=trainer_cpu_s,
    )


def room_for(observations: Observations, free_nbytes: int, *, keeps_limit: bool = True) -> Machine:
    """Return what the workers of a rank may use. The ranks of a machine share it evenly.

    `free_nbytes`: the machine's free memory; 0: unknown. With `keeps_limit`, a limit of batches in flight that the user
    gave stays: more workers than that can't be busy.
    """
    setup, nbytes = observations.setup, observations.batches["nbytes"]
    most = min(MAX_TUNED_WORKERS, max(MIN_LIMIT, math.ceil(WORKERS_PER_CORE * setup.cores_per_rank)))
    if free_nbytes:
        for_workers = MEMORY_SHARE * free_nbytes / max(1, setup.world_size_here)
        each = WORKER_NBYTES + BATCHES_IN_FLIGHT * (int(np.median(nbytes)) if nbytes.size else 0)
        most = min(most, setup.num_workers + int(for_workers / each))
    if keeps_limit and not setup.is_in_flight_chosen:
        most = min(most, setup.max_in_flight)
    return Machine(setup.cores_per_rank, max(1, most))


def first_number(setup: Setup, build_s: float) -> int:
    """Return how many workers to start with. `build_s`: how long a worker took for a batch; infinite if unknown."""
    guess = most = max(1, int(setup.cores_per_rank))
    if math.isfinite(build_s):
        guess = min(most, max(1, math.ceil(build_s / TYPICAL_STEP_S)))
    return max(setup.num_workers, guess if setup.is_in_flight_chosen else min(guess, setup.max_in_flight))


class TunerState(Enum):
    """See the drawing above."""

    SEARCHING = "searching"
    SETTLED = "settled"


@dataclass(slots=True)
class _Search:
    """The numbers of workers that were tried since the load changed."""

    first: int
    """Where it began."""
    windows: dict[int, Window] = field(default_factory=dict)
    """The last one of each number of workers."""
    num_tries: int = 0
    has_jumped: bool = False
    """Whether the model was asked. It is asked once, so that its error can't move the search for ever."""

    @property
    def rates(self) -> dict[int, float]:
        """Batches per second, by number of workers."""
        return {number: window.rate for number, window in self.windows.items()}

    @property
    def best(self) -> int:
        """The fewest workers with nearly the highest rate."""
        rates = self.rates
        highest = max(rates.values())
        return min(number for number, rate in rates.items() if rate >= (1 - GAIN) * highest)

    def has_tried(self, low: int, high: int) -> bool:
        """Return whether a number from `low` to `high` was tried. True if there is none."""
        return low > high or any(low <= number <= high for number in self.windows)

    def has_seen(self, number: int, now: Window) -> bool:
        """Return whether a number was tried with the load that there is now: the load may change during a search."""
        before = self.windows.get(number)
        return before is not None and not _differ(before.step_s, now.step_s)


class Tuner:
    """Chooses the number of workers of one loader. Not thread-safe."""

    def __init__(self) -> None:
        self.state = TunerState.SEARCHING
        self.reason = "nothing was measured yet"
        """Why the loader has the workers that it has, as half a sentence for the user."""
        self._search: _Search | None = None
        self._settled: Window | None = None
        """The window with the number that it settled with."""
        self._num_differing = 0
        """Windows in a row that differ from it."""
        self._patience = PATIENCE

    def decide(self, window: Window, machine: Machine) -> int:
        """Return how many workers there should be from now on."""
        if self.state is TunerState.SETTLED and not self._has_changed(window, machine):
            return window.num_workers
        search = self._search
        if search is None:
            search = self._search = _Search(window.num_workers)
            self.state = TunerState.SEARCHING
        search.windows[window.num_workers] = window
        search.num_tries += 1
        wanted = _next_try(search, window, machine)
        if wanted is not None and search.num_tries < MAX_TRIES:
            self.reason = f"the loop waited {window.wait_share:.1%} of its time with {window.num_workers}"
            return wanted
        return self._settle(search, window)

    def _has_changed(self, window: Window, machine: Machine) -> bool:
        """Return whether the load is another one than when the tuner settled."""
        settled = self._settled
        if settled is None or settled.num_workers != window.num_workers:  # there was no room for the number
            self._settled, self._num_differing = window, 0
            return False
        differs = (
            _differ(settled.service_s, window.service_s)
            or _differ(settled.step_s, window.step_s)
            or (settled.wait_share < LITTLE_WAIT and window.wait_share > MUCH_WAIT)
        )
        waits = window.wait_share > LITTLE_WAIT
        # Else another number of workers can't be better.
        matters = waits or window.num_workers >= TOO_MANY * HEADROOM * window.needed_workers(machine)
        self._num_differing = self._num_differing + 1 if differs and matters else 0
        return self._num_differing >= self._patience

    def _settle(self, search: _Search, window: Window) -> int:
        """End the search. Return the best number that was tried."""
        is_enough = window.wait_share < LITTLE_WAIT
        best = window.num_workers if is_enough else search.best
        tried = ", ".join(map(str, sorted(search.rates)))
        self.reason = (
            f"with {best}, the loop waits {window.wait_share:.1%} of its time"
            if is_enough
            else f"of {tried}, {best} brought the most: {search.rates[best]:.3g} batches/s"
        )
        found_same = best == search.first and self._settled is not None
        self._patience = min(MAX_PATIENCE, 2 * self._patience) if found_same else PATIENCE
        self._settled = search.windows[best]  # not the next window: the load may be another one by then
        self._search, self._num_differing, self.state = None, 0, TunerState.SETTLED
        return best


def _next_try(search: _Search, window: Window, machine: Machine) -> int | None:
    """Return the number of workers to try next; None if the search is over."""
    now, most = window.num_workers, machine.max_workers
    if window.wait_share < LITTLE_WAIT:
        needed = math.ceil(HEADROOM * window.needed_workers(machine))
        return needed if now >= TOO_MANY * needed and not search.has_seen(needed, window) else None
    if not search.has_jumped:
        search.has_jumped = True
        needed = window.needed_workers(machine)
        if needed != now:
            return needed
    best = search.best
    more, fewer = min(most, max(best + 1, int(best * GROWTH))), max(1, min(best - 1, int(best / SHRINKAGE)))
    if not search.has_tried(best + 1, more):
        return more
    if not search.has_tried(fewer, best - 1):
        return fewer
    return None


def _differ(before: float, now: float) -> bool:
    return abs(now - before) > CHANGE * max(before, now)


# The workers of a running loader --------------------------------------------------------------------------------------


class _Phase(Enum):
    """See the second drawing above."""

    WARMING = "warming"
    MEASURING = "measuring"


@dataclass(slots=True)
class _Measured:
    """What had been measured at some point."""

    now_ns: int
    num_delivered: int
    elapsed_s: float
    trainer_cpu_s: float


class Autotuner:
    """Chooses the number of workers of one loader, while its loop runs. The loop's thread uses it."""

    def __init__(self, num_workers: int) -> None:
        """Begin with the workers that there are. Times are of `time.perf_counter_ns`."""
        self._tuner = Tuner()
        self._phase = _Phase.WARMING
        self._mark = _Measured(0, 0, 0.0, 0.0)
        """Where the phase began."""
        self._next_ns = 0
        self._wanted = num_workers
        self.history: list[str] = []
        """What it changed and why, oldest first."""

    def describe(self) -> list[str]:
        """Return what it changed and what it thinks now, one line each."""
        is_tried = self.history and self._tuner.state is TunerState.SEARCHING
        reason = "it is being tried" if is_tried else self._tuner.reason
        return [*self.history, f"now {self._wanted}: {reason}"]

    def is_due(self, now_ns: int) -> bool:
        """Return whether to call `decide`. Mostly it isn't time."""
        if now_ns < self._next_ns:
            return False
        self._next_ns = now_ns + CHECK_NS
        return True

    def has_measured(self, observations: Observations, now_ns: int) -> bool:
        """Return whether enough was measured for `decide`, of which the arguments are."""
        mark, setup = self._mark, observations.setup
        num_new = observations.num_delivered - mark.num_delivered
        if setup.num_workers != self._wanted:  # the change has failed: try it again
            return True
        if self._phase is _Phase.WARMING:
            if num_new >= setup.max_in_flight:  # those before were built by the workers before
                self._begin(_Phase.MEASURING, observations, now_ns)
            return False
        is_long = observations.elapsed_s - mark.elapsed_s >= WINDOW_S
        return is_long and num_new >= max(MIN_WINDOW_BATCHES, BATCHES_PER_WORKER * self._wanted)

    def decide(self, observations: Observations, now_ns: int, free_nbytes: int) -> int | None:
        """Return another number of workers, if enough was measured to know a better one.

        `observations`: what was measured until now, with the last `MAX_WINDOW_BATCHES`. `free_nbytes`: see `room_for`.
        """
        mark, wanted = self._mark, self._wanted
        if observations.setup.num_workers != wanted:
            return wanted
        num_new = observations.num_delivered - mark.num_delivered
        batches = observations.batches[observations.batches["asked_ns"] >= mark.now_ns]
        window = window_of(batches, wanted, (observations.trainer_cpu_s - mark.trainer_cpu_s) / num_new)
        if window is None:
            return None
        machine = room_for(observations, free_nbytes)
        self._wanted = min(self._tuner.decide(window, machine), machine.max_workers)
        if self._wanted == wanted:
            self._begin(_Phase.MEASURING, observations, now_ns)
            return None
        after = f"after {observations.elapsed_s:.0f} s"
        self.history.append(f"{after}, {wanted} → {self._wanted}: {self._tuner.reason}")
        self._begin(_Phase.WARMING, observations, now_ns)
        return self._wanted

    def _begin(self, phase: _Phase, observations: Observations, now_ns: int) -> None:
        self._phase = phase
        self._mark = _Measured(now_ns, observations.num_delivered, observations.elapsed_s, observations.trainer_cpu_s)
