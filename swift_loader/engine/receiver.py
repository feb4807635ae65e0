"""Receives messages from the workers: on the loop's thread while it waits for a batch, else on receiver threads.

    thread on duty ──kick──► parked ──resume──► on duty        (the loop's thread kicks, listens itself, resumes)

For a small batch, a hand-over between threads costs more than everything else. So a loop that waits for each batch
receives the messages itself. The receiver threads, one per worker up to 16, or one for all, take over while the loop is
busy. The thread on duty blocks in epoll_wait(2) on the channels and the processes, and uses no CPU while nothing
happens. The pool's thread adds and removes workers meanwhile.
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
"""epoll_wait(2) takes less than 2**31 ms. A caller that waits longer calls again."""

_MAX_EVENTS = 64


class Listener(Protocol):
    """The part of the engine that receiving threads call."""

    def on_message(self, worker: WorkerHandle, received: Received) -> None:
        """Process one message."""
        ...

    def on_end(self, worker: WorkerHandle, error: Exception | None) -> None:
        """Handle that a worker is gone, or that it sent an invalid message (`error`)."""
        ...

    def on_pause(self) -> None:
        """Handle that all messages which had arrived are processed."""
        ...

    def on_failure(self, error: BaseException) -> None:
        """Handle that a receiver thread ended with an error, so nobody listens any more."""
        ...


class Listening:
    """The channels and processes to listen to. Used by one thread at a time."""

    def __init__(self, workers: Iterable[WorkerHandle], wake: int, listener: Listener) -> None:
        self._listener = listener
        self._wake = wake
        self.is_taking_in = False
        """Whether a message was read but isn't processed yet. An interrupt at that moment may lose a batch."""
        self._sources: dict[int, WorkerHandle] = {}
        self._epoll = new_epoll()
        self._epoll.register(wake, select.EPOLLIN)
        for worker in workers:
            self.watch(worker)

    def watch(self, worker: WorkerHandle) -> None:
        """Also listen to this worker. Any thread may call it, even while another one listens."""
        # Watch the process as well as the pipe: a process that the dataset started may hold a copy of the pipe open.
        for descriptor in (worker.channel.fileno(), worker.process.pidfd):
            self._sources[descriptor] = worker
            self._epoll.register(descriptor, select.EPOLLIN)

    def forget(self, worker: WorkerHandle) -> None:
        """Stop listening to a worker. Call it before its descriptors are closed. Idempotent and thread-safe."""
        for descriptor in (worker.channel.fileno(), worker.process.pidfd):
            if self._sources.pop(descriptor, None) is not None:
                self._epoll.unregister(descriptor)

    def listen(self, timeout_s: float | None = None) -> bool:
        """Wait for messages and process them. Return False if none came or if `wake` is readable."""
        limit_s = None if timeout_s is None else min(max(0.0, timeout_s), _MAX_POLL_S)
        try:
            events = self._epoll.poll(limit_s, _MAX_EVENTS)
        except (OSError, ValueError):
            if self._epoll.closed:  # a signal handler closed it meanwhile
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
        """Close the epoll descriptor. Idempotent."""
        self._epoll.close()

    def _take_in(self, worker: WorkerHandle, *, is_process: bool) -> None:
        # The event may come from a worker that is gone, whose descriptor number now belongs to another worker.
        has_ended = is_process and worker.process.has_ended
        try:
            while (received := worker.channel.receive(wait=False)) is not None:
                self._listener.on_message(worker, received)
                if not has_ended:
                    return
        except BlockingIOError:
            if not has_ended:
                return
        except SwiftLoaderError as error:  # other errors propagate to the loop: a signal handler may have raised them
            self.forget(worker)
            self._listener.on_end(worker, error)
            return
        self.forget(worker)
        self._listener.on_end(worker, None)


class ReceiverThread:
    """A thread that listens to some workers while the loop's thread doesn't."""

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
        """Start the thread, which begins to listen."""
        self._thread.start()

    def park(self) -> None:
        """Make the thread stop listening, and wait until it has. The caller is on duty then."""
        if not self._stopping:
            os.eventfd_write(self._kick, 1)
            self._parked.acquire()

    def resume(self) -> None:
        """Put the thread back on duty."""
        self._resume.release()

    def watch(self, worker: WorkerHandle) -> None:
        """Also listen to this worker. Thread-safe."""
        self._listening.watch(worker)

    def forget(self, worker: WorkerHandle) -> None:
        """Stop listening to a worker. Idempotent and thread-safe."""
        self._listening.forget(worker)

    def stop(self) -> None:
        """End the thread, parked or not, and close its descriptors. Idempotent."""
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
        except BaseException as error:  # even a SystemExit of the user's decoder: the loop must hear of it
            self._listener.on_failure(error)
        finally:
            self._parked.release()  # a thread in `park` needn't wait any longer
