"""The loader's own log, through loguru, apart from whatever the user does with loguru."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["LogSettings", "open_log"]

_FORMAT = "{time:YYYY-MM-DD HH:mm:ss.SSS} | {level} | {message}"


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Where the log goes."""

    path: str | None
    """Prefix of the file; the rank and `.log` are added."""
    stdout: bool
    level: str


def open_log(settings: LogSettings | None, rank: int) -> tuple[Callable[[str], None], Callable[[], None]]:
    """Return a function that logs a line, and one that closes the log; both do nothing without settings."""
    if settings is None:
        return (lambda _line: None), (lambda: None)
    # loguru's public logger is one for the process: what is sent to it goes to the user's sinks, too, and removing
    # theirs is no business of ours. A logger with a core of its own can only be had from its private module.
    from loguru import _logger

    options: dict[str, Any] = dict.fromkeys(("record", "lazy", "colors", "raw"), False)
    private: Any = _logger
    logger = private.Logger(
        core=private.Core(), exception=None, depth=1, capture=True, patchers=[], extra={}, **options
    )
    if settings.path is not None:
        logger.add(f"{settings.path}_rank{rank}.log", format=_FORMAT, level=settings.level)
    if settings.stdout:
        logger.add(sys.stdout, format=_FORMAT, level=settings.level)

    def write(line: str) -> None:
        escaped = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
        logger.info(escaped)

    return write, logger.remove
