"""The worker processes of one loader: starts them, learns how they ended, and stops them.

A worker has an id, 0 to n-1, and a serial number. A worker that died is replaced by another one with the same id: by
the scheduler's decision, never by itself. A fleet tells nobody directly what it learns: it posts events, which come out
of its inboxes. How processes start is what its subclasses differ in.

    new ──start_first──► building ──wait_built──► built ──listen, run──► running ──stop──► stopped ──close_processes──►
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from swift_loader.errors import LoaderClosed, warn
from swift_loader.executors.handle import Handle
from swift_loader.executors.inbox import WorkerInbox, num_receivers
from swift_loader.executors.process.memory import WorkerMemory
from swift_loader.executors.process.reader import DatasetCheck, MessageReader
from swift_loader.executors.wording import Explainer, attached
from swift_loader.options import DeliveryOptions
from swift_loader.runtime import ProcessOwner
from swift_loader.scheduler.messages import Event
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.messages import Failure, FailureStage, unpack
from swift_loader.transport.segments import Segment
from swift_loader.worker.spec import WorkerSpec

EXIT_LIMIT_S = 0.5
"""How much later than the end of its pipe a worker may end, and its exit status arrive."""

SPARE_SEGMENTS = 8
"""Per worker, in addition to one per batch in flight: those that the loop holds, and those on their way back."""


class Fleet(ABC):
    """The worker processes of one loader. Any thread may use it, and no method runs code of the user."""

    has_segments = True
    """Whether batches lie in memory that is used again, so that it pays to page-lock it."""

    def __init__(self, spec: WorkerSpec, options: DeliveryOptions, explainer: Explainer) -> None:
        """Start nothing."""
        self.spec = spec
        """Sent to the processes when they start."""
        self.options = options
        """With the number of workers that there are to be now."""
        self.explainer = explainer
        """Has the words for errors and warnings."""
        self.owner = ProcessOwner()
        """The only process that may use it."""
        self.definitions = Definitions()
        """The definitions that travel by value, under the numbers that the processes use. Known after `start_first`."""
        self.datasets = DatasetCheck()
        """Compares what the processes have built."""
        self.workers: dict[int, Any] = {}
        """The handles by serial number. Replaced as a whole, under the lock, so that any thread may read it."""
        self.inboxes: list[Any] = []
        """The loop's inbox, then those of the threads. Empty before `listen`."""
        self.is_running = False
        """Whether the inboxes listen to all workers, so that what happens to one is an event."""
        self.lock = threading.RLock()
        """Held while a process starts, so that none is started after `stop`."""
        self.num_started = 0
        self._is_stopped = False
        self._limits = options.limits
        self._reader: MessageReader | None = None
        self.remote: Any = None
        """The `ActorFleet`, if some workers are actors."""
        self.posted: deque[Event | Handle] = deque()
        """Events, and workers that have no pipe and may have answered."""
        self.generation = 0
        """The current one."""
        self.notices: deque[str] = deque()
        """Gets warnings for the user that come while the loop runs, on any thread."""

    @property
    def notice(self) -> str:
        """What the log says when the loader has started; empty: nothing."""
        return ""

    @property
    def is_open(self) -> bool:
        """Whether processes may start."""
        return not self._is_stopped

    def check_open(self) -> None:
        """Raise `LoaderClosed` after `stop`."""
        if not self.is_open:
            raise LoaderClosed("the loader was closed; make a new one")

    # Starting ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def start_first(self) -> None:
        """Start the process that builds the dataset first, unless that was done. Returns while it builds it.

        Raises `RuntimeError` if this process is itself one that imports the user's module for a loader, `EncodeError`
        if the dataset or a function can't be sent.
        """

    @abstractmethod
    def wait_built(self, *, warns: bool = False) -> tuple[int, float]:
        """Do the same, and wait until it built the dataset.

        `warns`: warn once if the wait takes longer than `stall_warning`. Returns the length of the dataset, and the
        seconds that it took to build it, including the interpreter's start. Raises `WorkerDied` if the process died, or
        what `start_first` or building the dataset raised.
        """

    def start_ahead(self) -> None:
        """Start what needn't wait for the dataset, now that the loader starts. Raises as `start_first` does."""
        self.start_first()

    def ask_for_stacks(self) -> str:
        """Return the Python stacks of the process that builds the dataset. Blocks for half a second at most."""
        return ""

    def warn_of_build(self) -> None:
        """Warn that building the dataset takes long, and say what it is at."""
        stacks = self.ask_for_stacks()
        what = "importing what the dataset needs" if "<frozen importlib" in stacks else "building the dataset"
        warn(f"{what} has taken {self.options.stall_warning_s:g} s so far{attached(traces=stacks)}")

    @abstractmethod
    def is_current(self) -> bool:
        """Return whether another start would build the same. The dataset or the environment may have changed."""

    @abstractmethod
    def run(self) -> None:
        """Start the first workers after `listen`, and the others in the background. They needn't be ready.

        Raises `LoaderClosed` after `stop`, `WorkerDied`, or what building a dataset raised.
        """

    @abstractmethod
    def start_worker(self, worker_id: int) -> None:
        """Start another worker with this id. Returns at once, and does nothing after `stop`."""

    def length_in(self, message: memoryview, who: str) -> int:
        """Return the dataset's length, as a worker says it that has built it. Raises what building raised."""
        answer = unpack(message)
        if not isinstance(answer, Failure):
            return int(answer.report.num_samples)
        if answer.stage is FailureStage.BUILD:
            raise self.explainer.rebuilt(answer, who, self.definitions)
        return 0  # its set-up has failed: only in torch mode, where the length has no meaning

    @property
    def worker_ids(self) -> range:
        """The ids of the workers that there are to be."""
        return range(self.options.num_workers)

    @property
    def max_segments(self) -> int:
        """How many segments a worker needs if the user keeps no batch."""
        return self._limits.max_of_worker(self.options.num_workers) + SPARE_SEGMENTS

    def next_serial(self) -> int:
        """Return the serial number of the next worker that is started."""
        self.num_started += 1
        return self.num_started - 1

    def make_handle(self, worker_id: int, serial: int, channel: Any, process: Any) -> Handle:
        """Return the handle of a worker."""
        return Handle(worker_id, serial, channel, process, WorkerMemory(self.max_segments))

    def add(self, worker: Handle) -> None:
        """Take in a worker."""
        with self.lock:
            self.workers = {**self.workers, worker.serial: worker}
            if self.is_running:
                self._watch(worker)

    # Listening --------------------------------------------------------------------------------------------------------

    def make_inbox(self, reader: MessageReader, posted: deque[Event | Handle]) -> WorkerInbox:
        """Return an inbox that listens to no worker yet."""
        raise NotImplementedError

    @property
    def num_inboxes(self) -> int:
        """How many there are to be: the loop's, and one for each thread that the options want."""
        return 1 + num_receivers(self.options)

    def listen(self, reader: MessageReader) -> None:
        """Make the inboxes: the loop's, and one for each thread that the options want."""
        self._reader = reader
        self._add_inboxes()

    def _add_inboxes(self) -> None:
        assert self._reader is not None
        for number in range(len(self.inboxes), self.num_inboxes):
            # Others' events come to the loop and to one thread, of which one leads.
            inbox = self.make_inbox(self._reader, self.posted if number <= 1 else deque())
            inbox.remote = inbox.remote or self.remote
            self.inboxes.append(inbox)

    def listen_to_all(self) -> None:
        """Have the inboxes listen to all workers, those that start later included. Raises `LoaderClosed`."""
        with self.lock:
            self.check_open()
            self.is_running = True
            for worker in self.workers.values():
                self._watch(worker)

    def _watch(self, worker: Handle) -> None:
        of_loop, *of_threads = self.inboxes
        of_loop.watch(worker)
        if of_threads:
            of_threads[worker.worker_id % len(of_threads)].watch(worker)

    def forget(self, worker: Handle) -> None:
        """Stop listening to a worker. Idempotent."""
        for inbox in self.inboxes:  # there may be more threads now than when it began to be listened to
            inbox.forget(worker)

    def post(self, event: Event | Handle) -> None:
        """Have an event come out of the inbox that is in use, or what a worker has answered that has no pipe."""
        self.posted.append(event)
        for inbox in self.inboxes[:2]:
            inbox.ring()

    def note_news(self, serial: int) -> None:
        """Take in that a worker without a pipe may have answered, or that a process has ended. Any thread."""
        raise NotImplementedError

    def processes(self) -> list[Handle]:
        """Return the workers, by id; without those that are just being replaced."""
        return sorted(self.workers.values(), key=lambda one: one.worker_id)

    # Acting; the caller holds the dispatch lock -----------------------------------------------------------------------

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Be ready for so many workers. Starts and ends none."""
        self._limits = limits
        self.options = replace(self.options, num_workers=num_workers)
        for worker in self.workers.values():
            worker.memory.max_segments = self.max_segments
        if self.inboxes:
            self._add_inboxes()

    def renew(self) -> list[Segment]:
        """Kill all workers, and start others. Returns the memory of those before, see `Handle.close`."""
        workers = list(self.workers.values())
        for worker in workers:
            self.forget(worker)
            self.kill(worker)
        stop_processes([worker.process for worker in workers])
        given_up = [segment for worker in workers for segment in self.release(worker)]
        self.posted.clear()
        for worker_id in self.worker_ids:
            self.start_worker(worker_id)
        return given_up

    def reap(self, worker: Handle) -> None:
        """Find out how a worker ended, to which nobody listens any more. An event tells."""
        raise NotImplementedError

    def dismiss(self, worker: Handle) -> None:
        """Have a worker end that has nothing left to do. Returns at once."""
        raise NotImplementedError

    def kill(self, worker: Handle) -> None:
        """End a worker that hangs."""
        worker.process.kill()

    def release(self, worker: Handle) -> list[Segment]:
        """Close a worker that was reaped. Returns its memory, see `Handle.close`."""
        with self.lock:  # `stop` either has seen the worker, and closes it, or doesn't see it any more
            if not self.is_open:
                return []
            self.workers = {serial: other for serial, other in self.workers.items() if other is not worker}
        return worker.close()

    def of(self, serial: int) -> Fleet:  # noqa: ARG002
        """Return the fleet that a worker belongs to, if this one is made of several."""
        return self

    def get(self, serial: int) -> Any:
        """Return the handle of a worker; None if it is gone."""
        return self.workers.get(serial)

    def use_generation(self, generation: int) -> None:
        """Have workers skip tasks of earlier generations. Those with pipes learn it from their tasks."""
        self.generation = generation

    def explain(self, worker: Handle | None) -> str:  # noqa: ARG002
        """Return what only this kind of fleet knows of a worker's end, or of a wait for a worker. Else empty."""
        return ""

    def replace_template(self) -> None:
        """Replace the template whose end was posted last. Returns at once."""
        raise NotImplementedError

    # Stopping ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop all processes, within 2.2 s. What other threads may wait for stays open. Idempotent."""
        with self.lock:
            self._is_stopped = True
            workers = self.workers.values()
        processes = [worker.process for worker in workers]
        with or_killed(processes):
            for worker in workers:
                self.dismiss(worker)
            stop_processes(processes)

    def close_processes(self) -> list[Segment]:
        """Close all handles. The processes must have ended, and nobody may wait in an inbox. Idempotent.

        Returns the workers' memory, see `Handle.close`.
        """
        given_up = [segment for worker in self.workers.values() for segment in worker.close()]
        self.close_inboxes()
        return given_up

    def close_inboxes(self) -> None:
        """Close the inboxes. Nobody may wait in one. Idempotent."""
        for inbox in self.inboxes:
            inbox.close()
            inbox.remote = None  # a cycle, which would keep the dataset until the collector runs

    def close(self) -> None:
        """Stop all processes and close all handles, if no executor does. Idempotent."""
        if self.owner.is_here():
            self.stop()
            self.close_processes()

    def __repr__(self) -> str:
        state = "open" if self.is_open else "stopped"
        return f"<{type(self).__name__} {state}, {len(self.workers)} workers>"


# Stops processes in two stages, each with a time limit: they were told to exit; then SIGKILL. SIGTERM does nothing in
# the processes of a program that handles it.

STAGES_S = (0.7, 1.0)
"""How long a worker may take to end by itself, and by SIGKILL."""

TEMPLATE_STAGES_S = (0.5, 0.4)
"""The same for a template, after its workers. It does nothing then that takes a while."""


@contextmanager
def or_killed(processes: Sequence[Any]) -> Iterator[None]:
    """Kill these processes if an interrupt ends the block, which was to end them."""
    try:
        yield
    except BaseException:
        for process in processes:
            process.kill()
        raise


def stop_processes(processes: Sequence[Any], stages_s: tuple[float, float] = STAGES_S) -> None:
    """Stop processes that were told to exit. Returns when all have ended, or at the end of the last stage."""
    for limit_s in stages_s:
        deadline_s = time.monotonic() + limit_s
        processes = [one for one in processes if not one.wait_end(max(0.0, deadline_s - time.monotonic()))]
        for process in processes:
            process.kill()
