"""What the doctor says about a dataset. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Finding", "Severity", "Verdict", "quoted", "sorted_findings"]

_MAX_SHOWN = 8


class Severity(str, Enum):
    """How bad a finding is. In this order, worst first."""

    FAULT = "fault"
    """The dataset gives wrong samples, or the loader can't run it as it is. The exit code is 1."""
    WARNING = "warning"
    """It works, but it costs time or memory, or something may go wrong later."""
    NOTE = "note"
    """Worth knowing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that isn't as it should be."""

    severity: Severity
    topic: str
    """Such as `randomness`; the same for all findings of one rule."""
    what: str
    """One sentence."""
    evidence: str
    """What was seen."""
    remedy: str
    """One sentence: what to change."""
    indices: tuple[int, ...] = ()
    """The dataset indices that it is about, if it is about some."""


@dataclass(slots=True)
class Verdict:
    """What one rule says."""

    findings: list[Finding] = field(default_factory=list)
    healthy: list[str] = field(default_factory=list)
    """What was looked at and is as it should be, one line each."""


def sorted_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings, worst first, otherwise in the given order."""
    order = list(Severity)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))


def quoted(items: Sequence[object]) -> str:
    """Return the first items as text: `3, 17, 41 and 12 more`."""
    shown = ", ".join(map(str, items[:_MAX_SHOWN]))
    return f"{shown} and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else shown
