"""Tells after an epoch what would help: in loguru's log, which is on standard error unless the user set it up."""

from __future__ import annotations

from collections.abc import Callable

from swift_loader.metrics.observations import Observations
from swift_loader.report.notice import EpochNotices

__all__ = ["Teller"]


class Teller:
    """Looks at a loader after its epochs, and writes a line if there is something new to say. Loop's thread."""

    def __init__(self, option: str, write: Callable[[str], None] | None = None) -> None:
        """Make one for a loader.

        Args:
            option: What the loader's class calls its number of workers.
            write: Gets each line, too.
        """
        self._notices = EpochNotices(option)
        self._write = write

    def tell(self, elapsed_s: float, observe: Callable[[], Observations]) -> None:
        """Look at the epoch that is over. Mostly this returns at once. Never raises.

        Args:
            elapsed_s: How long all passes have lasted.
            observe: Returns what was measured.
        """
        if not self._notices.is_due(elapsed_s):
            return
        from loguru import logger

        try:
            line = self._notices.note(observe())
        except Exception as error:  # advice must not end a run that works without it
            logger.debug(f"no advice after the epoch: {type(error).__name__}: {error}")
            return
        if line:
            logger.info(line)
            if self._write is not None:
                self._write(line)
