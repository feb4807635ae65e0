"""Examines a dataset in a process of its own, in which it may crash, hang, print or end the process.

`swift-loader doctor` is the same as a command.

The two meet in a temporary folder: `request` (pickle), `diagnosis` (pickle, replaced after each part), `place` (what
the process is doing), `unusable` (why there is no dataset to examine) and `output` (what the process printed, with the
stack that faulthandler writes when it crashes or hangs). Files outlive the process, and unlike a pipe they can't be
held open by what it leaves behind.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from swift_loader.cli import CommandError
from swift_loader.doctor.diagnosis import Diagnosis, Finding, Settings, Severity, time_text
from swift_loader.doctor.stacks import line_in_dump
from swift_loader.executors.environment import environ_for_workers, import_path, interpreter_command

_MAX_STARTS = 4
"""How often the process is started: once more for each sample that ends it."""

_CODE = "import sys; sys.path[:] = {path!r}; from swift_loader.doctor.child import main; main({folder!r}, {parent})"

_LOOK_EVERY_S = 0.2
_MAX_OUTPUT = 1 << 14
_MAX_LINES = 4

_INDEX_WIDTH = 20
PLACE_SIZE = 64
"""Bytes of the file `place`."""


def place_text(doing: str, index: int | None) -> bytes:
    """Return what `place` holds while the process does something with a dataset index."""
    return f"{-1 if index is None else index:{_INDEX_WIDTH}}{doing:{PLACE_SIZE - _INDEX_WIDTH}}".encode()


def diagnose(settings: Settings, show: Callable[[str], None] = lambda doing: None) -> Diagnosis:  # noqa: ARG005
    """Examine a dataset. Blocks for about `settings.seconds` and some seconds more.

    Args:
        settings: What to examine, and for how long.
        show: Is called with what is being done, some times per second.

    Raises:
        CommandError: The target, or the collate function, can't be found. `swift_loader.cli` has the class.
    """
    ended: list[Finding] = []
    avoid: set[int] = set()
    for start in range(_MAX_STARTS):
        left = replace(settings, seconds=settings.seconds / 2**start)
        diagnosis, end = _examine(left, frozenset(avoid), show)
        if end is not None:
            ended.append(end)
            avoid.update(end.indices)
        if end is None or not end.indices:
            break
    severities = list(Severity)
    diagnosis.findings = sorted([*ended, *diagnosis.findings], key=lambda finding: severities.index(finding.severity))
    return diagnosis


def _examine(
    settings: Settings, avoid: frozenset[int], show: Callable[[str], None]
) -> tuple[Diagnosis, Finding | None]:
    """Run the process. Return what it found out, and how it ended, if it ended too early."""
    with tempfile.TemporaryDirectory(prefix="swift_loader-doctor-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "request").write_bytes(pickle.dumps((settings, avoid)))
        (folder / "diagnosis").write_bytes(pickle.dumps(Diagnosis(settings.target)))
        (folder / "place").write_bytes(place_text("starting", None))
        with (folder / "output").open("ab") as output:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter
                [
                    *interpreter_command(),
                    "-c",
                    _CODE.format(path=list(import_path()), folder=name, parent=os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ_for_workers(),
                start_new_session=True,  # so that all that it starts can be killed with it
            )
        try:
            while process.poll() is None:
                show((folder / "place").read_text(encoding="utf-8")[_INDEX_WIDTH:].rstrip())
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_EVERY_S)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                if hasattr(os, "killpg"):
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
            process.wait()
        with suppress(FileNotFoundError):
            raise CommandError((folder / "unusable").read_text(encoding="utf-8"))
        diagnosis: Diagnosis = pickle.loads((folder / "diagnosis").read_bytes())
        return diagnosis, None if diagnosis.is_complete else _ended(folder, process.returncode, settings.stall_s)


def _ended(folder: Path, status: int, stall_s: float) -> Finding:
    place = (folder / "place").read_text(encoding="utf-8")
    doing, index = place[_INDEX_WIDTH:].rstrip(), int(place[:_INDEX_WIDTH])
    printed = (folder / "output").read_bytes()[-_MAX_OUTPUT:].decode(errors="replace")
    how = f"ended itself with exit code {status}"
    if status == 1 and "Timeout (" in printed:  # faulthandler's
        how = f"made no progress for {time_text(stall_s)}"
    elif status < 0:
        with suppress(ValueError):
            how = f"was killed by {signal.Signals(-status).name}"
    line = line_in_dump(printed)
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    said = f", at {line}" if line is not None else f"; it printed: {' | '.join(lines[-_MAX_LINES:])}" if lines else ""
    remedy = (
        "If it only takes long, pass a larger --stall-seconds; else run it in a script of yours to see where it stops."
        if index < 0
        else "Fetch that sample by itself in a script of yours; python -X faulthandler shows where it stops."
    )
    return Finding(
        Severity.FAULT,
        "faults",
        f"The process that runs the dataset {how}{'' if index < 0 else f' at dataset index {index}'}.",
        f"it was {doing}{said}",
        remedy,
        () if index < 0 else (index,),
    )


# The command ----------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `swift-loader doctor`."""
    defaults = Settings("")
    parser.add_argument(
        "target", metavar="PACKAGE.MODULE:NAME", help="a dataset, or a function or class that makes one"
    )
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="how long to measure (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size, help="samples per batch (%(default)s)")
    parser.add_argument(
        "--collate",
        default=defaults.collate,
        help="default (swift_loader's), torch, or package.module:name of a collate function",
    )
    parser.add_argument("--step-ms", type=float, help="duration of a training step: how many workers keep it fed?")
    parser.add_argument(
        "--workers", type=int, default=defaults.num_workers, help="estimate memory for so many workers (%(default)s)"
    )
    parser.add_argument(
        "--stall-seconds",
        type=float,
        default=defaults.stall_s,
        help="a build or a sample that takes longer is taken to hang (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    parser.add_argument("--plain", action="store_true", help="print plain text, even to a terminal")


def run(arguments: argparse.Namespace) -> int:
    """Examine the dataset and print the diagnosis. Return 1 if there is a fault, else 0."""
    try:
        settings = Settings(
            target=arguments.target,
            seconds=arguments.seconds,
            batch_size=arguments.batch_size,
            collate=arguments.collate,
            step_s=None if arguments.step_ms is None else arguments.step_ms / 1000,
            num_workers=arguments.workers,
            stall_s=arguments.stall_seconds,
        )
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
