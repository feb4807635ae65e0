"""Who listens to the workers: the loop's thread while it waits for a batch, threads of our own while it is away.

    thread on duty ──kick──► parked ──resume──► on duty        (the loop's thread kicks, listens itself, resumes)

A hand-over between threads costs more than everything else that is done to a small batch, so a loop that waits for
each batch takes the messages in by itself; the receiver threads, one for each worker or one for all, take over when the
loop has other things to do. Whoever is on duty blocks in epoll_wait(2) on the channels and on the processes themselves,
and uses no CPU while nothing happens. Workers come and go meanwhile, on the pool's thread.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterable
from typing import Protocol

from swift_loader.engine.worker import WorkerHandle
from swift_loader.errors import SwiftLoaderError
from swift_loader.transport.channel import Received
from swift_loader.transport.descriptors import new_epoll, new_eventfd

__all__ = ["Listener", "Listening", "ReceiverThread"]


_MAX_POLL_S = 1e6
"""epoll_wait(2) takes 2**31 ms; who waits longer asks again."""

_MAX_EVENTS = 64


class Listener(Protocol):
    """The engine, as far as those who listen know it."""

    def on_message(self, worker: WorkerHandle, received: Received) -> None:
        """Take in one message."""
        ...

    def on_end(self, worker: WorkerHandle, error: Exception | None) -> None:
        """Take note that a worker is gone, or that what it said made no sense."""
        ...

    def on_pause(self) -> None:
        """All messages that were here have been taken in."""
        ...

    def on_failure(self, error: BaseException) -> None:
        """Nobody listens any more."""
        ...


class Listening:
    """What there is to listen to; used by one thread at a time."""

    def __init__(self, workers: Iterable[WorkerHandle], wake: int, listener: Listener) -> None:
        self._listener = listener
        self._wake = wake
        self.is_taking_in = False
        """Whether a message has been read and isn't dealt with yet: what interrupts it then may lose a batch."""
        self._sources: dict[int, WorkerHandle] = {}
        self._epoll = new_epoll()
        self._epoll.register(wake, select.EPOLLIN)
        for worker in workers:
            self.watch(worker)

    def watch(self, worker: WorkerHandle) -> None:
        """Listen to a worker, too. Any thread, also while another one listens."""
        # The process as well as the pipe: a process that the dataset started may hold a copy of the pipe open.
        for descriptor in (worker.channel.fileno(), worker.process.pidfd):
            self._sources[descriptor] = worker
            self._epoll.register(descriptor, select.EPOLLIN)

    def forget(self, worker: WorkerHandle) -> None:
        """Stop listening to a worker, before its descriptors are closed. Idempotent, any thread."""
        for descriptor in (worker.channel.fileno(), worker.process.pidfd):
            if self._sources.pop(descriptor, None) is not None:
                self._epoll.unregister(descriptor)

    def listen(self, timeout_s: float | None = None) -> bool:
        """Wait for something to happen, and take it in; return False if nothing did, or if somebody woke us."""
        limit_s = None if timeout_s is None else min(max(0.0, timeout_s), _MAX_POLL_S)
        try:
            events = self._epoll.poll(limit_s, _MAX_EVENTS)
        except (OSError, ValueError):
            if self._epoll.closed:  # by the handler of a signal that came meanwhile
                return False
            raise
        self.is_taking_in = True
        for descriptor, _ in events:
            worker = self._sources.get(descriptor)
            if worker is not None:
                self._take_in(worker, is_process=descriptor == worker.process.pidfd)
        self.is_taking_in = False
        return bool(events) and not any(descriptor == self._wake for descriptor, _ in events)

    def close(self) -> None:
        """Give up the descriptor. Idempotent."""
        self._epoll.close()

    def _take_in(self, worker: WorkerHandle, *, is_process: bool) -> None:
        # The event may be of a worker that is gone, and its descriptor's number have passed to another one.
        has_ended = is_process and worker.process.has_ended
        try:
            while (received := worker.channel.receive(wait=False)) is not None:
                self._listener.on_message(worker, received)
                if not has_ended:
                    return
        except BlockingIOError:
            if not has_ended:
                return
        except SwiftLoaderError as error:  # another one would be the loop's: a handler of a signal may have raised it
            self.forget(worker)
            self._listener.on_end(worker, error)
            return
        self.forget(worker)
        self._listener.on_end(worker, None)


class ReceiverThread:
    """Listens to some workers while the loop's thread doesn't."""

    def __init__(self, workers: Iterable[WorkerHandle], listener: Listener) -> None:
        self._listener = listener
        self._kick = new_eventfd()
        try:
            self._listening = Listening(workers, self._kick, listener)
        except BaseException:
            os.close(self._kick)
            raise
        self._parked = threading.Semaphore(0)
        self._resume = threading.Semaphore(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="swift_loader-receiver", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def park(self) -> None:
        """Return once the thread has stopped listening: the caller is on duty now."""
        if not self._stopping:
            os.eventfd_write(self._kick, 1)
            self._parked.acquire()

    def resume(self) -> None:
        """Put the thread back on duty."""
        self._resume.release()

    def watch(self, worker: WorkerHandle) -> None:
        """Listen to a worker, too. Any thread."""
        self._listening.watch(worker)

    def forget(self, worker: WorkerHandle) -> None:
        """Stop listening to a worker. Idempotent, any thread."""
        self._listening.forget(worker)

    def stop(self) -> None:
        """End the thread, parked or not, and give up its descriptor. Only the first call does anything."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._kick, 1)
        self._resume.release()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._listening.close()
        os.close(self._kick)

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self._listening.listen():
                    self._listener.on_pause()
                elif not self._stopping:
                    os.eventfd_read(self._kick)
                    self._parked.release()
                    self._resume.acquire()
        except BaseException as error:  # also a SystemExit out of the user's decoder: the loop must get to know
            self._listener.on_failure(error)
        finally:
            self._parked.release()  # whoever waits for this thread to rest need not wait any longer
