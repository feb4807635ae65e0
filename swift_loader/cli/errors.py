"""The error of a command that can't do what it was asked. Its text is all that the user sees."""

from __future__ import annotations

__all__ = ["CommandError"]


class CommandError(Exception):
    """What is wrong, in one line. `main` prints it to stderr, without a traceback, and exits with code 2."""
