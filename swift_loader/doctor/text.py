"""A diagnosis as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from swift_loader.doctor.diagnosis import Diagnosis
from swift_loader.doctor.rules.workers import WorkersNeeded
from swift_loader.doctor.units import count_text, nbytes_text, share_text, time_text

__all__ = ["as_text", "headline", "time_lines", "workers_line"]

_FEW = 5


def as_text(diagnosis: Diagnosis) -> str:
    """Return the whole diagnosis, without a line feed at its end."""
    return "\n".join(_all_lines(diagnosis))


def _all_lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield headline(diagnosis)
    for title, lines in (("Time", time_lines(diagnosis)), ("Lines", _code_lines(diagnosis))):
        if lines:
            yield from ("", title, *(f"  {line}" for line in lines))
    if diagnosis.findings:
        yield from ("", "Findings")
    for finding in diagnosis.findings:
        yield f"  {finding.severity.value.upper()} ({finding.topic}): {finding.what}"
        yield f"      seen: {finding.evidence}"
        yield f"      do:   {finding.remedy}"
    if diagnosis.healthy:
        yield from ("", "Healthy", *(f"  {line}" for line in diagnosis.healthy))


def headline(diagnosis: Diagnosis) -> str:
    """Return the first line: what was examined."""
    length = "" if diagnosis.num_samples is None else f", {count_text(diagnosis.num_samples, 'sample')}"
    seen = "" if diagnosis.timing is None else f", {diagnosis.timing.num_samples:,} measured"
    kind = f" is a {diagnosis.dataset}" if diagnosis.dataset else ""
    return f"{diagnosis.target}{kind}{length}{seen}"


def time_lines(diagnosis: Diagnosis) -> list[str]:
    """Return the times of samples, batches and workers."""
    seen, batch, lines = diagnosis.timing, diagnosis.batch, list[str]()
    if seen is None:
        return lines
    lines.append(
        f"sample: p50 {time_text(seen.p50_s)}, p99 {time_text(seen.p99_s)}, max {time_text(seen.max_s)}; "
        f"{share_text(seen.cpu_share)} CPU ({seen.bound}); {nbytes_text(seen.nbytes)}"
    )
    slowest = ", ".join(f"{index} ({time_text(took_s)})" for index, took_s in seen.slowest[:_FEW])
    lines.append(f"slowest dataset indices: {slowest}")
    lines.append(f"one worker: {seen.samples_per_s:,.0f} samples per second")
    if batch is not None:
        lines.append(
            f"batch of {batch.batch_size}: p50 {time_text(batch.p50_s)}, {time_text(batch.collate_s)} of it to "
            f"collate; {nbytes_text(batch.nbytes)}"
        )
    if diagnosis.workers is not None:
        lines.append(workers_line(diagnosis.workers))
    return lines


def workers_line(workers: WorkersNeeded) -> str:
    """Return how many workers a step needs."""
    step, cores = time_text(workers.step_s), f"{workers.num_cores:g} cores"
    some = count_text(workers.num_workers, "worker")
    if workers.is_fed:
        return f"a step of {step} is fed by {some} (this machine: {cores})"
    return f"a step of {step} can't be fed by {cores}: at best one of {time_text(workers.fed_step_s)}, by {some}"


def _code_lines(diagnosis: Diagnosis) -> list[str]:
    return [f"{share_text(one.share):>5}  {one.line}" for one in diagnosis.lines]
