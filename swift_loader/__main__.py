"""The command line: `swift-loader SUBCOMMAND`, also `python -m swift_loader SUBCOMMAND`.

A subcommand is a module with two functions:

    add_arguments(parser: argparse.ArgumentParser) -> None    declares its arguments
    run(arguments: argparse.Namespace) -> int                 does the work, and returns the exit code

Only the module of the command that is run is imported, so a subcommand may import torch at its top. `run` raises
`CommandError` for what the user can put right.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import swift_loader

_SUBCOMMANDS = {
    "doctor": ("swift_loader.doctor.examination", "examine a dataset: what is slow, and what could go wrong"),
    "replay": ("swift_loader.replay", "rebuild a batch of a past run and write it to a file"),
    "state": ("swift_loader.state", "say what the saved states of loaders in a file are"),
}
"""Each subcommand's module, and one line for the list of subcommands, which is shown without an import."""

_BAD_USAGE = 2
"""Exit code of a wrong command line, as argparse has it, and of a `CommandError`."""


class CommandError(Exception):
    """What is wrong, in one line. `main` prints it to stderr, without a traceback, and exits with code 2."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of the process, and return the exit code."""
    words = sys.argv[1:] if words is None else list(words)
    chosen = words[0] if words and words[0] in _SUBCOMMANDS else None
    try:
        subcommand: Any = None if chosen is None else _load(chosen)
        parser = argparse.ArgumentParser("swift-loader", description="Tools for datasets and runs of swift_loader.")
        parser.add_argument("--version", action="version", version=f"swift_loader {swift_loader.__version__}")
        names = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
        for name, (_, summary) in _SUBCOMMANDS.items():
            one = names.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
            if name == chosen:
                subcommand.add_arguments(one)
        arguments = parser.parse_args(words)  # without a subcommand, argparse ends us here
        return int(subcommand.run(arguments))
    except CommandError as error:
        sys.stderr.write(f"swift-loader: error: {error}\n")
        return _BAD_USAGE


def _load(command: str) -> ModuleType:
    try:
        return import_module(_SUBCOMMANDS[command][0])
    except ModuleNotFoundError as error:
        raise CommandError(f"{command} needs the module {error.name!r}, which isn't installed") from error


# What the user names as `package.module:name`: a dataset, a loader, or what makes one --------------------------------


def find_target(target: str) -> Any:
    """Return the object that `package.module:name` names. Imports the module, with the working directory first.

    `name` may have dots, for an attribute of a class. Raises `CommandError` if it can't be found or imported.
    """
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise CommandError(f"{target!r} isn't of the form package.module:name, such as data.images:make_dataset")
    found: Any = _imported(module_name)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise CommandError(f"{module_name!r} has no {path!r}; name a function, a class or an object") from error
    return found


def made_by(target: str) -> Any:
    """Return the dataset or the loader that a target names. A function or a class is called without arguments.

    Raises `CommandError` if it can't be found, or if the call raised.
    """
    found = find_target(target)
    if not callable(found) or (hasattr(found, "__getitem__") and not isinstance(found, type)):
        return found
    try:
        return found()
    except Exception as error:
        raise CommandError(f"{target}() raised {_in_one_line(error)}") from error


def _imported(name: str) -> ModuleType:
    directory = os.getcwd()
    if directory not in sys.path and "" not in sys.path:  # a console script doesn't have it there
        sys.path.insert(0, directory)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise CommandError(
                f"there is no module {error.name!r} in {directory} or on the import path; run the command where "
                f"`import {name}` works"
            ) from error
        raise CommandError(f"importing {name!r} raised {_in_one_line(error)}") from error
    except (Exception, SystemExit) as error:  # a script may end itself, as argparse does
        raise CommandError(f"importing {name!r} raised {_in_one_line(error)}") from error


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    sys.exit(import_module("swift_loader.__main__").main())  # under the name by which subcommands import it
