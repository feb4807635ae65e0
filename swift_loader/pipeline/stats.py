"""Counts what each stage of a run does. The stage's threads write, anybody reads."""

from __future__ import annotations

import time
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
class StageStats:
    """The counts of one stage. Each field has one writer."""

    name: str
    num_in: int | None = None
    """Items that came from upstream; None: the stage has no thread that counts them."""
    num_out: int = 0
    """Items that were handed on."""
    input_wait_s: float = 0.0
    """How long its thread has waited for upstream."""
    output_wait_s: float = 0.0
    """How long its thread has waited for room: for workers, or for downstream."""
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

    def summary(self) -> dict[str, float | str]:
        """Return the counts as plain types: items per second since the beginning, shares of the time."""
        now_s = time.perf_counter()
        elapsed_s, current_s = max(1e-9, now_s - self.began_s), now_s - self.since_s
        input_s = self.input_wait_s + (current_s if self.waits_for is Wait.INPUT else 0.0)
        output_s = self.output_wait_s + (current_s if self.waits_for is Wait.OUTPUT else 0.0)
        return {
            "stage": self.name,
            **({} if self.num_in is None else {"items_in": self.num_in}),
            "items_out": self.num_out,
            "items_per_s": self.num_out / elapsed_s,
            "waiting_for_input": min(1.0, input_s / elapsed_s),
            "waiting_for_output": min(1.0, output_s / elapsed_s),
        }

    def describe(self) -> str:
        """Return a line: items in and out, items per second, and what most of the time was waited for."""
        now = self.summary()
        waits = {"input": float(now["waiting_for_input"]), "output": float(now["waiting_for_output"])}
        longest = max(waits, key=lambda name: waits[name])
        waiting = f", waiting for {longest} {waits[longest]:.0%}" if waits[longest] >= 0.1 else ""  # noqa: PLR2004
        taken = "" if self.num_in is None else f"{self.num_in} in, "
        return f"{taken}{self.num_out} out, {float(now['items_per_s']):.1f}/s{waiting}"


@dataclass(slots=True)
class Tally:
    """The counts of all stages of a run."""

    stats: list[StageStats] = field(default_factory=list)
    """In the order of the pipeline."""
    policies: list[FailurePolicy] = field(default_factory=list)
    """Of the stages that have one."""

    def note(self, name: str) -> StageStats:
        """Return the counts of another stage."""
        stats = StageStats(name)
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
            "num_failures": sum(policy.num_failures for policy in self.policies),
            "failures": [failure for policy in self.policies for failure in policy.kept],
        }
