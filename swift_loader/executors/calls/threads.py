"""Worker threads that do tasks. Each has a queue of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from swift_loader.executors.calls.crew import Post
from swift_loader.executors.thread.stacks import stack_of
from swift_loader.scheduler.actions import Send

__all__ = ["Job", "ThreadCrew"]

Job = Callable[[Send, Post], None]
"""Does a task, and posts the event that answers it. It catches all that the user's code raises."""


class ThreadCrew:
    """Threads that do one task at a time each."""

    def __init__(self, job: Job, num_threads: int, name: str) -> None:
        """Make the threads, without starting them.

        Args:
            job: Does a task. Runs in all threads at the same time.
            num_threads: How many.
            name: What they are for.
        """
        self._job = job
        self._queues: list[queue.SimpleQueue[Send | None]] = [queue.SimpleQueue() for _ in range(num_threads)]
        """None: end."""
        self._stopping = threading.Event()
        self._name = name
        self._threads: list[threading.Thread] = []

    def start(self, post: Post) -> None:
        """Start the threads."""
        self._threads = [
            threading.Thread(
                target=self._run, args=(tasks, post), name=f"swift_loader-{self._name}-{number}", daemon=True
            )
            for number, tasks in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, task: Send) -> None:
        """Have a thread do a task after those that it has."""
        self._queues[task.worker].put(task)

    def stack(self, worker: int) -> str:
        """Return where a thread is."""
        return stack_of(self._threads[worker])

    def stop(self) -> None:
        """Let the threads end after their current tasks."""
        self._stopping.set()
        for tasks in self._queues:
            tasks.put(None)

    def join(self, limit_s: float) -> None:
        """Wait for the threads. One that hangs in the user's code is left alone."""
        deadline_s = time.monotonic() + limit_s
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():  # it has started
                thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self, tasks: queue.SimpleQueue[Send | None], post: Post) -> None:
        job, is_stopping = self._job, self._stopping.is_set
        while (task := tasks.get()) is not None and not is_stopping():
            job(task, post)

    def __repr__(self) -> str:
        return f"<ThreadCrew of {len(self._queues)} threads>"
