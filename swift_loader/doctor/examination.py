"""Examines a dataset in a process of its own, in which it may crash, hang, print or end the process.

`swift-loader doctor` is the same as a command.

The two meet in a temporary folder: `request` (pickle), `diagnosis` (pickle, replaced after each part; a `CommandError`
if there is no dataset to examine), `place` (what the process is doing) and `output` (what the process printed, with the
stack that faulthandler writes when it crashes or hangs). Files outlive the process, and unlike a pipe they can't be
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

from swift_loader.__main__ import CommandError
from swift_loader.errors import counted, nbytes_text, printable, time_text
from swift_loader.executors.environment import environ_for_workers, import_path, interpreter_command

_MAX_STARTS = 4
"""How often the process is started: once more for each sample that ends it."""

_CODE = "import sys; sys.path[:] = {path!r}; from swift_loader.doctor.child import main; main({folder!r}, {parent})"

_LOOK_EVERY_S = 0.2
_MAX_OUTPUT = 1 << 14
_MAX_LINES = 4
_MAX_SHOWN = 8
_NUM_SLOWEST = 5

# What to examine, and what was found out ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings:
    """What to examine, and for how long."""

    target: str
    """`package.module:name` of a dataset, or of a function or class that returns one."""
    seconds: float = 10.0
    """How long samples are fetched for measurements. The other checks take some seconds more."""
    batch_size: int | None = None
    """None: the loader's, if the target is one, else 32."""
    collate: str | None = None
    """`default` (swift_loader's), `torch` (torch's default collate), or `package.module:name` of a function. None: the
    loader's, if the target is one, else `default`.
    """
    step_s: float | None = None
    """Duration of a training step; None: unknown."""
    num_workers: int = 8
    """For how many workers memory is estimated."""
    stall_s: float = 60.0
    """A process that makes no progress for so long is taken to hang, and is killed."""

    def __post_init__(self) -> None:
        for name in ("seconds", "batch_size", "num_workers", "stall_s", "step_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name}={value!r}; give a number above 0")


class Severity(str, Enum):
    """How bad a finding is. In this order, worst first."""

    FAULT = "fault"
    """The dataset gives wrong samples, or the loader can't run it as it is. The exit code is 1."""
    WARNING = "warning"
    """It works, but it costs time or memory, or something may go wrong later."""
    NOTE = "note"
    """Worth knowing."""


