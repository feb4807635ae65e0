"""Decides which failures of workers the loader survives: deaths and stalls. Pure: counts and arithmetic on times.

Each worker has an id, 0 to n-1. A worker that died is replaced by another one with the same id. The loader gives up
when too many workers with one id die with no batch in between, or when one batch has ended two workers.

A worker that takes too long for the batch that the loop waits for is warned of, and then killed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from enum import Enum

TEMPLATE = -1
"""Stands for the template. A batch from any worker counts as its success."""

MAX_DEATHS_BY_BATCH = 2
"""The first death may be chance. If the same batch is there at a second one, it is the cause."""

MIN_STOPPED_S = 0.2
"""A loop that wakes up later than this was stopped: by SIGSTOP, a debugger or a suspended machine."""

MAX_STOPS = 3
"""How many late wake-ups in one wait of the loop count as a stop of the process."""


class Decision(Enum):
    """What happens after a worker's death."""

    REPLACE = "replace"
    BATCH_IS_TO_BLAME = "the batch is to blame"
    TOO_MANY = "too many in a row"
    LET_GO = "it was leaving"
    """As REPLACE, but nobody takes its place."""


class Restarts:
    """Counts deaths in a row, by worker id and by batch. Not thread-safe."""

    def __init__(self, budget: int) -> None:
        """Start without deaths.

        `budget`: how many workers in a row with one id may be replaced before one of them builds a batch.
        """
        self._budget = budget
        self._in_a_row: dict[int, int] = {}
        """worker id -> deaths since its last batch"""
        self._by_batch: dict[Hashable, int] = {}
        """batch -> workers that died while building it"""

    @property
    def is_counting(self) -> bool:
        """Whether there were deaths since the last batch. If not, `note_batch` needn't be called."""
        return bool(self._in_a_row or self._by_batch)

    def note_batch(self, worker_id: int, batch: Hashable) -> None:
        """Record that a worker built a batch."""
        self._in_a_row.pop(worker_id, None)
        self._in_a_row.pop(TEMPLATE, None)
        self._by_batch.pop(batch, None)

    def forget_batches(self) -> None:
        """Blame no batch for the deaths so far."""
        self._by_batch.clear()

    def forget_worker(self, worker_id: int) -> None:
        """Count none of the deaths of workers with this id: the next one is a new beginning."""
        self._in_a_row.pop(worker_id, None)

    def note_death(self, worker_id: int, batch: Hashable | None) -> Decision:
        """Record that a worker died while building this batch, if any, and decide what to do."""
        self._in_a_row[worker_id] = self._in_a_row.get(worker_id, 0) + 1
        if batch is not None:
            self._by_batch[batch] = self._by_batch.get(batch, 0) + 1
            if self._budget and self._by_batch[batch] >= MAX_DEATHS_BY_BATCH:
                return Decision.BATCH_IS_TO_BLAME
        return Decision.REPLACE if self._in_a_row[worker_id] <= self._budget else Decision.TOO_MANY

    def num_in_a_row(self, worker_id: int) -> int:
        """Return how many workers with this id died since its last batch."""
        return self._in_a_row.get(worker_id, 0)


class Judgement(Enum):
    """What to do about a task that the loop waits for."""

    NOTHING = "nothing"
    WARN = "warn"
    GIVE_UP = "give up"


