"""Which of the user's lines is running, and which ones take the time.

A stack counts for the innermost line of the user's own code: a call of a library counts for the line that makes it. If
no frame is the user's, as in a dataset of a library, it counts for the dataset's own line.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType

from swift_loader.doctor.diagnosis import Line, LineShare

_HERE = f"{os.getcwd()}{os.sep}"
"""Now, because the dataset may change it."""

_PACKAGE = str(Path(__file__).parents[1])

_NUM_LINES = 8
_LEAST_SHARE = 0.005
_MAX_FRAMES = 200

_EVERY_S = 0.004
"""Looking so often costs a fetching thread that computes about 1 % of its time."""

_STACK = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@functools.cache
def is_users_file(file: str) -> bool:
    """Return whether a file is neither of the standard library, nor of an installed package, nor of this one."""
    path = file.replace("\\", "/")
    if path.startswith("<") and not path.startswith("<ipython"):
        return False
    return not file.startswith(_library_folders()) and not any(
        f"/{name}-packages/" in path for name in ("site", "dist")
    )


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(f"{folder}{os.sep}" for folder in (*folders, _PACKAGE))


def line_of(stack: Sequence[Line]) -> Line | None:
    """Return the line that a stack counts for, innermost frame first; None if the stack is empty."""
    line = next((line for line in stack if is_users_file(line.file)), stack[-1] if stack else None)
    return None if line is None else Line(line.file.removeprefix(_HERE), line.number, line.function)


def line_in_dump(text: str) -> Line | None:
    """Return the user's line in the stacks that faulthandler wrote; None if there is none.

    A crash dumps the thread that crashed as the current one. A timeout dumps all threads, the main thread last.
    """
    begins = list(_STACK.finditer(text))
    if not begins:
        return None
    begin = next((one for one in begins if one[0].startswith("Current")), begins[-1]).end()
    end = next((one.start() for one in begins if one.start() > begin), len(text))
    stack = [Line(found[1], int(found[2]), found[3]) for found in _FRAME.finditer(text, begin, end)]
    return line_of([line for line in stack if is_users_file(line.file)])


class StackSampler:
    """A thread that looks at the stack of the thread that made it, while that thread fetches samples.

    C code that holds the GIL delays a look to its end; the look then finds the line that called it, or the next one.
    """

    def __init__(self, caller: str) -> None:
        """Start the thread. `caller` is the file whose code calls the dataset."""
        self.index: int | None = None
        """The sample that is being fetched; None: none is. The fetching thread sets it."""
        self.num_hits = 0
        """How often the fetching thread was found within a sample."""
        self._caller = caller
        self._thread_id = threading.get_ident()
        self._stop = threading.Event()
        self._hits: Counter[tuple[int, Line]] = Counter()
        is_users_file("")  # the first call is slow
        self._thread = threading.Thread(target=self._run, name="swift_loader-doctor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def shares(self, indices: Collection[int] | None = None) -> tuple[LineShare, ...]:
        """Return the lines that took the time of some samples, or of all. Call it after `stop`."""
        hits: Counter[Line] = Counter()
        for (index, line), count in self._hits.items():
            if indices is None or index in indices:
                hits[line] += count
        total = sum(hits.values())
        ordered = sorted(hits.items(), key=lambda item: (-item[1], str(item[0])))
        shares = (LineShare(line, count / total, count) for line, count in ordered[:_NUM_LINES])
        return tuple(one for one in shares if one.share >= _LEAST_SHARE)

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            frame = sys._current_frames().get(self._thread_id)  # noqa: SLF001 - documented, despite its name
            index = self.index
            line = None if index is None else line_of(self._stack_from(frame))
            if index is not None and line is not None:
                self._hits[index, line] += 1
                self.num_hits += 1

    def _stack_from(self, frame: FrameType | None) -> list[Line]:
        """Return the frames from the innermost one to the dataset's method; none if it isn't within a sample."""
        stack: list[Line] = []
        while frame is not None and len(stack) < _MAX_FRAMES:
            if frame.f_code.co_filename == self._caller:
                return stack
            stack.append(Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return []
