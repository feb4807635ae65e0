"""Finds what the user names as `package.module:name`: a dataset, a loader, or what makes one."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from swift_loader.cli.errors import CommandError

__all__ = ["find_target", "made_by"]


def find_target(target: str) -> Any:
    """Return the object that `package.module:name` names. Imports the module, with the working directory first.

    `name` may have dots, for an attribute of a class.

    Raises:
        CommandError: There is no such module or name, or the import raised. The message is one line.
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

    Raises:
        CommandError: There is no such thing, or the call raised. The message is one line.
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