class Watchdog:
    """Watches the loop's waits, one after another. All times in seconds, by one clock."""

    def __init__(self, stall_warning_s: float | None, timeout_s: float | None, *, counts_waits: bool = True) -> None:
        """Watch no wait yet.

        `stall_warning_s`: how long a task may take before there is a warning; None: no warning. `timeout_s`: how long a
        task may take, and how long the loop waits for it; None: no limit. `counts_waits`: False: a task's time counts
        also while the loop doesn't wait for it.
        """
        self._counts_waits = counts_waits
        self._stall_warning_s = math.inf if stall_warning_s is None else stall_warning_s
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._period_s = min(self._stall_warning_s, self._timeout_s / 2)
        self._grace_s = 0.0
        self.began_s = math.inf
        """When the wait began; later if the process was stopped or a worker was given up."""
        self.deadline_s = math.inf
        """When to judge the workers again."""
        self._warned: set[tuple[int | None, float]] = set()
        """The tasks of which the user was warned: the worker's serial number, and when it began."""
        self._looked: set[tuple[int, float]] = set()
        """The tasks whose half time is over."""
        self._left_s, self._expected_s = math.inf, math.inf
        """When the loop last blocked, and when it should run again."""
        self._num_stops = 0

    def begin(self, now_s: float, grace_s: float) -> None:
        """Begin to watch a wait.

        `grace_s`: how much longer than `timeout_s` the loop waits if no worker has the batch, because replacing one
        takes time.
        """
        self._grace_s = grace_s
        due_s = now_s + self._period_s
        self.began_s, self.deadline_s = now_s, due_s if self._counts_waits else min(self.deadline_s, due_s)
        self._warned.clear()
        self._looked.clear()
        self._left_s, self._expected_s = now_s, math.inf
        self._num_stops = 0

    def judge(self, worker: int | None, since_s: float, now_s: float) -> Judgement:
        """Return what to do about a worker's task that began at `since_s`. It asks for one warning per task.

        `worker` None: the loop waits, and no worker has the batch.
        """
        if now_s >= self._start_s(since_s) + self._timeout_s:
            return Judgement.GIVE_UP
        if now_s >= since_s + self._stall_warning_s and (worker, since_s) not in self._warned:
            self._warned.add((worker, since_s))
            return Judgement.WARN
        return Judgement.NOTHING

    def _start_s(self, since_s: float) -> float:
        """Return from when on a task's time counts."""
        return max(since_s, self.began_s) if self._counts_waits else since_s

    def is_half_over(self, worker: int, since_s: float, now_s: float) -> bool:
        """Return whether half of a worker's time is over, once per task.

        A worker that is still at the same sample when its time is over hangs there.
        """
        is_new = now_s >= self._start_s(since_s) + self._timeout_s / 2 and (worker, since_s) not in self._looked
        if is_new:
            self._looked.add((worker, since_s))
        return is_new

    def judge_itself(self, now_s: float) -> Judgement:
        """Return what to do when no worker has the batch."""
        judgement = self.judge(None, self.began_s, now_s)
        is_early = now_s < self.began_s + self._timeout_s + self._grace_s
        return Judgement.NOTHING if judgement is Judgement.GIVE_UP and is_early else judgement

    def rest(self, now_s: float, until_s: float) -> None:
        """Record that the loop blocks now, and will run again at `until_s` unless the process is stopped."""
        self._left_s, self._expected_s = now_s, until_s

    def wake(self, now_s: float) -> float:
        """Return the time since `rest` if the process was stopped meanwhile, else 0.

        Nothing tells how much of that time the stop took. So the caller must move the begin of each task by all of it.
        The begin of this wait is moved here.
        """
        late_s, self._expected_s = now_s - self._expected_s, math.inf
        if late_s < MIN_STOPPED_S:
            return 0.0
        self._num_stops += 1
        # If every wait ends late, the process is busy, not stopped. Then only the delay doesn't count.
        stopped_s = now_s - self._left_s if self._num_stops <= MAX_STOPS else late_s
        self.began_s += stopped_s
        self.deadline_s += stopped_s
        return stopped_s

    def start_over(self, now_s: float) -> None:
        """Restart the wait, because the worker that the loop waited for was given up."""
        self.began_s = now_s

    def plan_next_check(self, since_s: list[float], now_s: float) -> None:
        """Set `deadline_s`, given when the tasks began that the loop waits for."""
        due = [now_s + self._period_s]
        for start_s in since_s or [self.began_s]:
            due += [self._start_s(start_s) + part * self._timeout_s for part in (0.5, 1)]
            due.append(start_s + self._stall_warning_s)
        if not since_s:
            due.append(self.began_s + self._timeout_s + self._grace_s)
        self.deadline_s = min(time_s for time_s in due if time_s > now_s)
