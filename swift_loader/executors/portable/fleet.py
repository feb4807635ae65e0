"""The workers of one loader that are fresh interpreters, and use nothing that only Linux has."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from swift_loader.errors import LoaderClosed
from swift_loader.executors.fleet import EXIT_LIMIT_S, Fleet
from swift_loader.executors.handle import Handle
from swift_loader.executors.inbox import WorkerInbox
from swift_loader.executors.portable.interpreter import Interpreter, InterpreterLaunch
from swift_loader.executors.process.reader import MessageReader
from swift_loader.scheduler.messages import Death, Ended, Event
from swift_loader.transport.messages import Identity, Received
from swift_loader.transport.payload import Payload, pack_payload
from swift_loader.transport.portable import AnyConnection, new_pipe
from swift_loader.worker.process import refuse_start

# Waits for workers in `multiprocessing.connection.wait`, which every system has.
#
# That can't be told of further pipes while it waits. So the bell also rings when there are other or ended workers.


class PipeInbox(WorkerInbox):
    """The pipes to listen to. Used by one thread at a time."""

    def __init__(self, reader: MessageReader, posted: deque[Event | Handle]) -> None:
        super().__init__(reader, posted)
        self._workers: dict[AnyConnection, Handle] = {}
        """By our end of the pipe. Replaced as a whole, so that any thread may read it."""
        self._ended: deque[Handle] = deque()
        """Workers whose process has ended. Their pipes may not have: what the dataset started may hold them open."""
        self._lock = threading.RLock()  # reentrant: a signal handler may ring on a thread that does
        """Guards replacing `_workers`, and the bell."""
        self._bell, self._clapper = new_pipe()
        self._is_ringing = False
        """Whether the bell's pipe holds a message. It holds at most one."""

    def watch(self, worker: Handle) -> None:
        """Also listen to this worker. Any thread may call it, even while another one waits."""
        with self._lock:
            self._workers = {**self._workers, worker.channel.end: worker}
        self.ring()
        if worker.process.has_ended:
            self.note_end(worker)

    def forget(self, worker: Handle) -> None:
        """Stop listening to a worker. Call it before its pipe is closed. Idempotent and thread-safe."""
        with self._lock:
            self._workers = {end: other for end, other in self._workers.items() if other is not worker}
        self.ring()

    def note_end(self, worker: Handle) -> None:
        """Note that the process of a worker has ended. Any thread."""
        self._ended.append(worker)
        self.ring()

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Return what the workers have sent; see `executors.base.Inbox.wait`."""
        if self.remote is not None and (seen := self.remote.look_at_connection()) is not None:
            return [seen]
        limit_s = None if timeout_s is None else max(0.0, timeout_s)
        events: list[Event] = []
        while True:
            workers = self._workers
            try:
                self.is_waiting = True
                ready: list[Any] = wait([self._bell, *workers], 0 if self._is_woken else limit_s)
                self.is_waiting = False
            except (OSError, ValueError):
                if self.is_closed:  # a signal handler closed it meanwhile
                    return events
                if workers is not self._workers:  # another thread closed the pipe of a worker that is gone
                    continue
                raise
            self._take_in(ready, events)
            if events or self._is_woken or self.is_closed or not ready:
                return events
            limit_s = None if timeout_s is None else 0.0

    def _take_in(self, ready: list[Any], events: list[Event]) -> None:
        """Add what the workers have sent whose pipes are ready, what is left of those that have ended, and the rest."""
        if self._bell in ready:
            with self._lock:
                if self._is_ringing and not self.is_closed:
                    self._bell.recv_bytes()
                    self._is_ringing = False
        for end in ready:
            worker = self._workers.get(end)
            if worker is not None and not self.is_closed:  # another thread may close it while a batch is decoded
                self._read(worker, events, all_of_it=False)
        while self._ended:
            worker = self._ended.popleft()
            if self._workers.get(worker.channel.end) is worker:
                self._read(worker, events, all_of_it=True)
        self._take_posted(events)

    def ring(self) -> None:
        """End the current `wait`, or the next one. Thread-safe. Does nothing once closed."""
        with self._lock:
            if not self._is_ringing and not self.is_closed:
                self._is_ringing = True
                self._clapper.send_bytes(b"!")

    def close(self) -> None:
        """Close the bell. Idempotent."""
        with self._lock, suppress(OSError):
            self.is_closed = True
            self._clapper.close()
            self._bell.close()


# The fleet ------------------------------------------------------------------------------------------------------------


class InterpreterFleet(Fleet):
    """Threads that block look after each process: three for each, see `Interpreter`."""

    _launch: InterpreterLaunch
    _payload: Payload | None = None
    """None before `start_first`."""
    _began_s: float
    """When the first interpreter was started."""
    _first_build: tuple[int, float, Received] | None = None
    """The dataset's length, how long the first build took with the interpreter's start, and the worker's message that
    it has built the dataset, or that setting it up as a worker failed then."""

    @property
    def notice(self) -> str:
        """Why starting takes longer than on Linux."""
        return (
            "each worker is a fresh interpreter that builds its own dataset (start_method='portable'), so starting "
            "takes longer than with the template of Linux"
        )

    def start_first(self) -> None:
        """Start the first worker, unless that was done; see `Fleet`."""
        self.check_open()
        if self._payload is None:
            refuse_start()
            self._payload, self.definitions = pack_payload(self.spec, self.spec.modules)
            self._launch = InterpreterLaunch()
            self._began_s = time.monotonic()
            self._start(0)

    def start_ahead(self) -> None:
        """Start all workers that weren't started. Returns while they build the dataset."""
        self.start_first()
        for worker_id in range(len(self.workers), self.options.num_workers):
            self._start(worker_id)

    def is_current(self) -> bool:
        """Return whether another start would build the same. The dataset or the environment may have changed."""
        return (
            self._payload is not None
            and self._launch.is_current()
            and self._payload.is_same(pack_payload(self.spec, self.spec.modules)[0])
        )

    def wait_built(self, *, warns: bool = False) -> tuple[int, float]:
        """Do the same, and wait until the first worker has built the dataset; see `Fleet`."""
        self.start_first()
        if self._first_build is None:
            worker = self.workers[0]
            if not wait([worker.channel.end], self.options.stall_warning_s if warns else None):
                self.warn_of_build()
            self._first_build = self._read_first(worker)
        return self._first_build[:2]

    def _read_first(self, worker: Handle) -> tuple[int, float, Received]:
        """Read the first worker's answer. Blocks until it comes."""
        received, who = worker.channel.receive(), f"the first worker (pid {worker.process.pid})"
        self.check_open()
        if received is None:
            death = self._death_of(worker)
            raise self.explainer.died(who, death.exit_code, self.explainer.build, stderr=death.stderr)
        build_s = time.monotonic() - self._began_s
        return self.length_in(received.data, who), build_s, received

    def ask_for_stacks(self) -> str:
        """Return the Python stacks of the first worker. Blocks for half a second at most."""
        stacks: str = self.workers[0].process.ask_for_stacks()
        return stacks

    def run(self) -> None:
        """Listen to all workers; see `Fleet`."""
        assert self._reader is not None
        assert self._first_build is not None
        with suppress(FileNotFoundError):  # it has ended since then, which is an event
            event = self._reader.read(self.workers[0], self._first_build[2])
            if event is not None:
                self.post(event)
        self.listen_to_all()

    def start_worker(self, worker_id: int) -> None:
        """Start another worker. Returns while it builds the dataset."""
        with suppress(LoaderClosed):
            self._start(worker_id)

    def _start(self, worker_id: int) -> None:
        with self.lock:
            self.check_open()
            assert self._payload is not None
            identity = None if self.spec.options.torch is None else Identity(worker_id, self.options.num_workers)
            process = Interpreter(self._launch, self.num_started, self._payload, self, identity)
            self.add(self.make_handle(worker_id, process.channel, process))

    def note_news(self, serial: int) -> None:
        """Tell the inboxes that a process has ended. A thread of its interpreter calls this."""
        worker = self.workers.get(serial)
        if worker is not None and self.is_running:
            for inbox in self.inboxes:
                inbox.note_end(worker)

    def make_inbox(self, reader: MessageReader, posted: deque[Event | Handle]) -> PipeInbox:
        """Return an inbox that listens to no worker yet."""
        return PipeInbox(reader, posted)

    # Acting -----------------------------------------------------------------------------------------------------------

    def reap(self, worker: Handle) -> None:
        """Find out how a worker ended, which an event tells. Blocks for half a second if its process goes on."""
        self.post(Ended(worker.serial, self._death_of(worker)))

    def _death_of(self, worker: Handle) -> Death:
        process = worker.process
        if not process.wait_end(EXIT_LIMIT_S):
            process.kill()
        return Death(process.exit_code, worker.is_at_work, stderr=process.last_lines())

    def dismiss(self, worker: Handle) -> None:
        """Have a worker end that has nothing left to do."""
        worker.process.request_exit()
