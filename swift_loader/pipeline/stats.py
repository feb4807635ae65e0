"""Counts what each stage of a run does. The stage's threads write, anybody reads."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from swift_loader.pipeline.failures import FailurePolicy


class Wait(Enum):
    """What the thread of a stage waits for."""

    INPUT = "input"
    OUTPUT = "output"
    NOTHING = "nothing"
    """It has ended, or the stage has no thread."""


@dataclass(slots=True)
class Calls:
    """What the workers of a stage have done. The thread that takes its results writes."""

    concurrency: int
    max_in_flight: int
    """Items that are worked on, or whose results wait."""
    max_waiting: int
    """Items that wait for a worker."""
    num_results: int = 0
    busy_s: float = 0.0
    """How long all calls took together."""
    in_front: float = 0.0
    """How full the queue before the workers was, from 0 to 1, summed over the results."""
    behind: float = 0.0
    """The same of the queue after them."""
    last_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    """How long each of the last calls took."""

    def note(self, call_s: float | None) -> None:
        """Record how long a call took; None: it isn't known."""
        if call_s is not None:
            self.busy_s += call_s
            self.last_s.append(call_s)

    def note_queues(self, num_left: int, num_ready: int) -> None:
        """Record how many items are in the stage as a result was taken, and how many of them have their result."""
        self.num_results += 1
        self.in_front += max(0, num_left - num_ready - self.concurrency) / self.max_waiting
        self.behind += num_ready / self.max_in_flight

    def summary(self, elapsed_s: float) -> dict[str, float]:
        """Return the shares of the time and of the queues, and seconds per call."""
        times, num = sorted(self.last_s.copy()) or [0.0], max(1, self.num_results)
        return {
            "busy": min(1.0, self.busy_s / (elapsed_s * self.concurrency)),
            "call_s_p50": times[len(times) // 2],
            "call_s_p99": times[len(times) * 99 // 100],
            "queue_in_front": self.in_front / num,
            "queue_behind": self.behind / num,
        }


@dataclass(slots=True)
class StageStats:
    """The counts of one stage. Each field has one writer."""

    name: str
    tally: Tally
    calls: Calls | None = None
    """None: the stage has no workers."""
    num_in: int | None = None
    """Items that came from upstream; None: the stage has no thread that counts them."""
    num_out: int = 0
    """Items that were handed on."""
    input_wait_s: float = 0.0
    """How long its thread has waited for upstream."""
    output_wait_s: float = 0.0
    """How long its thread has waited for room: for its workers, or for downstream."""
    began_s: float = field(default_factory=time.perf_counter)
    waits_for: Wait = Wait.NOTHING
    """What its thread does now."""
    since_s: float = field(default_factory=time.perf_counter)
    """Since when."""

    def note_wait(self, now_s: float, following: Wait) -> None:
        """Record that a wait is over, and that the next one begins."""
        waited_s = now_s - self.since_s
        if self.waits_for is Wait.INPUT:
            self.input_wait_s += waited_s
        elif self.waits_for is Wait.OUTPUT:
            self.output_wait_s += waited_s
        self.since_s, self.waits_for = now_s, following

    def summary(self) -> dict[str, Any]:
        """Return the counts as plain types: items per second, shares of the time; see `Calls.summary`."""
        now_s = self.tally.ended_s or time.perf_counter()
        elapsed_s, current_s = max(1e-9, now_s - self.began_s), max(0.0, now_s - self.since_s)
        input_s = self.input_wait_s + (current_s if self.waits_for is Wait.INPUT else 0.0)
        output_s = self.output_wait_s + (current_s if self.waits_for is Wait.OUTPUT else 0.0)
        # The thread of a stage that has workers waits for them, too, so its wait says nothing about downstream.
        output = {"waiting_for_output": min(1.0, output_s / elapsed_s)} if self.calls is None else {}
        return {
            "stage": self.name,
            **({} if self.num_in is None else {"items_in": self.num_in}),
            "items_out": self.num_out,
            "items_per_s": self.num_out / elapsed_s,
            "waiting_for_input": min(1.0, input_s / elapsed_s),
            **(output if self.calls is None else self.calls.summary(elapsed_s)),
        }

    def describe(self) -> str:
        """Return a line: items in and out, items per second; how busy its workers are, or what it waited for."""
        now = self.summary()
        line = f"{'' if self.num_in is None else f'{self.num_in} in, '}{self.num_out} out, {now['items_per_s']:.1f}/s"
        if self.calls is not None:
            times = f"{1e3 * now['call_s_p50']:.3g} ms a call (p99 {1e3 * now['call_s_p99']:.3g})"
            queues = f"{now['queue_in_front']:.0%} full in front, {now['queue_behind']:.0%} behind"
            return f"{line}, busy {now['busy']:.0%}, {times}, queues {queues}"
        longest = max("input", "output", key=lambda name: now[f"waiting_for_{name}"])
        share: float = now[f"waiting_for_{longest}"]
        return f"{line}, waiting for {longest} {share:.0%}" if share >= 0.1 else line  # noqa: PLR2004


@dataclass(slots=True)
class Tally:
    """The counts of all stages of a run."""

    stats: list[StageStats] = field(default_factory=list)
    """In the order of the pipeline."""
    policies: list[FailurePolicy] = field(default_factory=list)
    """Of the stages that have one."""
    ended_s: float = 0.0
    """When the run was closed; 0: it goes on."""

    def note(self, name: str) -> StageStats:
        """Return the counts of another stage."""
        stats = StageStats(name, self)
        self.stats.append(stats)
        return stats

    def describe(self) -> str:
        """Return what each stage is doing, a line for each."""
        width = max((len(stats.name) for stats in self.stats), default=0)
        return "\n".join(f"  {stats.name:{width}}  {stats.describe()}" for stats in self.stats)

    def report(self) -> dict[str, Any]:
        """Return the counts, and the items that were left out."""
        return {
            "stages": [stats.summary() for stats in self.stats],
            "num_failures": sum(policy.failed.total() for policy in self.policies),
            "failures": [failure for policy in self.policies for failure in policy.kept],
        }
