"""Which of the user's lines take the time. Pure.

A stack counts for the innermost line of the user's own code: a call of a library counts for the line that makes it. If
no frame is the user's, as in a dataset of a library, it counts for the dataset's own line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swift_loader.doctor.facts import Line

__all__ = ["LineShare", "line_in_dump", "line_of", "line_shares", "users_files"]

_NUM_LINES = 8
_LEAST_SHARE = 0.005

_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
"""A line of a stack that faulthandler writes."""
_BEGINS = ("Current thread", "Stack (most recent call first)")
"""How it begins the stack of the thread that runs the samples."""

_LIBRARY_FOLDERS = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True, slots=True)
class LineShare:
    """The share of the time that a line takes, with the calls that it makes."""

    line: Line
    share: float
    num_hits: int


def users_files(library_folders: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that tells whether a file is the user's own code.

    Args:
        library_folders: Folders of the standard library and of packages, with a separator at the end.
    """

    def is_users(file: str) -> bool:
        path = file.replace("\\", "/")
        if path.startswith("<") and not path.startswith("<ipython"):
            return False
        return not file.startswith(tuple(library_folders)) and not any(part in path for part in _LIBRARY_FOLDERS)

    return is_users


def line_of(stack: Sequence[Line], is_users: Callable[[str], bool]) -> Line | None:
    """Return the line that a stack counts for; None if the stack is empty.

    Args:
        stack: Innermost frame first, up to the dataset's own method.
        is_users: Tells whether a file is the user's own code.
    """
    for line in stack:
        if is_users(line.file):
            return line
    return stack[-1] if stack else None


def line_shares(hits: Mapping[Line, int]) -> tuple[LineShare, ...]:
    """Return the lines with the most hits, and their shares of all hits."""
    total = sum(hits.values())
    ordered = sorted(hits.items(), key=lambda item: (-item[1], str(item[0])))
    shares = (LineShare(line, count / total, count) for line, count in ordered[:_NUM_LINES])
    return tuple(one for one in shares if one.share >= _LEAST_SHARE)


def line_in_dump(text: str, is_users: Callable[[str], bool]) -> Line | None:
    """Return the user's line in what faulthandler wrote last; None if there is no stack in it."""
    begin = max(text.rfind(words) for words in _BEGINS)
    if begin < 0:
        return None
    stack = [Line(found[1], int(found[2]), found[3]) for found in _FRAME.finditer(text, begin)]
    return next((line for line in stack if is_users(line.file)), None)
