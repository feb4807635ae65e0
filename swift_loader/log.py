"""The loader's own log. It uses loguru, but doesn't touch the user's loguru logger."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["LogSettings", "open_log"]

_FORMAT = "{time:YYYY-MM-DD HH:mm:ss.SSS} | {level} | {message}"


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Where the log is written."""

    path: str | None
    """Prefix of the file's path. `_rank<n>.log` is appended."""
    stdout: bool
    level: str


def open_log(settings: LogSettings | None, rank: int) -> tuple[Callable[[str], None], Callable[[], None]]:
    """Return a function that logs a line and one that closes the log. Without settings, both do nothing."""
    if settings is None:
        return (lambda _line: None), (lambda: None)
    # loguru has one public logger per process. Lines sent to it would reach the user's sinks, which aren't ours to
    # remove. Only its private module gives a logger with its own core.
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
