"""The result of an examination. Pure: it follows from the settings, the evidence and the number of cores."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from swift_loader.doctor.facts import Evidence, Line
from swift_loader.doctor.findings import Finding, Severity, sorted_findings
from swift_loader.doctor.rules.faults import judge_faults
from swift_loader.doctor.rules.leaves import judge_leaves
from swift_loader.doctor.rules.lines import LineShare, line_shares
from swift_loader.doctor.rules.memory import judge_memory
from swift_loader.doctor.rules.randomness import judge_randomness
from swift_loader.doctor.rules.sharing import judge_sharing
from swift_loader.doctor.rules.timing import BatchTime, Timing, batch_time, judge_time, timing
from swift_loader.doctor.rules.workers import WorkersNeeded, workers_needed
from swift_loader.doctor.settings import Settings

__all__ = ["Diagnosis"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor found out about a dataset. `print` shows it as text."""

    target: str
    dataset: str
    """Qualified name of its type; empty if it couldn't be built."""
    num_samples: int | None
    """Its length; None if it has none."""
    build_s: float
    timing: Timing | None
    """The time of samples; None if none could be fetched."""
    batch: BatchTime | None
    """The time of batches; None if none could be collated."""
    workers: WorkersNeeded | None
    """The workers for a step; None if its duration is unknown."""
    lines: tuple[LineShare, ...]
    """The lines that take the time of samples, first the one that takes most."""
    findings: tuple[Finding, ...]
    """Worst first."""
    healthy: tuple[str, ...]
    """What was looked at and is as it should be."""

    @classmethod
    def of(cls, settings: Settings, evidence: Evidence, num_cores: float) -> Diagnosis:
        """Return what follows from the evidence."""
        seen, batch, built = (
            timing(evidence.samples, evidence.contention),
            batch_time(evidence.batches),
            evidence.construction,
        )
        workers = None
        if settings.step_s is not None and seen is not None:
            per_sample_s = batch.mean_s / batch.batch_size if batch is not None else seen.mean_s
            batch_s = per_sample_s * settings.batch_size
            workers = workers_needed(batch_s, seen.cpu_share, settings.step_s, num_cores)
        verdicts = [
            judge_faults(evidence),
            judge_randomness(evidence),
            judge_leaves(evidence),
            judge_sharing(evidence),
            judge_memory(evidence, settings.num_workers),
            judge_time(evidence, workers),
        ]
        return cls(
            target=settings.target,
            dataset="" if built is None else built.kind,
            num_samples=built.lengths[0] if built is not None and built.lengths else None,
            build_s=0.0 if built is None else built.build_s,
            timing=seen,
            batch=batch,
            workers=workers,
            lines=line_shares(evidence.stacks.hits) if evidence.stacks is not None else (),
            findings=sorted_findings(finding for verdict in verdicts for finding in verdict.findings),
            healthy=tuple(line for verdict in verdicts for line in verdict.healthy),
        )

    @property
    def exit_code(self) -> int:
        """1 if there is a fault, else 0."""
        return int(any(finding.severity is Severity.FAULT for finding in self.findings))

    def to_json(self) -> str:
        """Return all fields as JSON. Times are in seconds, sizes in bytes."""
        fields = dataclasses.asdict(self)
        fields["lines"] = [
            {"line": _of_line(one.line), "share": one.share, "num_hits": one.num_hits} for one in self.lines
        ]
        if self.timing is not None:
            fields["timing"]["samples_per_s"] = self.timing.samples_per_s
        if self.workers is not None:
            fields["workers"]["is_fed"] = self.workers.is_fed
        return json.dumps(fields, indent=2)

    def __str__(self) -> str:
        from swift_loader.doctor.text import as_text

        return as_text(self)


def _of_line(line: Line) -> dict[str, Any]:
    return {"file": line.file, "number": line.number, "function": line.function}
