"""Parses the command line and runs a subcommand.

A subcommand is a module with two functions:

    add_arguments(parser: argparse.ArgumentParser) -> None    declares its arguments
    run(arguments: argparse.Namespace) -> int                 does the work, and returns the exit code

The first line of its docstring is its help. `SUBCOMMANDS` names the modules. Only the module of the command that is run
is imported, so a subcommand may import torch at its top. `run` raises `CommandError` for what the user can put right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Protocol

import swift_loader
from swift_loader.cli.errors import CommandError

__all__ = ["BAD_USAGE", "SUBCOMMANDS", "main"]

SUBCOMMANDS: Mapping[str, tuple[str, str]] = {
    "doctor": ("swift_loader.doctor.command", "examine a dataset: what is slow, and what could go wrong"),
    "replay": ("swift_loader.replay.command", "rebuild a batch of a past run and write it to a file"),
}
"""Each subcommand's module, and one line for the list of subcommands, which is shown without an import."""

BAD_USAGE = 2
"""Exit code of a wrong command line, as argparse has it, and of a `CommandError`."""


class Subcommand(Protocol):
    """A module in `SUBCOMMANDS`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do the work, and return the exit code."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        words: The arguments. Default: those of the process.

    Raises:
        SystemExit: The command line is wrong, or asks for help. argparse has printed why.
    """
    words = sys.argv[1:] if words is None else list(words)
    command = words[0] if words and words[0] in SUBCOMMANDS else None
    try:
        subcommand = None if command is None else _load(command)
        arguments = _parser(command, subcommand).parse_args(words)
        assert subcommand is not None, "without one, argparse refuses the command line"
        return subcommand.run(arguments)
    except CommandError as error:
        sys.stderr.write(f"swift-loader: error: {error}\n")
        return BAD_USAGE


def _load(command: str) -> Subcommand:
    """Import the module of a subcommand."""
    name, _ = SUBCOMMANDS[command]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise CommandError(f"{command} needs the module {error.name!r}, which isn't installed") from error


def _parser(chosen: str | None, subcommand: Subcommand | None) -> argparse.ArgumentParser:
    """Return the parser of all subcommands, with the arguments of the chosen one."""
    parser = argparse.ArgumentParser("swift-loader", description="Tools for datasets and runs of swift_loader.")
    parser.add_argument("--version", action="version", version=f"swift_loader {swift_loader.__version__}")
    names = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
    for name, (_, summary) in SUBCOMMANDS.items():
        one = names.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if subcommand is not None and name == chosen:
            subcommand.add_arguments(one)
    return parser
