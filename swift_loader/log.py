"""The loader's own log, and loguru's logger of the whole process, which gets nothing until the user asks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from loguru import logger as logger  # noqa: PLC0414 - for the modules that write to it

from swift_loader.checks import check_flag, check_path
from swift_loader.errors import printable

logger.disable("swift_loader")  # as loguru's manual asks of libraries: `logger.enable("swift_loader")` shows the lines

KEYS = ("path", "stdout", "level")
LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")

_FORMAT = "{time:YYYY-MM-DD HH:mm:ss.SSS} | {level} | {message}"


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Where the log is written."""

    path: str | None
    """Prefix of the file's path. `_rank<n>.log` is appended."""
    stdout: bool
    level: str


def check_logger(name: str, logger: Any) -> LogSettings | None:
    """Return the settings for a file prefix, a dict with the keys `KEYS`, or None."""
    if logger is None:
        return None
    if isinstance(logger, (str, os.PathLike)):
        return LogSettings(os.fspath(logger), stdout=False, level="DEBUG")
    if not isinstance(logger, Mapping):
        raise TypeError(
            f"{name} is a {type(logger).__name__}; give a file prefix, or a dict with the keys {', '.join(KEYS)}"
        )
    for key in logger:
        if key not in KEYS:
            raise ValueError(f"{name} has the unknown key {key!r}; the allowed keys are {', '.join(KEYS)}")
    level = str(logger.get("level", "DEBUG")).upper()
    if level not in LEVELS:
        raise ValueError(f"{name}'s level {level!r} is unknown; it must be one of {', '.join(LEVELS)}")
    path = check_path(f"{name}['path']", logger.get("path"))
    return LogSettings(path, check_flag(f"{name}['stdout']", logger.get("stdout", False)), level)


class Log:
    """A log of one process. Thread-safe. Without settings, it drops each line."""

    def __init__(self, settings: LogSettings | None, file_number: int) -> None:
        """Open the log. A file gets the number in its name."""
        self._file: TextIO | None = None
        self._logger: Any = None
        if settings is None:
            return
        # loguru has one public logger per process. Lines sent to it would reach the user's sinks, which aren't ours to
        # remove. Only its private module gives a logger with its own core.
        from loguru import _logger

        options: dict[str, Any] = dict.fromkeys(("record", "lazy", "colors", "raw"), False)
        private: Any = _logger
        options |= {"core": private.Core(), "exception": None, "depth": 1, "capture": True, "patchers": [], "extra": {}}
        self._logger = private.Logger(**options)
        if settings.path is not None:
            path = Path(f"{settings.path}_rank{file_number}.log")
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            self._logger.add(self._file, format=_FORMAT, level=settings.level)
        if settings.stdout:
            self._logger.add(sys.stdout, format=_FORMAT, level=settings.level)

    def write(self, line: str) -> None:
        """Write one line. Escape what can't be printed."""
        if self._logger is not None:
            self._logger.info(printable(line).replace("\n", "\\n"))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._logger is not None:
            self._logger.remove()
        if self._file is not None:
            with suppress(OSError):  # the disk is full: loguru has said so at each line
                self._file.close()
