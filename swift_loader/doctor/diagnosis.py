"""What to examine, what was found out, and how it reads. Pure."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from swift_loader.errors import printable

_MAX_SHOWN = 8
_NUM_SLOWEST = 5

_WORKERS_RESERVE = 1.1
"""So that an uneven batch doesn't make the step wait."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Settings:
    """What to examine, and for how long."""

    target: str
    """`package.module:name` of a dataset, or of a function or class that returns one."""
    seconds: float = 10.0
    """How long samples are fetched for measurements. The other checks take some seconds more."""
    batch_size: int = 32
    collate: str = "default"
    """`default` (swift_loader's), `torch` (torch's default collate), or `package.module:name` of a function."""
    step_s: float | None = None
    """Duration of a training step; None: unknown."""
    num_workers: int = 8
    """For how many workers memory is estimated."""
    stall_s: float = 60.0
    """A process that makes no progress for so long is taken to hang, and is killed."""

    def __post_init__(self) -> None:
        for name in ("seconds", "batch_size", "num_workers", "stall_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}; give a number above 0")
        if self.step_s is not None and not self.step_s > 0:
            raise ValueError(f"step_s={self.step_s!r}; give a number of seconds above 0, or None")


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
    """Such as `randomness`."""
    what: str
    """One sentence."""
    evidence: str
    """What was seen."""
    remedy: str
    """One sentence: what to change."""
    indices: tuple[int, ...] = ()
    """The dataset indices that it is about, if it is about some."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of code that was running."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


@dataclass(frozen=True, slots=True)
class LineShare:
    """The share of the time that a line takes, with the calls that it makes."""

    line: Line
    share: float
    num_hits: int


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
    samples_per_s: float
    """What one worker fetches."""


@dataclass(frozen=True, slots=True)
class BatchTime:
    """The time of a batch in one worker, in seconds."""

    batch_size: int
    """The user's, or fewer if samples take long."""
    p50_s: float
    mean_s: float
    collate_s: float
    """Median of what collating takes of it."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class WorkersNeeded:
    """The workers for a step, on this machine."""

    num_workers: int
    """If the step can't be fed: the number beyond which more workers bring nothing."""
    num_cores: float
    step_s: float
    fed_step_s: float
    """The shortest step that so many workers keep fed, in seconds."""
    is_fed: bool
    """Whether the step needn't wait."""


def workers_needed(batch_s: float, cpu_share: float, step_s: float, num_cores: float) -> WorkersNeeded:
    """Return how many workers keep a step fed, if one worker builds a batch in `batch_s`, with this share of a core.

    w workers build w / batch_s batches per second, but never more than num_cores / (batch_s * cpu_share).
    """
    shortest_s = batch_s * cpu_share / num_cores
    num_workers = max(1, math.ceil(_WORKERS_RESERVE * batch_s / step_s - _ROUNDING))
    if num_workers * shortest_s > batch_s:
        num_workers = max(1, math.ceil(batch_s / shortest_s))
    fed_step_s = max(batch_s / num_workers, shortest_s)
    return WorkersNeeded(num_workers, num_cores, step_s, fed_step_s, fed_step_s <= step_s)


