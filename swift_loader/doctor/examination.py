"""Examines a dataset in a process of its own, in which it may crash, hang, print or end the process.

`swift-loader doctor` is the same as a command.

The two meet in a temporary folder: `request` (pickle), `diagnosis` (pickle, replaced after each part; a `CommandError`
if there is no dataset to examine), `place` (what the process is doing) and `output` (what the process printed, with the
stacks that faulthandler writes when it crashes or hangs). Files outlive the process, and unlike a pipe they can't be
held open by what it leaves behind.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from swift_loader.__main__ import CommandError
from swift_loader.errors import counted, printable, time_text
from swift_loader.executors.environment import environ_for_workers, import_path, interpreter_command

_CODE = "import sys; sys.path[:] = {path!r}; from swift_loader.doctor.child import main; main({folder!r}, {parent})"

_MAX_OUTPUT = 1 << 14
_MAX_LINES = 4
_MAX_SHOWN = 8
_NUM_SLOWEST = 5

# What to examine, and what was found out ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings:
    """What to examine, and for how long."""

    target: str
    """`package.module:name` of a dataset or a loader, or of a function or class that returns one. Without a loader,
    32 samples are a batch, and SwiftLoader's own collate function stacks them.
    """
    seconds: float = 10.0
    """How long samples are fetched for measurements. The other checks take some seconds more."""
    stall_s: float = 60.0
    """A process that makes no progress for so long is taken to hang, and is killed."""

    def __post_init__(self) -> None:
        for name in ("seconds", "stall_s"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"{name}={value!r}; give a number above 0")


class Severity(str, Enum):
    """How bad a finding is. In this order, worst first."""

    FAULT = "fault"
    """The dataset gives wrong samples, or the loader can't run it as it is. The exit code is 1."""
    WARNING = "warning"
    """It works, but it costs time or memory, or something may go wrong later."""


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
    """The dataset indices to which it applies, if it applies to some."""


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


