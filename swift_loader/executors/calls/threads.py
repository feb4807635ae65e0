"""Worker threads that do tasks. Each has a queue of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from swift_loader.executors.calls.crew import Post
from swift_loader.executors.thread.task_thread import TaskThread
from swift_loader.scheduler.messages import Send

Job = Callable[[Send, Post], None]
"""Does a task, and posts the event that answers it. It catches all that the user's code raises."""


class ThreadCrew:
    """Threads that do one task at a time each."""

    def __init__(self, job: Job, num_threads: int, name: str) -> None:
        """Make the threads, without starting them. `job` runs in all of them at the same time.

        `name`: what they are for.
        """
        self._job = job
        self._post: Post = print  # until `start`
        self._threads: list[TaskThread[Send]] = [
            TaskThread(self._serve, f"{name}-{number}") for number in range(num_threads)
        ]

    def start(self, post: Post) -> None:
        """Start the threads."""
        self._post = post
        for thread in self._threads:
            thread.start()

    def send(self, task: Send) -> None:
        """Have a thread do a task after those that it has."""
        self._threads[task.worker].send(task)

    def stack(self, worker: int) -> str:
        """Return the thread's Python stack."""
        return self._threads[worker].stack()

    def stop(self) -> None:
        """Let the threads end after their current tasks."""
        for thread in self._threads:
            thread.stop()

    def join(self, limit_s: float) -> None:
        """Wait for the threads. One that hangs in the user's code is left alone."""
        deadline_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _serve(self, tasks: Iterator[Send]) -> None:
        job, post = self._job, self._post
        for task in tasks:
            job(task, post)

    def __repr__(self) -> str:
        return f"<ThreadCrew of {len(self._threads)} threads>"
