"""How long samples and batches take, and which samples are slow each time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swift_loader.doctor.facts import Batches, Contention, Evidence, Sample, SlowAgain, Stacks
from swift_loader.doctor.findings import Finding, Severity, Verdict, quoted
from swift_loader.doctor.rules.lines import line_shares
from swift_loader.doctor.rules.workers import WorkersNeeded
from swift_loader.doctor.units import count_text, share_text, time_text

__all__ = ["BatchTime", "Timing", "batch_time", "is_slow_each_time", "judge_time", "timing"]

_NUM_SLOWEST = 5

_CPU_BOUND = 0.8
_WAITING = 0.4
"""Shares of CPU time from which a sample is said to be CPU-bound, or to wait."""

_TAIL = 5.0
"""A sample is slow if it takes so many times the median."""
_LEAST_TAIL_S = 1e-3
"""And so much more than the median, in seconds: less is the noise of the machine."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of samples in one worker, in seconds."""

    num_samples: int
    p50_s: float
    p99_s: float
    max_s: float
    mean_s: float
    cpu_share: float
    """CPU time of all samples / their time."""
    slowest: tuple[tuple[int, float], ...]
    """(dataset index, seconds), slowest first."""
    nbytes: float
    """Mean size of a sample."""

    @property
    def samples_per_s(self) -> float:
        """What one worker fetches."""
        return 1 / self.mean_s if self.mean_s else float("inf")

    @property
    def bound(self) -> str:
        """What a sample's time goes to, in words."""
        if self.cpu_share >= _CPU_BOUND:
            return "CPU-bound"
        return "mostly waiting, for files, the network or other processes" if self.cpu_share <= _WAITING else "mixed"


@dataclass(frozen=True, slots=True)
class BatchTime:
    """The time of a batch in one worker, in seconds."""

    batch_size: int
    p50_s: float
    mean_s: float
    collate_s: float
    """Median of what collating takes of it."""
    nbytes: int


def timing(samples: Sequence[Sample], contention: Contention | None = None) -> Timing | None:
    """Return the statistics of samples; None if there are none. The first one, which warms up, counts if it is alone.

    Time in which the samples' thread waited for a core isn't counted as waiting for data.
    """
    counted = samples[1:] or samples
    if not counted:
        return None
    took = np.array([sample.took_s for sample in counted])
    p50, p99 = np.percentile(took, [50, 99])
    order = np.argsort(-took, kind="stable")[:_NUM_SLOWEST]
    return Timing(
        num_samples=len(samples),
        p50_s=float(p50),
        p99_s=float(p99),
        max_s=float(took.max()),
        mean_s=float(took.mean()),
        cpu_share=_cpu_share(counted, 0.0 if contention is None else contention.queued_s),
        slowest=tuple((counted[number].index, counted[number].took_s) for number in order.tolist()),
        nbytes=float(np.mean([sample.nbytes for sample in samples])),
    )


def _cpu_share(samples: Sequence[Sample], queued_s: float) -> float:
    """Return CPU time / (time - time in which there was no core)."""
    cpu_s, took_s = sum(sample.cpu_s for sample in samples), sum(sample.took_s for sample in samples)
    return min(1.0, cpu_s / max(took_s - queued_s, cpu_s, 1e-12))


def batch_time(batches: Batches | None) -> BatchTime | None:
    """Return the statistics of batches; None if none could be collated."""
    if batches is None or not batches.took_s:
        return None
    took, collate = np.array(batches.took_s), np.array(batches.collate_s)
    return BatchTime(
        batches.batch_size, float(np.median(took)), float(took.mean()), float(np.median(collate)), batches.nbytes
    )


def is_slow_each_time(slow: SlowAgain, p50_s: float) -> bool:
    """Return whether a sample took much longer than the median, both times."""
    limit_s = max(_TAIL * p50_s, p50_s + _LEAST_TAIL_S)
    return min(slow.first_s, slow.again_s) > limit_s


def judge_time(evidence: Evidence, workers: WorkersNeeded | None) -> Verdict:
    """Return findings on slow samples, and on a step that this machine can't feed."""
    verdict, seen = Verdict(), timing(evidence.samples, evidence.contention)
    if seen is None:
        return verdict
    slow = [one for one in evidence.slow_again if is_slow_each_time(one, seen.p50_s)]
    if slow:
        verdict.findings.append(_slow_samples(slow, seen, evidence.stacks))
    else:
        verdict.healthy.append(f"no sample takes much longer than the others each time ({_spread(seen)})")
    if workers is not None and not workers.is_fed:
        verdict.findings.append(_not_fed(workers))
    return verdict


def _spread(seen: Timing) -> str:
    return f"p50 {time_text(seen.p50_s)}, p99 {time_text(seen.p99_s)}"


def _slow_samples(slow: Sequence[SlowAgain], seen: Timing, stacks: Stacks | None) -> Finding:
    times = quoted([f"{one.index} ({time_text(one.first_s)}, again {time_text(one.again_s)})" for one in slow])
    lines = line_shares(stacks.of_slowest) if stacks is not None else ()
    where = f"; {share_text(lines[0].share)} of their time is in {lines[0].line}" if lines else ""
    return Finding(
        Severity.WARNING,
        "time",
        "Some samples take much longer than the others, each time.",
        f"the median is {time_text(seen.p50_s)}; dataset indices {times}{where}",
        "Make that line cheaper for these samples, or prepare them once on disk: a batch waits for its slowest sample.",
        tuple(one.index for one in slow),
    )


def _not_fed(workers: WorkersNeeded) -> Finding:
    cores = f"{workers.num_cores:g} cores"
    return Finding(
        Severity.WARNING,
        "workers",
        f"This machine can't keep a step of {time_text(workers.step_s)} fed.",
        f"its {cores} build a batch every {time_text(workers.fed_step_s)} at best, with "
        f"{count_text(workers.num_workers, 'worker')}",
        "Make samples cheaper (smaller files, work done once beforehand), or use a machine with more cores.",
    )
