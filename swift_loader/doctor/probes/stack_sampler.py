"""Finds out which lines take the time: a thread looks at another thread's stack again and again."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Collection
from types import FrameType

from swift_loader.doctor.facts import Line, Stacks
from swift_loader.doctor.probes.own_code import as_shown, is_users_file
from swift_loader.doctor.probes.subject import Subject
from swift_loader.doctor.rules.lines import line_of

__all__ = ["StackSampler"]

_EVERY_S = 0.004
"""This costs a fetching thread that computes about 1 % of its time."""

_MAX_FRAMES = 200

_CALLER = Subject.__init__.__code__.co_filename
"""The file that calls the dataset's method."""


class StackSampler:
    """Looks at the stack of the thread that made it, while that thread fetches samples.

    C code that holds the GIL delays a look to its end; the look then finds the line that called it, or the next one.
    """

    def __init__(self) -> None:
        """Start nothing yet."""
        self.index: int | None = None
        """The sample that is being fetched; None: none is. The fetching thread sets it."""
        self._thread_id = threading.get_ident()
        self._stop = threading.Event()
        self._hits: Counter[tuple[int, Line]] = Counter()
        self._num_hits = 0
        is_users_file("")  # the first call is slow
        self._thread = threading.Thread(target=self._run, name="swift_loader-doctor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    @property
    def num_hits(self) -> int:
        """How often the fetching thread was found within a sample."""
        return self._num_hits

    def stacks(self, slowest: Collection[int]) -> Stacks:
        """Return what was seen, also of the slowest samples alone. Call it after `stop`."""
        hits: Counter[Line] = Counter()
        of_slowest: Counter[Line] = Counter()
        for (index, line), count in self._hits.items():
            hits[line] += count
            if index in slowest:
                of_slowest[line] += count
        return Stacks(dict(hits), dict(of_slowest))

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            frame = sys._current_frames().get(self._thread_id)  # noqa: SLF001 - documented, despite its name
            index = self.index
            if index is None or frame is None:
                continue
            line = as_shown(line_of(_stack_from(frame), is_users_file))
            if line is not None:
                self._hits[index, line] += 1
                self._num_hits += 1


def _stack_from(frame: FrameType | None) -> list[Line]:
    """Return the frames from the innermost one to the dataset's method, which this package calls."""
    stack: list[Line] = []
    while frame is not None and len(stack) < _MAX_FRAMES:
        file = frame.f_code.co_filename
        if file == _CALLER:
            return stack
        stack.append(Line(file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return []  # it isn't within a sample any more
