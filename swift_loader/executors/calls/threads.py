"""Worker threads that do tasks. Each has a queue of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from swift_loader.executors.calls import Post
from swift_loader.executors.thread.task_thread import TaskThread
from swift_loader.scheduler.messages import Send

Job = Callable[[Send, Post], None]
"""Does a task, and posts the event that answers it. It catches all that the user's code raises."""


class ThreadCrew:
    """Threads that do one task at a time each."""

    aftermath = ". A call can't be killed, so its thread stays until the function returns"
    """What becomes of a call that takes too long."""

    def __init__(self, job: Job, name: str) -> None:
        """Make a crew of no threads. `job` runs in all of them at the same time. `name`: what they are for."""
        self._job = job
        self._name = name
        self._post: Post = print  # until `start`
        self._threads: dict[int, TaskThread[Send]] = {}
        """By the worker's serial number."""
        self._is_stopped = False

    def start(self, post: Post) -> None:
        """Remember where events go."""
        self._post = post

    def add(self, worker: int) -> None:
        """Start another thread."""
        thread = self._threads[worker] = TaskThread(self._serve, f"{self._name}-{worker}")
        thread.start()
        if self._is_stopped:  # `stop` may not have seen it
            thread.stop()

    def give_up(self, worker: int, then: Callable[[], None]) -> None:
        """Let a thread end after its current call, and wait for it no more. Calls `then`."""
        if (thread := self._threads.pop(worker, None)) is not None:  # an interrupt may repeat this
            thread.stop()
        then()

    def send(self, task: Send) -> None:
        """Have a thread do a task after those that it has."""
        self._threads[task.worker].send(task)

    def stack(self, worker: int) -> str:
        """Return the thread's Python stack."""
        return self._threads[worker].stack() if worker in self._threads else ""

    def stop(self) -> None:
        """Let the threads end after their current tasks."""
        self._is_stopped = True
        for thread in list(self._threads.values()):
            thread.stop()

    def join(self, limit_s: float) -> None:
        """Wait for the threads. One that hangs in the user's code is left alone."""
        deadline_s = time.monotonic() + limit_s
        for thread in list(self._threads.values()):
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _serve(self, tasks: Iterator[Send]) -> None:
        job, post = self._job, self._post
        for task in tasks:
            job(task, post)
