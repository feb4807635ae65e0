"""Decides when the loop has waited too long. Arithmetic on times; reads no clock."""

from __future__ import annotations

import math
from enum import Enum

MIN_STOPPED_S = 0.2
"""A loop that wakes up later than this was stopped: by SIGSTOP, a debugger or a suspended machine."""

MAX_STOPS = 3
"""How many late wake-ups in one wait of the loop count as a stop of the process."""


class Judgement(Enum):
    """What to do about a task that the loop waits for."""

    NOTHING = "nothing"
    WARN = "warn"
    GIVE_UP = "give up"


class Watchdog:
    """Watches the loop's waits, one after another. All times in seconds, by one clock."""

    def __init__(self, stall_warning_s: float | None, timeout_s: float | None) -> None:
        """Watch no wait yet.

        `stall_warning_s`: how long a task may take before there is a warning; None: no warning. `timeout_s`: how long a
        task may take, and how long the loop waits for it; None: no limit.
        """
        self._stall_warning_s = math.inf if stall_warning_s is None else stall_warning_s
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._period_s = min(self._stall_warning_s, self._timeout_s)
        self._grace_s = 0.0
        self.began_s = math.inf
        """When the wait began; later if the process was stopped or a worker was given up."""
        self.deadline_s = math.inf
        """When to judge the workers again."""
        self._warned: set[float] = set()
        self._left_s, self._expected_s = math.inf, math.inf
        """When the loop last blocked, and when it should run again."""
        self._num_stops = 0

    def begin(self, now_s: float, grace_s: float) -> None:
        """Begin to watch a wait.

        `grace_s`: how much longer than `timeout_s` the loop waits if no worker has the batch, because replacing one
        takes time.
        """
        self._grace_s = grace_s
        self.began_s, self.deadline_s = now_s, now_s + self._period_s
        self._warned.clear()
        self._left_s, self._expected_s = now_s, math.inf
        self._num_stops = 0

    def judge(self, since_s: float, now_s: float) -> Judgement:
        """Return what to do about a task that began at `since_s`. It asks for one warning per task."""
        if now_s >= max(since_s, self.began_s) + self._timeout_s:
            return Judgement.GIVE_UP
        if now_s >= since_s + self._stall_warning_s and since_s not in self._warned:
            self._warned.add(since_s)
            return Judgement.WARN
        return Judgement.NOTHING

    def judge_itself(self, now_s: float) -> Judgement:
        """Return what to do when no worker has the batch."""
        judgement = self.judge(self.began_s, now_s)
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
            due += [start_s + self._stall_warning_s, max(start_s, self.began_s) + self._timeout_s]
        if not since_s:
            due.append(self.began_s + self._timeout_s + self._grace_s)
        self.deadline_s = min(time_s for time_s in due if time_s > now_s)

    def __repr__(self) -> str:
        return f"<Watchdog since {self.began_s:.1f} s, checks at {self.deadline_s:.1f} s>"