_STYLES = {Severity.FAULT: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
"""Of a terminal, as rich names them."""


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
    core_wait_share: float
    """Share of their time in which they waited for a core, because the machine was busy. 0: unknown."""
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


@dataclass(slots=True)
class Diagnosis:
    """What the doctor found out about a dataset. `print` shows it as text."""

    target: str
    dataset: str = ""
    """Qualified name of the dataset's type. Empty: it couldn't be built."""
    num_samples: int | None = None
    """Length of the dataset. None: it has none."""
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
    """What was checked and is as it should be."""
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
        kind = f" is a {self.dataset}" if self.dataset else ""
        length = "" if self.num_samples is None else f", {counted(self.num_samples, 'sample')}"
        seen = "" if self.timing is None else f", {self.timing.num_samples:,} measured"
        yield "bold", printable(f"{self.target}{kind}{length}{seen}")
        parts: dict[str, list[tuple[str, str]]] = {
            "Time": [("", line) for line in self._time_lines()],
            "Lines": [("", f"{one.share:>5.0%}  {one.line}") for one in self.lines],
            "Findings": [],
            "Healthy": [("green", line) for line in self.healthy],
        }
        for one in self.findings:
            parts["Findings"] += (
                (_STYLES[one.severity], f"{one.severity.value.upper()} ({one.topic}): {one.what}"),
                ("dim", f"    seen: {one.evidence}"),
                ("", f"    do:   {one.remedy}"),
            )
        for title, lines in parts.items():
            if lines:
                yield from (("", ""), ("bold", title), *((style, f"  {printable(line)}") for style, line in lines))

    def _time_lines(self) -> Iterator[str]:
        timing, batch, needed = self.timing, self.batch, self.workers
        if timing is None:
            return
        core_wait, idle_share = timing.core_wait_share, timing.cpu_share / (1 - timing.core_wait_share or 1)
        bound = "CPU-bound" if idle_share >= 0.8 else "mixed"  # noqa: PLR2004
        if idle_share <= 0.4:  # noqa: PLR2004
            bound = "mostly waiting, for files, the network or other processes"
        busy = f", {core_wait:.0%} waiting for a core: the machine is busy" if core_wait >= 0.1 else ""  # noqa: PLR2004
        yield (
            f"sample: p50 {time_text(timing.p50_s)}, p99 {time_text(timing.p99_s)}, max {time_text(timing.max_s)}; "
            f"{timing.cpu_share:.0%} CPU ({bound}){busy}; {nbytes_text(timing.nbytes)}"
        )
        slowest = ", ".join(f"{index} ({time_text(took_s)})" for index, took_s in timing.slowest[:_NUM_SLOWEST])
        yield f"slowest dataset indices: {slowest}"
        yield f"one worker: {timing.samples_per_s:,.0f} samples per second"
        if batch is not None:
            collating = f"{time_text(batch.collate_s)} of it to collate"
            yield f"batch of {batch.batch_size}: p50 {time_text(batch.p50_s)}, {collating}; {nbytes_text(batch.nbytes)}"
        if needed is not None:
            step, best_step = time_text(needed.step_s), time_text(needed.fed_step_s)
            some, cores = counted(needed.num_workers, "worker"), f"{needed.num_cores:g} cores"
            yield (
                f"a step of {step} is fed by {some} (this machine: {cores})"
                if needed.is_fed
                else f"a step of {step} can't be fed by {cores}: at best one of {best_step}, by {some}"
            )


def quoted(items: Sequence[object]) -> str:
    """Return the first items as text: `3, 17, 41 and 12 more`."""
    first = ", ".join(map(str, items[:_MAX_SHOWN]))
    return f"{first} and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else first


# The line of the user's code that a stack counts for ------------------------------------------------------------------

_HERE = f"{os.getcwd()}{os.sep}"
"""Now, because the dataset may change it."""

_STACK = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
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


def _line_in_dump(text: str) -> Line | None:
    """Return the user's line in the stacks that faulthandler wrote; None if there is none.

    A crash dumps the thread that crashed as the current one. A timeout dumps all threads, the main thread last.
    """
    begins = list(_STACK.finditer(text))
    if not begins:
        return None
    begin = next((one for one in begins if one[0].startswith("Current")), begins[-1]).end()
    end = next((one.start() for one in begins if one.start() > begin), len(text))
    stack = [Line(found[1], int(found[2]), found[3]) for found in _FRAME.finditer(text, begin, end)]
    return line_of([line for line in stack if is_users_file(line.file)])


# The process ----------------------------------------------------------------------------------------------------------


def diagnose(settings: Settings, show: Callable[[str], None] | None = None) -> Diagnosis:
    """Examine a dataset. This takes `settings.seconds` and some seconds more.

    Args:
        settings: What to examine, and for how long.
        show: Function that is called a few times per second with what is being done.

    Raises:
        CommandError: The target, or the collate function, can't be found. `swift_loader.__main__` has the class.
    """
    ended: list[Finding] = []
    for start in range(_MAX_STARTS):
        left = dataclasses.replace(settings, seconds=settings.seconds / 2**start)
        avoid = {index for finding in ended for index in finding.indices}
        with tempfile.TemporaryDirectory(prefix="swift_loader-doctor-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / "request").write_bytes(pickle.dumps((left, avoid)))
            (folder / "diagnosis").write_bytes(pickle.dumps(Diagnosis(settings.target)))
            (folder / "place").write_text("-1 starting", encoding="utf-8")
            with _process(folder) as process:
                while process.poll() is None:
                    if show is not None:
                        show((folder / "place").read_text(encoding="utf-8").partition(" ")[2].rstrip())
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_LOOK_EVERY_S)
            found = pickle.loads((folder / "diagnosis").read_bytes())
            if isinstance(found, CommandError):
                raise found
            diagnosis: Diagnosis = found
            if not diagnosis.is_complete:
                ended.append(_ended(folder, process.returncode, settings.stall_s))
        if diagnosis.is_complete or not ended[-1].indices:
            break
    diagnosis.findings = sorted([*ended, *diagnosis.findings], key=lambda one: list(Severity).index(one.severity))
    return diagnosis


@contextmanager
def _process(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process that examines what the request says. At the end, kill it with all that it started."""
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
        yield process
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
    line = _line_in_dump(printed)
    last = [line.strip() for line in printed.splitlines() if line.strip()][-_MAX_LINES:]
    said = f", at {line}" if line is not None else f"; it printed: {' | '.join(last)}" if last else ""
    where, remedy = f" at dataset index {number}", "Fetch that sample in a script of yours: python -X faulthandler."
    if not indices:
        where, remedy = "", "Pass a larger --stall-seconds, or run it in a script of yours to see where it stops."
    what = f"The process that runs the dataset {how}{where}."
    return Finding(Severity.FAULT, "faults", what, f"it was {doing.rstrip()}{said}", remedy, indices)


# The command ----------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `swift-loader doctor`. Each is a field of `Settings`, or says how to print."""
    default, add = Settings(""), parser.add_argument
    add("target", metavar="PACKAGE.MODULE:NAME", help="a dataset, or a function or class that makes one")
    add("--seconds", type=float, default=default.seconds, help="how long to measure (%(default)s)")
    add("--batch-size", type=int, help="samples per batch (default: the loader's, else 32)")
    collate = "default (swift_loader's), torch, or package.module:name of a function (default: the loader's)"
    add("--collate", help=collate)
    step = "duration of a training step: how many workers keep it fed?"
    add("--step-ms", dest="step_s", metavar="STEP_MS", type=milliseconds, help=step)
    workers = "estimate memory for so many workers (%(default)s)"
    add("--workers", dest="num_workers", metavar="WORKERS", type=int, default=default.num_workers, help=workers)
    stall = "a build or a sample that takes longer is taken to hang (%(default)s)"
    add("--stall-seconds", dest="stall_s", metavar="SECONDS", type=float, default=default.stall_s, help=stall)
    add("--json", action="store_true", help="print the diagnosis as JSON")
    add("--plain", action="store_true", help="print plain text, even to a terminal")


def milliseconds(text: str) -> float:
    """Return seconds. argparse names this function if the text is no number."""
    return float(text) / 1000


def run(arguments: argparse.Namespace) -> int:
    """Examine the dataset and print the diagnosis. Return 1 if there is a fault, else 0."""
    try:
        settings = Settings(**{one.name: getattr(arguments, one.name) for one in dataclasses.fields(Settings)})
    except ValueError as error:
        raise CommandError(str(error)) from error
    if not (arguments.json or arguments.plain) and sys.stdout.isatty() and find_spec("rich") is not None:
        return _run_in_colours(settings)
    diagnosis = diagnose(settings)
    sys.stdout.write(f"{diagnosis.to_json() if arguments.json else diagnosis}\n")
    return diagnosis.exit_code


def _run_in_colours(settings: Settings) -> int:
    """Show what is being done on stderr, and print the diagnosis in colours."""
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("starting") as status:
        diagnosis = diagnose(settings, status.update)
    console = Console(highlight=False)
    for style, line in diagnosis.styled_lines():
        console.print(Text(line, style), soft_wrap=True)
    return diagnosis.exit_code
