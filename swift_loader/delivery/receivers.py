"""Decides which thread receives from the workers: the loop's thread or the receiver threads (leader/followers).

    thread that leads ──kick──► parked ──resume──► leads        (the loop's thread kicks, leads itself, resumes)

For a small batch, a hand-over between threads costs more than everything else. So a loop that waits for each batch
receives the events itself. The receiver threads, one per worker up to 16, or one for all, take over while the loop is
busy: at once if its last steps were long, else when the first thread, which is parked, sees that it stays away. The
thread that leads blocks in its inbox, and uses no CPU while nothing happens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from enum import Enum
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from swift_loader.executors.base import Inbox
from swift_loader.threads import LoaderThread

if TYPE_CHECKING:
    from swift_loader.delivery.dispatcher import Dispatcher

SHORT_ABSENCE_NS = 1_000_000
"""A loop that comes back sooner keeps receiving itself. A hand-over and back takes about 0.1 ms."""

LONG_ABSENCE_NS = 20_000_000
"""A loop whose steps were short, and that stays away for longer, validates or writes a checkpoint."""

LOOK_S = 0.05
"""How often the first thread, while it is parked, looks whether the loop stays away."""


class _Leader(Enum):
    LOOP = "the loop"
    THREADS = "the threads"
    NOBODY = "nobody"
    """The threads were stopped."""


class Receivers:
    """Hands the receiving back and forth between the loop's thread and the receiver threads of one dispatcher.

    The dispatcher's loop lock guards it. Only `stop` may run without the lock: it uses no state but the threads. And
    `add` runs under the dispatch lock.
    """

    def __init__(self, dispatcher: Dispatcher, inboxes: Sequence[Inbox]) -> None:
        """Get ready. The loop leads. `inboxes`: the loop's, then one for each thread."""
        self._dispatcher = dispatcher
        self.inbox = inboxes[0]
        """The loop's."""
        self._threads: list[_ReceiverThread] = []
        self._added = deque(inboxes[1:])
        """Inboxes whose threads aren't started yet. Any thread appends."""
        self._num_inboxes = len(inboxes)
        self._leader = _Leader.LOOP
        self._left_ns = 0
        """When the loop last got a batch."""
        self._absence_ns = float(SHORT_ABSENCE_NS)
        """Smoothed time between two calls of the loop."""

    @property
    def loop_leads(self) -> bool:
        """Whether the loop leads: what the workers send stays in their pipes until it receives."""
        return self._leader is not _Leader.THREADS or not self._threads

    def add(self, inboxes: Sequence[Inbox]) -> None:
        """Have a thread for each of these inboxes, of which the first ones are known, from the next hand-over on."""
        self._added.extend(inboxes[self._num_inboxes :])
        self._num_inboxes = len(inboxes)

    def take(self) -> Inbox:
        """Park the threads. Return the inbox from which the caller receives until it calls `leave`."""
        if self._leader is _Leader.THREADS:
            self._leader = _Leader.LOOP
            for thread in self._threads:
                thread.park()
        return self.inbox

    def leave(self, entered_ns: int, left_ns: int, *, is_over: bool) -> None:
        """Record that the loop got its batch, or the end. The threads take over unless the loop will soon be back."""
        absence_ns = max(0, entered_ns - self._left_ns)
        self._absence_ns = 0.5 * (self._absence_ns + min(absence_ns, 100 * SHORT_ABSENCE_NS))
        self._left_ns = left_ns
        if (is_over or self._absence_ns > SHORT_ABSENCE_NS) and (self._added or self._leader is _Leader.LOOP):
            self.hand_over()

    def hand_over(self) -> None:
        """Let the threads lead. Start those that aren't started yet."""
        while self._added and self._leader is not _Leader.NOBODY:
            thread = _ReceiverThread(self, self._dispatcher, self._added.popleft(), looks=not self._threads)
            self._threads.append(thread)
            thread.start()
            if self._leader is _Leader.LOOP:
                thread.park()
        if self._leader is _Leader.LOOP:
            self._leader = _Leader.THREADS
            for thread in self._threads:
                thread.resume()

    def look(self) -> None:
        """Have the threads lead if the loop leads, but stays away. The first thread runs it."""
        if self._leader is _Leader.LOOP and time.perf_counter_ns() - self._left_ns > LONG_ABSENCE_NS:
            self._dispatcher.hand_over_if_idle()

    def stop(self, deadline_s: float) -> None:
        """Stop the threads. Returns when they have ended, or at the deadline. Idempotent.

        A thread may be decoding, or wait for a lock: a signal handler may close the loader on a thread that holds it.
        """
        self._leader = _Leader.NOBODY
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._threads = []

    def __repr__(self) -> str:
        return f"<Receivers: {self._leader.value} lead, {len(self._threads)} threads>"


class _ReceiverThread(LoaderThread):
    """A thread that receives from some workers while the loop's thread doesn't. It leads until `park`."""

    def __init__(self, receivers: Receivers, dispatcher: Dispatcher, inbox: Inbox, *, looks: bool) -> None:
        """`looks`: it looks whether the loop stays away, while it is parked."""
        super().__init__(self._serve, "receiver")
        self._receivers, self._dispatcher = receivers, dispatcher
        self._inbox = inbox
        self._looks = looks
        # Queues and flags, because threading's semaphores and events have locks that are held in Python code: a signal
        # handler that raises there leaves a lock taken, or one released that isn't, and the garbage collector may close
        # the loader on a thread that holds one.
        self._parked: SimpleQueue[None] = SimpleQueue()
        """Has an entry each time the thread has parked, and one at its end."""
        self._resumed: SimpleQueue[None] = SimpleQueue()
        """Has an entry for each `resume` and `stop`."""
        self._is_parking = False
        """Set while `park` waits for the thread."""
        self._is_stopping = False

    def park(self) -> None:
        """Make the thread stop receiving, and wait until it has. The caller leads then."""
        if not self._is_stopping:
            self._is_parking = True
            self._inbox.wake()
            self._parked.get()

    def resume(self) -> None:
        """Let the thread lead again."""
        self._resumed.put(None)

    def stop(self) -> None:
        """Make the thread end, parked or not. Idempotent."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._inbox.wake()
        self._resumed.put(None)

    def _serve(self) -> None:
        try:
            while not self._is_stopping:
                self._dispatcher.receive_and_act(self._inbox)
                if self._is_parking and not self._is_stopping:  # even if events keep arriving
                    self._is_parking = False
                    self._inbox.sleep()
                    self._parked.put(None)
                    self._wait_resumed()
        except BaseException as error:  # even a SystemExit of the user's decoder: the loop must hear of it
            self._dispatcher.fail(error)
        finally:
            self._parked.put(None)  # a thread in `park` needn't wait any longer

    def _wait_resumed(self) -> None:
        """Wait until `resume` or `stop`, and look after the loop meanwhile."""
        while True:
            try:
                self._resumed.get(timeout=LOOK_S if self._looks else None)
            except Empty:
                self._receivers.look()
            else:
                return
