"""A thread with a queue of tasks."""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from swift_loader.threads import LoaderThread

# Where a thread of this process is, as text.

_OURS = (str(Path(__file__).parents[2]), threading.__file__)
"""The frames below the user's code are in these files."""


def stack_of(thread: threading.Thread) -> str:
    """Return the Python stack of a thread, from the user's code on; empty if the thread has ended."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - the documented way
    if frame is None:
        return ""
    entries = traceback.extract_stack(frame)
    begin = next((number for number, entry in enumerate(entries) if not entry.filename.startswith(_OURS)), 0)
    return "".join(traceback.format_list(entries[begin:])).rstrip("\n")


Task = TypeVar("Task")


class TaskThread(Generic[Task]):
    """Does one task after the other until it is stopped. It blocks for tasks only."""

    def __init__(self, serve: Callable[[Iterator[Task]], None], name: str) -> None:
        """Make a thread that isn't started.

        `serve` runs in it, with the tasks as they come. They end once it is stopped.
        """
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        """None: stop."""
        self._thread = LoaderThread(self._run, name, serve)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, task: Task) -> None:
        """Have it do a task after those that it has. Never blocks."""
        self._tasks.put(task)

    def stop(self) -> None:
        """Make the thread end after its current task. Any thread. Idempotent."""
        while not self._tasks.empty():
            try:
                self._tasks.get_nowait()
            except queue.Empty:  # the thread was faster
                break
        self._tasks.put(None)

    def join(self, limit_s: float) -> None:
        """Wait until the thread has ended, at most `limit_s`. Does nothing on the thread itself."""
        self._thread.join(limit_s)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stack(self) -> str:
        """Return its Python stack, from the user's code on; empty if it has ended."""
        return stack_of(self._thread)

    def _run(self, serve: Callable[[Iterator[Task]], None]) -> None:
        serve(self._waiting())

    def _waiting(self) -> Iterator[Task]:
        while (task := self._tasks.get()) is not None:
            yield task
