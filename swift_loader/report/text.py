"""A report as a text of a few lines. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift_loader.report.breakdown import Breakdown, Part
from swift_loader.report.verdict import Bound

if TYPE_CHECKING:
    from swift_loader.metrics.observations import Observations
    from swift_loader.report.report import Report

__all__ = ["describe", "shown_seconds"]

_MAX_WORKERS = 8
_MAX_SLOWEST = 4
_MAX_TUNING = 3
_MIN_SHOWN_SHARE = 0.002
_THREE_DIGITS = 999.5
"""From here on, three digits show the next unit."""


def describe(report: Report) -> str:
    """Return the report in at most 25 lines."""
    observations = report.observations
    if observations is None:
        return "<Report: nothing is measured>"
    if not len(observations.batches):
        return "<Report: no batches yet>"
    breakdown = report.breakdown
    lines = [_headline(report), _speed(observations), "", f"{'a batch':<20}{'p50':>10}{'p99':>10}{'share':>8}"]
    lines += [_row(part) for part in breakdown.parts if part.share >= _MIN_SHOWN_SHARE]
    lines += ["", *_workers(breakdown)]
    if observations.slowest:
        slowest = ", ".join(
            f"{sample.index} ({shown_seconds(sample.seconds)})" for sample in observations.slowest[:_MAX_SLOWEST]
        )
        lines.append(f"slowest samples: {slowest}")
    lines += [f"workers: {line}" for line in report.tuning[-_MAX_TUNING:]]
    lines += ["", *_advice(report)]
    return "\n".join(lines)


def shown_seconds(seconds: float) -> str:
    """Return three digits and a unit."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < _THREE_DIGITS:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < _THREE_DIGITS else f"{seconds:.0f} s"


def _headline(report: Report) -> str:
    verdict = report.verdict
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
    rate = f", {observations.num_delivered / elapsed:.4g} batches/s" if elapsed > 0 else ""
    noun, plural = ("thread", "threads") if setup.worker_type == "thread" else ("process", "processes")
    num_here = setup.num_workers - setup.num_remote
    workers = f"{num_here} worker {noun if num_here == 1 else plural}"
    if setup.loading_rank is not None:
        workers = f"the workers of rank {setup.loading_rank}"
    if setup.num_remote:
        actors = f"{setup.num_remote} Ray actor{'' if setup.num_remote == 1 else 's'}"
        workers = f"{actors} and {workers}" if num_here else actors
    cores = f"{setup.num_cores:g} core{'' if setup.num_cores == 1 else 's'}"
    return (
        f"{observations.num_delivered} batches in {shown_seconds(elapsed)}{rate}; {workers} on {cores}, "
        f"at most {setup.max_in_flight} batches in flight"
    )


def _row(part: Part) -> str:
    return f"{part.name:<20}{shown_seconds(part.p50_s):>10}{shown_seconds(part.p99_s):>10}{100 * part.share:>6.0f} %"


def _workers(breakdown: Breakdown) -> list[str]:
    """Return what the workers do. Few of them are listed one by one."""
    used = breakdown.workers
    lines = []
    if 1 < len(used) <= _MAX_WORKERS:
        each = ", ".join(f"{100 * worker.busy_share:.0f} %" for worker in used)
        lines.append(f"workers are busy {each} of the time, with {_range([one.num_batches for one in used])} batches")
    elif used:
        shares = _range([round(100 * one.busy_share) for one in used])
        lines.append(
            f"workers are busy {shares} % of the time, with {_range([one.num_batches for one in used])} batches"
        )
    if breakdown.cpu is not None:
        cpu = breakdown.cpu
        lines.append(
            f"at a batch they run {100 * cpu.running:.0f} %, wait for I/O {100 * cpu.waiting_for_io:.0f} %, wait for a "
            f"core {100 * cpu.waiting_for_core:.0f} %"
        )
    return lines


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _advice(report: Report) -> list[str]:
    if report.verdict.bound in (Bound.STARTING, Bound.MODEL):
        return []
    observations = report.observations
    if observations is not None and observations.setup.loading_rank is not None:
        return [f"rank {observations.setup.loading_rank} loads for this one, too: its report says what would help"]
    if observations is not None and observations.setup.num_remote:
        return ["what more actors would bring isn't known: try RayExecutor(n) with another n, or resize(n)"]
    if not report.advice:
        return ["more workers wouldn't bring 5 %"]
    return [str(advice) for advice in report.advice]