@dataclass(slots=True)
class Diagnosis:
    """What the doctor found out about a dataset. `print` shows it as text."""

    target: str
    dataset: str = ""
    """Qualified name of the dataset's type. Empty: it couldn't be built."""
    num_samples: int | None = None
    """Length of the dataset. None: it has none."""
    timing: Timing | None = None
    """The time of samples; None if none could be fetched."""
    batch_size: int = 32
    """The loader's, or fewer if samples are few or take long."""
    collate_s: float | None = None
    """The time to collate such a batch; None if none could be collated."""
    lines: tuple[LineShare, ...] = ()
    """The lines that take the time of samples, first the one that takes most."""
    findings: list[Finding] = field(default_factory=list)
    """Worst first."""
    healthy: list[str] = field(default_factory=list)
    """What was checked and is as it should be."""
    is_complete: bool = False
    """Whether the examination came to its end."""

    def fault(self, topic: str, what: str, evidence: str, remedy: str, indices: Sequence[int] = ()) -> None:
        """Add a finding that makes the exit code 1."""
        self.findings.append(Finding(Severity.FAULT, topic, what, evidence, remedy, tuple(indices)))

    def warning(self, topic: str, what: str, evidence: str, remedy: str, indices: Sequence[int] = ()) -> None:
        """Add a finding that costs time or memory, or may do harm later."""
        self.findings.append(Finding(Severity.WARNING, topic, what, evidence, remedy, tuple(indices)))

    @property
    def exit_code(self) -> int:
        """1 if there is a fault, else 0."""
        return int(any(finding.severity is Severity.FAULT for finding in self.findings))

    def to_json(self) -> str:
        """Return all fields as JSON. Times are in seconds, sizes in bytes."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def __str__(self) -> str:
        kind = f" is a {self.dataset}" if self.dataset else ""
        length = "" if self.num_samples is None else f", {counted(self.num_samples, 'sample')}"
        seen = "" if self.timing is None else f", {self.timing.num_samples:,} measured"
        parts = {
            "Time": list(self._time_lines()),
            "Lines": [f"{one.share:>5.0%}  {one.line}" for one in self.lines],
            "Findings": [
                line
                for one in self.findings
                for line in (
                    f"{one.severity.value.upper()} ({one.topic}): {one.what}",
                    f"    seen: {one.evidence}",
                    f"    do:   {one.remedy}",
                )
            ],
            "Healthy": self.healthy,
        }
        text = [printable(f"{self.target}{kind}{length}{seen}")]
        for title, lines in parts.items():
            if lines:
                text += ("", title, *(f"  {printable(line)}" for line in lines))
        return "\n".join(text)

    def _time_lines(self) -> Iterator[str]:
        timing = self.timing
        if timing is None:
            return
        yield (
            f"sample: p50 {time_text(timing.p50_s)}, p99 {time_text(timing.p99_s)}, max {time_text(timing.max_s)}; "
            f"{timing.cpu_share:.0%} CPU"
        )
        slowest = ", ".join(f"{index} ({time_text(took_s)})" for index, took_s in timing.slowest[:_NUM_SLOWEST])
        yield f"slowest dataset indices: {slowest}"
        yield f"one worker: {1 / timing.mean_s:,.0f} samples per second"
        if self.collate_s is not None:
            yield f"to collate a batch of {self.batch_size}: {time_text(self.collate_s)}"


def quoted(items: Sequence[object]) -> str:
    """Return the first items as text: `3, 17, 41 and 12 more`."""
    first = ", ".join(map(str, items[:_MAX_SHOWN]))
    return f"{first} and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else first


# The line of the user's code that a stack counts for ------------------------------------------------------------------

_HERE = f"{os.getcwd()}{os.sep}"
"""Now, because the dataset may change it."""

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@functools.cache
def is_users_file(file: str) -> bool:
    """Return whether a file is neither of the standard library, nor of an installed package, nor of this one."""
    path = file.replace("\\", "/")
    if path.startswith("<") and not path.startswith("<ipython"):
        return False
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries = tuple(f"{folder}{os.sep}" for folder in (*installed, Path(__file__).parents[1]))
    return not file.startswith(libraries) and "/site-packages/" not in path and "/dist-packages/" not in path


def line_of(stack: Sequence[Line]) -> Line | None:
    """Return the line that a stack counts for: the user's innermost one, else the outermost one; None without any.

    The stack has the innermost frame first. A call of a library counts for the line that makes it.
    """
    line = next((line for line in stack if is_users_file(line.file)), stack[-1] if stack else None)
    return None if line is None else Line(line.file.removeprefix(_HERE), line.number, line.function)


# The process ----------------------------------------------------------------------------------------------------------


def diagnose(settings: Settings) -> Diagnosis:
    """Examine a dataset. This takes `settings.seconds` and some seconds more.

    Raises:
        CommandError: The target, or the collate function, can't be found. `swift_loader.__main__` has the class.
    """
    with tempfile.TemporaryDirectory(prefix="swift_loader-doctor-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "request").write_bytes(pickle.dumps(settings))
        (folder / "diagnosis").write_bytes(pickle.dumps(Diagnosis(settings.target)))
        (folder / "place").write_text("-1 starting", encoding="utf-8")
        status = _run_process(folder)
        diagnosis: Diagnosis | CommandError = pickle.loads((folder / "diagnosis").read_bytes())
        if isinstance(diagnosis, CommandError):
            raise diagnosis
        if not diagnosis.is_complete:
            diagnosis.findings.append(_ended(folder, status, settings.stall_s))
    diagnosis.findings.sort(key=lambda one: list(Severity).index(one.severity))
    return diagnosis


def _run_process(folder: Path) -> int:
    """Run the process that examines what the request says. At its end, kill all that it started."""
    code = _CODE.format(path=list(import_path()), folder=str(folder), parent=os.getpid())
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter
            [*interpreter_command(), "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environ_for_workers(),
            start_new_session=True,  # so that all that it starts can be killed with it
        )
    try:
        return process.wait()
    finally:
        with suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()


def _ended(folder: Path, status: int, stall_s: float) -> Finding:
    """Return the finding that the process ended too early: how, at which sample, and at which line."""
    number, _, doing = (folder / "place").read_text(encoding="utf-8").partition(" ")
    indices = (int(number),) if int(number) >= 0 else ()
    printed = (folder / "output").read_bytes()[-_MAX_OUTPUT:].decode(errors="replace")
    how = f"ended itself with exit code {status}"
    if status == 1 and "Timeout (" in printed:  # faulthandler's
        how = f"made no progress for {time_text(stall_s)}"
    elif status < 0:
        with suppress(ValueError):
            how = f"was killed by {signal.Signals(-status).name}"
    main_thread = printed.rpartition(" (most recent call first):")[2]  # faulthandler writes its stack last
    stack = [Line(found[1], int(found[2]), found[3]) for found in _FRAME.finditer(main_thread)]
    line = line_of([one for one in stack if is_users_file(one.file)])
    last = [line.strip() for line in printed.splitlines() if line.strip()][-_MAX_LINES:]
    said = f", at {line}" if line is not None else f"; it printed: {' | '.join(last)}" if last else ""
    where, remedy = f" at dataset index {number}", "Fetch that sample in a script of yours: python -X faulthandler."
    if not indices:
        where, remedy = "", "Pass a larger --stall-seconds, or run it in a script of yours to see where it stops."
    what = f"The process that runs the dataset {how}{where}."
    return Finding(Severity.FAULT, "faults", what, f"it was {doing.rstrip()}{said}", remedy, indices)


# The command ----------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `swift-loader doctor`. Each is a field of `Settings`, but `--json`."""
    default, add = Settings(""), parser.add_argument
    add("target", metavar="PACKAGE.MODULE:NAME", help="a dataset, or a function or class that makes one")
    add("--seconds", type=float, default=default.seconds, help="how long to measure (%(default)s)")
    stall = "a build or a sample that takes longer is taken to hang (%(default)s)"
    add("--stall-seconds", dest="stall_s", metavar="SECONDS", type=float, default=default.stall_s, help=stall)
    add("--json", action="store_true", help="print the diagnosis as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Examine the dataset and print the diagnosis. Return 1 if there is a fault, else 0."""
    try:
        settings = Settings(**{one.name: getattr(arguments, one.name) for one in dataclasses.fields(Settings)})
    except ValueError as error:
        raise CommandError(str(error)) from error
    diagnosis = diagnose(settings)
    sys.stdout.write(f"{diagnosis.to_json() if arguments.json else diagnosis}\n")
    return diagnosis.exit_code
