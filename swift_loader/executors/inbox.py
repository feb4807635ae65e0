"""What worker processes send, turned into events: what the inboxes for all kinds of processes have in common.

    worker ──channel──► WorkerInbox.wait ──► MessageReader ──► events          one thread at a time
    other threads ──post──► ─────────────────────┘

The first inbox listens to all workers; each further one listens to a part of them, for a thread that takes over while
the loop is busy. So two inboxes know each worker, and only one of them is in use at a time.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from swift_loader.errors import SwiftLoaderError
from swift_loader.executors.base import Inbox
from swift_loader.executors.handle import Handle
from swift_loader.executors.process.reader import MessageReader
from swift_loader.options import DeliveryOptions
from swift_loader.runtime import raise_interrupt
from swift_loader.scheduler.messages import Disconnected, Event, ExecutorFailed

MAX_RECEIVERS = 16
"""With more threads, they only wait for each other's GIL."""


def num_receivers(options: DeliveryOptions) -> int:
    """Return how many threads receive while the loop is busy: one per worker, or one for all."""
    return min(options.num_workers, MAX_RECEIVERS) if options.thread_per_worker else 1


class WorkerInbox(Inbox):
    """The workers to listen to, and events of other threads. `wait` is the subclass's, which knows what to wait for.

    A bell ends the wait: it rings for `wake` and for events of other threads. Whoever waits silences it.
    """

    def __init__(self, reader: MessageReader, posted: deque[Event | Handle]) -> None:
        """Begin without workers. `posted`: events from elsewhere. Whoever adds one rings."""
        super().__init__()
        self.is_closed = False
        self.remote: Any = None
        """The `ActorFleet`, if some workers are actors. It is asked before each wait: nothing else tells of its end."""
        self._reader = reader
        self._posted = posted

    def watch(self, worker: Handle) -> None:
        """Also listen to this worker. Any thread may call it, even while another one waits."""
        raise NotImplementedError

    def watch_room(self, worker: Handle) -> None:
        """Send what waits in a worker's outbox as soon as its pipe has room. Any thread."""

    def forget(self, worker: Handle) -> None:
        """Stop listening to a worker. Call it before its channel is closed. Idempotent and thread-safe."""
        raise NotImplementedError

    def close(self) -> None:
        """Close what is the inbox's own. Idempotent."""
        raise NotImplementedError

    def _take_posted(self, events: list[Event]) -> None:
        while self._posted:
            posted = self._posted.popleft()
            if isinstance(posted, Handle):
                posted.drain(self._reader, events)
            else:
                events.append(posted)

    def _read(self, worker: Handle, events: list[Event], *, all_of_it: bool) -> None:
        """Add the event of the worker's next message; or of all of them, and of its end, if its process has ended."""
        try:
            while (received := worker.channel.receive(wait=False)) is not None:
                event = self._reader.read(worker, received)
                if event is not None:
                    events.append(event)
                if not all_of_it:
                    return
        except BlockingIOError:
            if not all_of_it:
                return
        except FileNotFoundError:  # it has ended before its memory was attached; its batches are built again
            pass
        except SwiftLoaderError as error:  # other errors propagate to the loop: a signal handler may have raised them
            raise_interrupt(error)  # one that came while a message was unpacked
            self.forget(worker)
            events.append(ExecutorFailed(error))
            return
        except OSError:
            if not self.is_closed:  # by another thread, while a batch was decoded
                raise
        if not self.is_closed:
            self.forget(worker)
            events.append(Disconnected(worker.serial, worker.worker_id))