@dataclass(slots=True)
class Diagnosis:
    """What the doctor found out about a dataset. `print` shows it as text."""

    target: str
    dataset: str = ""
    """Qualified name of its type; empty if it couldn't be built."""
    num_samples: int | None = None
    """Its length; None if it has none."""
    build_s: float = 0.0
    timing: Timing | None = None
    """The time of samples; None if none could be fetched."""
    batch: BatchTime | None = None
    """The time of batches; None if none could be collated."""
    workers: WorkersNeeded | None = None
    """The workers for a step; None if its duration is unknown."""
    lines: tuple[LineShare, ...] = ()
    """The lines that take the time of samples, first the one that takes most."""
    findings: list[Finding] = field(default_factory=list)
    """Worst first."""
    healthy: list[str] = field(default_factory=list)
    """What was looked at and is as it should be."""
    is_complete: bool = False
    """Whether the examination came to its end."""

    def fault(self, topic: str, what: str, evidence: str, remedy: str, indices: Sequence[int] = ()) -> None:
        """Add a finding that makes the exit code 1."""
        self.findings.append(Finding(Severity.FAULT, topic, what, evidence, remedy, tuple(indices)))

    def warning(self, topic: str, what: str, evidence: str, remedy: str, indices: Sequence[int] = ()) -> None:
        """Add a finding that costs time or memory, or may do harm later."""
        self.findings.append(Finding(Severity.WARNING, topic, what, evidence, remedy, tuple(indices)))

    def note(self, topic: str, what: str, evidence: str, remedy: str) -> None:
        """Add a finding that is worth knowing."""
        self.findings.append(Finding(Severity.NOTE, topic, what, evidence, remedy))

    @property
    def exit_code(self) -> int:
        """1 if there is a fault, else 0."""
        return int(any(finding.severity is Severity.FAULT for finding in self.findings))

    def to_json(self) -> str:
        """Return all fields as JSON. Times are in seconds, sizes in bytes."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def __str__(self) -> str:
        return "\n".join(line for _, line in self.styled_lines())

    def styled_lines(self) -> Iterator[tuple[str, str]]:
        """Yield the lines of the text, each with the style that rich gives it in a terminal."""
        return ((style, printable(line)) for style, line in self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        length = "" if self.num_samples is None else f", {count_text(self.num_samples, 'sample')}"
        seen = "" if self.timing is None else f", {self.timing.num_samples:,} measured"
        kind = f" is a {self.dataset}" if self.dataset else ""
        yield "bold", f"{self.target}{kind}{length}{seen}"
        if self.timing is not None:
            yield from (("", ""), ("bold", "Time"), *(("", f"  {line}") for line in self._time_lines(self.timing)))
        if self.lines:
            yield from (("", ""), ("bold", "Lines"))
            yield from (("", f"  {one.share:>5.0%}  {one.line}") for one in self.lines)
        if self.findings:
            yield from (("", ""), ("bold", "Findings"))
        styles = {Severity.FAULT: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
        for one in self.findings:
            yield styles[one.severity], f"  {one.severity.value.upper()} ({one.topic}): {one.what}"
            yield "dim", f"      seen: {one.evidence}"
            yield "", f"      do:   {one.remedy}"
        if self.healthy:
            yield from (("", ""), ("bold", "Healthy"), *(("green", f"  {line}") for line in self.healthy))

    def _time_lines(self, seen: Timing) -> Iterator[str]:
        yield (
            f"sample: p50 {time_text(seen.p50_s)}, p99 {time_text(seen.p99_s)}, max {time_text(seen.max_s)}; "
            f"{seen.cpu_share:.0%} CPU ({_bound(seen.cpu_share)}); {nbytes_text(seen.nbytes)}"
        )
        slowest = ", ".join(f"{index} ({time_text(took_s)})" for index, took_s in seen.slowest[:_NUM_SLOWEST])
        yield f"slowest dataset indices: {slowest}"
        yield f"one worker: {seen.samples_per_s:,.0f} samples per second"
        if self.batch is not None:
            yield (
                f"batch of {self.batch.batch_size}: p50 {time_text(self.batch.p50_s)}, "
                f"{time_text(self.batch.collate_s)} of it to collate; {nbytes_text(self.batch.nbytes)}"
            )
        if self.workers is not None:
            step, cores = time_text(self.workers.step_s), f"{self.workers.num_cores:g} cores"
            some = count_text(self.workers.num_workers, "worker")
            if self.workers.is_fed:
                yield f"a step of {step} is fed by {some} (this machine: {cores})"
            else:
                best = time_text(self.workers.fed_step_s)
                yield f"a step of {step} can't be fed by {cores}: at best one of {best}, by {some}"


def _bound(cpu_share: float) -> str:
    """Return what a sample's time goes to, in words."""
    if cpu_share >= 0.8:  # noqa: PLR2004
        return "CPU-bound"
    return "mostly waiting, for files, the network or other processes" if cpu_share <= 0.4 else "mixed"  # noqa: PLR2004


# Numbers as text ------------------------------------------------------------------------------------------------------


def quoted(items: Sequence[object]) -> str:
    """Return the first items as text: `3, 17, 41 and 12 more`."""
    shown = ", ".join(map(str, items[:_MAX_SHOWN]))
    return f"{shown} and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else shown


def time_text(seconds: float) -> str:
    """Return a time with its unit: `1.20 s`, `3.40 ms`, `12.0 us`."""
    if seconds >= 1:
        return f"{_digits(seconds)} s"
    return f"{_digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{_digits(seconds * 1e6)} us"  # noqa: PLR2004


def nbytes_text(nbytes: float) -> str:
    """Return a size with its unit: `512 B`, `1.50 MiB`."""
    power = min(4, int(math.log2(max(1, nbytes)) // 10))
    return f"{_digits(nbytes / 1024**power)} {'KMGT'[power - 1]}iB" if power else f"{round(nbytes)} B"


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun: `1 sample`, `1,000 samples`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _digits(number: float) -> str:
    """Return about three significant digits, without an exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"  # noqa: PLR2004
