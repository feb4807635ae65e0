"""The workers of one loader that are fresh interpreters, and use nothing that only Linux has."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import wait

from swift_loader.errors import LoaderClosed
from swift_loader.executors.fleet import EXIT_LIMIT_S, Fleet
from swift_loader.executors.handle import Handle
from swift_loader.executors.portable.inbox import PipeInbox
from swift_loader.executors.portable.interpreter import Interpreter, InterpreterLaunch
from swift_loader.executors.process.reader import MessageReader
from swift_loader.scheduler.messages import Death, Ended, Event
from swift_loader.transport.messages import Identity, Received
from swift_loader.transport.payload import Payload, pack_payload
from swift_loader.worker.process import refuse_start


class InterpreterFleet(Fleet):
    """Threads that block look after each process: two for each, see `Interpreter`."""

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
            event = self._reader.read(self.workers[0], self._first_build[2], self.inboxes[0])
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
