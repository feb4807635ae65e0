"""Examines a dataset: what is slow, what is random, and what would go wrong in workers."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from swift_loader.cli import CommandError
from swift_loader.doctor.diagnosis import Diagnosis
from swift_loader.doctor.examination import diagnose
from swift_loader.doctor.settings import Settings

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
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
    """Examine the dataset and print the diagnosis. Return 1 if there is a fault, else 0.

    Raises:
        CommandError: An argument is wrong, or the target can't be found.
    """
    settings = _settings(arguments)
    is_plain = arguments.json or arguments.plain or not sys.stdout.isatty() or find_spec("rich") is None
    diagnosis = diagnose(settings) if is_plain else _with_progress(settings)
    if arguments.json:
        sys.stdout.write(f"{diagnosis.to_json()}\n")
    elif is_plain:
        sys.stdout.write(f"{diagnosis}\n")
    else:
        from swift_loader.doctor.rich_text import print_diagnosis

        print_diagnosis(diagnosis)
    return diagnosis.exit_code


def _settings(arguments: argparse.Namespace) -> Settings:
    try:
        return Settings(
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


def _with_progress(settings: Settings) -> Diagnosis:
    from swift_loader.doctor.rich_text import progress

    with progress() as step:
        return diagnose(settings, step)
