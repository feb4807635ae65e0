"""Decides who listens to the workers: the loop's thread, or the receiver threads.

Used by the loop's thread only, except `stop`, and `watch` and `forget`, which are for the pool's.
"""

from __future__ import annotations

from collections.abc import Iterable

from swift_loader.engine.receiver import Listener, Listening, ReceiverThread
from swift_loader.engine.worker import WorkerHandle

__all__ = ["Duty"]

SHORT_ABSENCE_NS = 1_000_000
"""A loop that comes back sooner keeps listening itself. A hand-over and back takes about 0.1 ms."""


class Duty:
    """The threads of one engine, and the loop's place among them."""

    def __init__(self, workers: Iterable[WorkerHandle], num_threads: int, wake: int, listener: Listener) -> None:
        """Get ready.

        Args:
            workers: Those there are so far.
            num_threads: Over which workers are spread, by their places; also those that come later.
            wake: A descriptor that interrupts the loop's listening when readable.
            listener: What takes in the messages.
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

    def begin(self) -> None:
        """Start the threads; the loop is on duty."""
        for thread in self._threads:
            thread.start()
            thread.park()

    def take(self) -> Listening:
        """Return what the caller is to listen to until it leaves; the threads rest."""
        if not self._loop_listens:
            self._loop_listens = True
            for thread in self._threads:
                thread.park()
        return self._listening

    def watch(self, worker: WorkerHandle) -> None:
        """Have a new worker listened to by whoever is on duty."""
        self._listening.watch(worker)
        self._threads[worker.place % len(self._threads)].watch(worker)

    def forget(self, worker: WorkerHandle) -> None:
        """Have a worker listened to no longer, before it is closed."""
        self._listening.forget(worker)
        self._threads[worker.place % len(self._threads)].forget(worker)

    @property
    def is_taking_in(self) -> bool:
        """Whether the loop's thread is at a message that it has read."""
        return self._listening.is_taking_in

    def leave(self, entered_ns: int, left_ns: int, *, is_epoch_over: bool) -> None:
        """Take note that the loop has its batch; the threads listen now, unless it is likely to be back at once.

        After the last batch of an epoch it isn't, however quick it was until then.
        """
        absence_ns = max(0, entered_ns - self._left_ns)
        self._absence_ns = 0.5 * (self._absence_ns + min(absence_ns, 100 * SHORT_ABSENCE_NS))
        self._left_ns = left_ns
        if is_epoch_over or self._absence_ns > SHORT_ABSENCE_NS:
            self.hand_back()

    def hand_back(self) -> None:
        """Let the threads listen."""
        if self._loop_listens:
            self._loop_listens = False
            for thread in self._threads:
                thread.resume()

    def stop(self) -> None:
        """End the threads. Idempotent."""
        for thread in self._threads:
            thread.stop()
        self._listening.close()
