"""A thread that pulls items from upstream and hands them over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from swift_loader.pipeline.items import Item
from swift_loader.pipeline.stats import StageStats, Wait
from swift_loader.threads import LoaderThread


class Filler:
    """Pulls until upstream ends, fails, or nobody wants the items any more.

    It closes upstream when it ends, so generators of the user's are closed by the thread that ran them.
    """

    def __init__(
        self,
        upstream: Iterator[Item],
        put: Callable[[Item], bool],
        end: Callable[[BaseException | None], None],
        stats: StageStats,
    ) -> None:
        """Only this thread uses `upstream`. `put` blocks while there is no room; False: nobody wants the item.

        `end` gets the error that ended upstream, or None.
        """
        self._upstream = upstream
        self._put = put
        self._end = end
        self._stats = stats
        stats.num_in = 0
        self.thread = LoaderThread(self._run, f"fill-{stats.name}")
        """It isn't started."""

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._fill()
        except BaseException as raised:  # even SystemExit of the user's source: the loop must hear of it
            error = raised
        self._end(error)

    def _fill(self) -> None:
        upstream, put, stats = self._upstream, self._put, self._stats
        clock, num_in = time.perf_counter, 0
        try:
            stats.note_wait(clock(), Wait.INPUT)
            for item in upstream:
                stats.note_wait(clock(), Wait.OUTPUT)
                stats.num_in = num_in = num_in + 1
                if not put(item):
                    return
                stats.note_wait(clock(), Wait.INPUT)
                del item
        finally:
            stats.note_wait(clock(), Wait.NOTHING)
            getattr(upstream, "close", lambda: None)()
