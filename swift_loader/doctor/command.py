"""The subcommand `swift-loader doctor`: examines a dataset and prints the diagnosis."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from swift_loader.cli import CommandError
from swift_loader.doctor.diagnosis import Settings
from swift_loader.doctor.examination import diagnose


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
