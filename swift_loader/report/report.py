"""The report of a loader: what was measured, what it means, and what would help."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib import import_module
from os import PathLike
from typing import Any

from swift_loader.errors import time_text
from swift_loader.metrics.observations import Observations, Setup
from swift_loader.report.stages import Breakdown
from swift_loader.report.verdict import SWIFT_LOADER, Advice, Bound, Verdict, advise

_MAX_WORKERS = 8
_MAX_SLOWEST = 4
_MAX_TUNING = 3
_MIN_SHOWN_SHARE = 0.002


@dataclass(frozen=True, eq=False, repr=False)
class Report(Mapping[str, Any]):
    """What was measured of a loader, up to now. Immutable. Empty, and false, if nothing is measured.

    As a mapping, it has the counts and the times of each stage: `report["batches_delivered"]`. What takes time to
    compute is computed when it is asked for, once.
    """

    observations: Observations | None = None
    counts: Mapping[str, Any] = field(default_factory=dict)
    option: str = SWIFT_LOADER
    """What the loader calls its number of workers."""
    tuning: tuple[str, ...] = ()
    """What the loader did about its number of workers, and why, if it chooses that itself."""

    def __getitem__(self, name: str) -> Any:
        return self.counts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.counts)

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def verdict(self) -> Verdict:
        """Whether the loop waits for data. A ValueError if nothing is measured."""
        return Verdict.of(self._measured())

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where a batch's time goes. A ValueError if nothing is measured."""
        return Breakdown.of(self._measured())

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What would make the loop faster: at most one thing. Empty if nothing would bring 5 %."""
        return () if self.observations is None else advise(self.observations, self.option)

    def __getattr__(self, name: str) -> Any:
        gone = "; Report predicts no speeds any more: report.advice has the number of workers that may help"
        raise AttributeError(f"a Report has no attribute {name!r}{gone if name == 'predict' else ''}")

    def _measured(self) -> Observations:
        if self.observations is None:
            raise ValueError("nothing is measured: give benchmark=True, and start the loader")
        return self.observations

    def plot(self, path: str | PathLike[str]) -> None:
        """Write pictures of the report to a file."""
        import_module("swift_loader.report.plots").plot(self, path)  # draws with an optional library

    def to_dict(self) -> dict[str, Any]:
        """Return all of it but the single batches, as plain JSON types."""
        if self.observations is None:
            return dict(self.counts)
        return {
            **self.counts,
            "verdict": {"bound": self.verdict.bound.value, "wait_share": self.verdict.wait_share},
            "setup": asdict(self.observations.setup),
            "breakdown": asdict(self.breakdown),
            "slowest": [asdict(sample) for sample in self.observations.slowest],
            "tuning": list(self.tuning),
            "advice": [asdict(advice) for advice in self.advice],
        }

    def to_json(self) -> str:
        """Return `to_dict()` as a JSON text."""
        return json.dumps(self.to_dict(), indent=2, default=dict)

    def __repr__(self) -> str:
        return _described(self)


def _described(report: Report) -> str:
    """Return the report in at most 25 lines."""
    observations = report.observations
    if observations is None:
        return "<Report: nothing is measured>"
    if not len(observations.batches):
        return "<Report: no batches yet>"
    breakdown = report.breakdown
    lines = [headline(report.verdict), _speed(observations), ""]
    lines.append(f"{'a batch':<20}{'p50':>10}{'p99':>10}{'share':>8}")
    for part in breakdown.parts:
        if part.share >= _MIN_SHOWN_SHARE:
            share = f"{100 * part.share:.0f} %"
            lines.append(f"{part.name:<20}{time_text(part.p50_s):>10}{time_text(part.p99_s):>10}{share:>8}")
    lines += ["", *_workers(breakdown)]
    if observations.slowest:
        slowest = ", ".join(
            f"{sample.index} ({time_text(sample.seconds)})" for sample in observations.slowest[:_MAX_SLOWEST]
        )
        lines.append(f"slowest samples: {slowest}")
    lines += [f"workers: {line}" for line in report.tuning[-_MAX_TUNING:]]
    lines += ["", *_advice(report, observations.setup)]
    return "\n".join(lines)


def headline(verdict: Verdict) -> str:
    """Return the verdict and what it means, in a line."""
    share = f"{100 * verdict.wait_share:.0f} %"
    meaning = {
        Bound.STARTING: "too few batches for a verdict",
        Bound.DATA: f"the loop waits for data {share} of its time",
        Bound.BALANCED: f"the loop waits for data {share} of its time",
        Bound.MODEL: f"the loop waits for data only {share} of its time; faster data would bring nothing",
    }
    return f"{verdict.bound.value}: {meaning[verdict.bound]}"


def _speed(observations: Observations) -> str:
    setup, elapsed = observations.setup, observations.elapsed_s
    delivered = observations.num_delivered
    rate = f", {delivered / elapsed:.4g} batches/s" if elapsed > 0 and delivered > 1 else ""  # one was there already
    noun, plural = ("thread", "threads") if setup.worker_type == "thread" else ("process", "processes")
    num_here = setup.num_workers - setup.num_remote
    workers = f"{num_here} worker {noun if num_here == 1 else plural}"
    if setup.num_remote:
        actors = f"{setup.num_remote} Ray actor{'' if setup.num_remote == 1 else 's'}"
        workers = f"{actors} and {workers}" if num_here else actors
    cores = f"{setup.num_cores:g} core{'' if setup.num_cores == 1 else 's'}"
    return (
        f"{delivered} batch{'' if delivered == 1 else 'es'} in {time_text(elapsed)}{rate}; {workers} on {cores}, "
        f"at most {setup.max_in_flight} batches in flight"
    )


def _workers(breakdown: Breakdown) -> list[str]:
    """Return what the workers do. Few of them are listed one by one."""
    used = breakdown.workers
    lines = []
    if used:
        busy = [round(100 * one.busy_share) for one in used]
        few = 1 < len(used) <= _MAX_WORKERS
        shares = ", ".join(f"{share} %" for share in busy) if few else f"{_range(busy)} %"
        lines.append(f"workers are busy {shares} of the time, with {_range([one.num_batches for one in used])} batches")
    if (cpu := breakdown.cpu) is not None:
        lines.append(
            f"at a batch they run {100 * cpu.running:.0f} %, wait for I/O {100 * cpu.waiting_for_io:.0f} %, wait for a "
            f"core {100 * cpu.waiting_for_core:.0f} %"
        )
    return lines


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _advice(report: Report, setup: Setup) -> list[str]:
    if report.verdict.bound in (Bound.STARTING, Bound.MODEL):
        return []
    if setup.num_remote:
        return ["what more actors would bring isn't known: try RayExecutor(n) with another n, or resize(n)"]
    return [str(advice) for advice in report.advice] or ["more workers wouldn't bring 5 %"]
