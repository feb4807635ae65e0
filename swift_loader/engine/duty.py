"""Decides which thread receives from the workers: the loop's thread or the receiver threads.

Only the loop's thread uses it, except for `watch` and `forget` (the pool's thread) and `stop` (any thread).
"""

from __future__ import annotations

from collections.abc import Iterable

from swift_loader.engine.receiver import Listener, Listening, ReceiverThread
from swift_loader.engine.worker import WorkerHandle

__all__ = ["Duty"]

SHORT_ABSENCE_NS = 1_000_000
"""A loop that comes back sooner keeps receiving itself. A hand-over and back takes about 0.1 ms."""


class Duty:
    """Hands the receiving back and forth between the loop's thread and the receiver threads of one engine."""

    def __init__(self, workers: Iterable[WorkerHandle], num_threads: int, wake: int, listener: Listener) -> None:
        """Get ready.

        Args:
            workers: The workers that exist already.
            num_threads: Number of receiver threads. Each worker has one by its place, also a worker that comes later.
            wake: A descriptor. When it is readable, the loop's thread stops listening.
            listener: Takes in the messages.
        """
        groups: list[list[WorkerHandle]] = [[] for _ in range(num_threads)]
        for worker in (workers := list(workers)):
            groups[worker.place % num_threads].append(worker)
        self._listening = Listening(workers, wake, listener)
        self._threads: list[ReceiverThread] = []
        try:
            for group in groups:
                self._threads.append(ReceiverThread(group, listener))
        except BaseException:
            self.stop()
            raise
        self._loop_listens = True
        self._left_ns = 0
        self._absence_ns = float(SHORT_ABSENCE_NS)

    @property
    def loop_listens(self) -> bool:
        """Whether the loop is on duty: what the workers send stays in their pipes until it listens."""
        return self._loop_listens

    def begin(self) -> None:
        """Start the threads, parked. The loop's thread is on duty."""
        for thread in self._threads:
            thread.start()
            thread.park()

    def take(self) -> Listening:
        """Park the threads. Return what the caller listens to until it calls `leave`."""
        if not self._loop_listens:
            self._loop_listens = True
            for thread in self._threads:
                thread.park()
        return self._listening

    def watch(self, worker: WorkerHandle) -> None:
        """Add a new worker for whichever thread is on duty."""
        self._listening.watch(worker)
        self._threads[worker.place % len(self._threads)].watch(worker)

    def forget(self, worker: WorkerHandle) -> None:
        """Stop listening to a worker. Call it before the worker is closed."""
        self._listening.forget(worker)
        self._threads[worker.place % len(self._threads)].forget(worker)

    @property
    def is_taking_in(self) -> bool:
        """Whether the loop's thread is processing a message that it has read."""
        return self._listening.is_taking_in

    def leave(self, entered_ns: int, left_ns: int, *, is_epoch_over: bool) -> None:
        """Record that the loop got its batch. The threads take over unless the loop will probably be back at once.

        After the last batch of an epoch they always take over.
        """
        absence_ns = max(0, entered_ns - self._left_ns)
        self._absence_ns = 0.5 * (self._absence_ns + min(absence_ns, 100 * SHORT_ABSENCE_NS))
        self._left_ns = left_ns
        if is_epoch_over or self._absence_ns > SHORT_ABSENCE_NS:
            self.hand_back()

    def hand_back(self) -> None:
        """Put the threads on duty."""
        if self._loop_listens:
            self._loop_listens = False
            for thread in self._threads:
                thread.resume()

    def stop(self) -> None:
        """Stop the threads. Idempotent."""
        for thread in self._threads:
            thread.stop()
        self._listening.close()
