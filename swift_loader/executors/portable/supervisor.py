"""Starts the interpreters of one loader, and stops them.

    OPEN ──stop──► CLOSED

A worker has an id, 0 to n-1, and a serial number. A worker that died is replaced by another one with the same id. All
methods may be called by any thread, and none of them runs code of the user.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from multiprocessing.connection import wait

from swift_loader.errors import LoaderClosed, warn
from swift_loader.executors.handle import Handle
from swift_loader.executors.inboxes import Inboxes
from swift_loader.executors.portable.inbox import Inbox, PortableInboxes, PortableWorker, Posted
from swift_loader.executors.portable.interpreter import Interpreter, Launch, Payload, stop_interpreters
from swift_loader.executors.process.dataset_check import DatasetCheck
from swift_loader.executors.process.deaths import attached, died
from swift_loader.executors.process.memory import WorkerMemory
from swift_loader.executors.running import LocalExecutor
from swift_loader.executors.wording import LOADER_WORDING, Wording
from swift_loader.options import DeliveryOptions
from swift_loader.process_owner import ProcessOwner
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.messages import Death, Ended
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.frames import Kind, Received, unpack_frame
from swift_loader.transport.messages import Failure, FailureStage, Identity, Ready
from swift_loader.transport.payload import Environment, pack_payload
from swift_loader.transport.segments import Segment
from swift_loader.worker.process import refuse_start
from swift_loader.worker.spec import WorkerSpec

EXIT_LIMIT_S = 0.5
"""How much later than the end of its pipe a worker's process may end."""

SPARE_SEGMENTS = 8
"""Per worker, in addition to one per batch in flight: those that the loop holds, and those on their way back."""


class _State(Enum):
    OPEN = "open"
    CLOSED = "closed"
    """No new process starts."""


@dataclass(frozen=True, slots=True)
class FirstBuild:
    """The first worker's message that it has built the dataset, or that setting it up as a worker failed then."""

    num_samples: int
    build_s: float
    """How long that took, with the interpreter's start."""
    message: Received


class PortableSupervisor:
    """Starts the interpreters, replaces those that the scheduler wants replaced, and stops them."""

    def __init__(self, spec: WorkerSpec, options: DeliveryOptions, wording: Wording = LOADER_WORDING) -> None:
        self.spec = spec
        """Sent to the processes when they start."""
        self.options = options
        self.wording = wording
        """For errors and warnings."""
        self._limits = options.limits
        self.owner = ProcessOwner()
        self.definitions = Definitions()
        """The definitions that travel by value, under the numbers that the workers use. Known after `start_first`."""
        self.datasets = DatasetCheck()
        self.workers: dict[int, PortableWorker] = {}
        """By serial number. Replaced as a whole, under the lock, so that any thread may read it."""
        self._lock = threading.RLock()
        """Held while a process starts, so that none is started after `stop`."""
        self._state = _State.OPEN
        self._launch: Launch | None = None
        self._payload: Payload | None = None
        self._num_started = 0
        self._inboxes: PortableInboxes | None = None
        """Who listens to the workers."""
        self._first_build: FirstBuild | None = None
        self._began_s = 0.0
        """When the first interpreter was started."""

    # Starting ---------------------------------------------------------------------------------------------------------

    def start_first(self) -> None:
        """Start the first worker, unless that was done. Returns while it builds the dataset.

        Raises `RuntimeError` if this process is itself a worker that imports the user's module, `EncodeError` if the
        dataset or a function can't be sent.
        """
        self._check_open()
        if self._payload is None:
            refuse_start()
            self._payload, self.definitions = self._make_payload()
            self._launch = Launch.of_this_process()
            self._began_s = time.monotonic()
            self._start(worker_id=0)

    def start_others(self) -> None:
        """Start all workers that weren't started. Returns while they build the dataset."""
        self.start_first()
        for worker_id in range(len(self.workers), self.options.num_workers):
            self._start(worker_id)

    def _make_payload(self) -> tuple[Payload, Definitions]:
        layout, memory, definitions = pack_payload(self.spec, Environment.of_this_process(self.spec.modules))
        return Payload(layout, memory), definitions

    def is_current(self) -> bool:
        """Return whether another start would build the same. The dataset or the environment may have changed."""
        if self._launch is None or self._payload is None or not self._launch.is_current():
            return False
        return self._payload.is_same(self._make_payload()[0])

    def wait_built(
        self, on_wait: Callable[[], None] | None = None, patience_s: float | None = None
    ) -> tuple[int, float]:
        """Start the first worker, unless that was done. Wait until it built the dataset.

        Calls `on_wait` once if the wait takes longer than `patience_s`; None: never. Returns the length of the dataset,
        and the seconds that it took to build it, including the interpreter's start. Raises `WorkerDied` if the worker
        died, or what `start_first` or building the dataset raised.
        """
        built = self.wait_first_build(on_wait, patience_s)
        return built.num_samples, built.build_s

    def wait_first_build(
        self, on_wait: Callable[[], None] | None = None, patience_s: float | None = None
    ) -> FirstBuild:
        """Return the first worker's message; see `wait_built`."""
        self.start_first()
        if self._first_build is None:
            worker = self.workers[0]
            if not wait([worker.channel.end], patience_s) and on_wait is not None:
                on_wait()
            self._first_build = self._read_first(worker)
        return self._first_build

    def _read_first(self, worker: PortableWorker) -> FirstBuild:
        """Read the first worker's answer. Blocks until it comes."""
        received, who = worker.channel.receive(), f"the first worker (pid {worker.process.pid})"
        self._check_open()
        if received is None:
            death = self._death_of(worker)
            terms = self.wording.terms
            raise died(who, death.exit_code, terms.build, stderr=death.stderr, terms=terms)
        frame = unpack_frame(received.data)
        build_s = time.monotonic() - self._began_s
        if frame.kind is not Kind.FAILURE:
            return FirstBuild(Ready.unpack(frame).report.num_samples, build_s, received)
        failure = Failure.unpack(frame)
        if failure.stage is FailureStage.BUILD:
            raise self.wording.failure(failure, who, self.definitions, "")
        return FirstBuild(0, build_s, received)  # only in torch mode, where the length has no meaning

    def watch_all(self, inboxes: PortableInboxes) -> None:
        """Have the inboxes listen to all workers, those that are started later included.

        Raises `LoaderClosed` if no more process starts.
        """
        with self._lock:
            self._check_open()
            self._inboxes = inboxes
            for worker in self.workers.values():
                inboxes.watch(worker)

    def _check_open(self) -> None:
        if self._state is _State.CLOSED:
            raise LoaderClosed("the loader was closed; make a new one")

    @property
    def _max_segments(self) -> int:
        return self._limits.max_of_worker(self.options.num_workers) + SPARE_SEGMENTS

    def _start(self, worker_id: int) -> None:
        """Start a worker with this id."""
        with self._lock:
            self._check_open()
            assert self._launch is not None
            assert self._payload is not None
            serial = self._num_started
            identity = None if self.spec.options.torch is None else Identity(worker_id, self.options.num_workers)
            process = Interpreter(self._launch, serial, self._payload, self._note_end, identity)
            self._num_started += 1
            worker = Handle(worker_id, serial, process.channel, process, WorkerMemory(self._max_segments))
            self.workers = {**self.workers, serial: worker}
            if self._inboxes is not None:
                self._inboxes.watch(worker)

    def _note_end(self, serial: int) -> None:
        """Tell the inboxes that a process has ended. A thread of its interpreter calls this."""
        worker, inboxes = self.workers.get(serial), self._inboxes
        if worker is not None and inboxes is not None:
            for inbox in inboxes.all:
                inbox.note_end(worker)

    def processes(self) -> list[Interpreter]:
        """Return the processes of the workers, by id; without those that are just being replaced."""
        return [one.process for one in sorted(self.workers.values(), key=lambda one: one.worker_id)]

    # Another number of workers ----------------------------------------------------------------------------------------

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Be ready for so many workers. Starts and ends none."""
        self._limits = limits
        self.options = replace(self.options, num_workers=num_workers)
        for worker in self.workers.values():
            worker.memory.max_segments = self._max_segments

    def start_worker(self, worker_id: int) -> None:
        """Start another worker. Returns while it builds the dataset."""
        with suppress(LoaderClosed):
            self._start(worker_id)

    def release(self, worker: PortableWorker) -> list[Segment]:
        """Close a worker that was reaped.

        Returns:
            The worker's memory, see `Handle.close`.
        """
        with self._lock:  # `stop` either has seen the worker, and closes it, or doesn't see it any more
            if self._state is _State.CLOSED:
                return []
            self.workers = {serial: other for serial, other in self.workers.items() if other is not worker}
        return worker.close()

    # Replacing --------------------------------------------------------------------------------------------------------

    def reap(self, worker: PortableWorker) -> None:
        """Find out how a worker ended, which an event tells. Blocks for half a second if its process goes on."""
        assert self._inboxes is not None
        self._inboxes.posted.post(Ended(worker.serial, self._death_of(worker)))

    def dismiss(self, worker: PortableWorker) -> None:
        """Have a worker end that has nothing left to do."""
        worker.process.request_exit()

    def replace_template(self) -> None:
        """Raise an error: it has no templates that could end."""
        raise NotImplementedError

    def _death_of(self, worker: PortableWorker) -> Death:
        process = worker.process
        if not process.wait_end(EXIT_LIMIT_S):
            process.kill()
        return Death(process.exit_code, worker.is_at_work, stderr=process.last_lines())

    # Stopping ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop all processes. Pipes stay open, because other threads may wait for them. Idempotent."""
        with self._lock:
            self._state = _State.CLOSED
            workers = self.workers
        stop_interpreters(worker.process for worker in workers.values())

    def close_processes(self) -> list[Segment]:
        """Close all handles. The processes must have ended, and nobody may listen to them any more. Idempotent.

        Returns:
            The workers' memory, see `Handle.close`.
        """
        return [segment for worker in self.workers.values() for segment in worker.close()]

    def close(self) -> None:
        """Stop all processes and close all handles, if nobody listens to them yet. Idempotent."""
        if self.owner.is_here():
            self.stop()
            self.close_processes()

    def __repr__(self) -> str:
        return f"<PortableSupervisor {self._state.value}, {len(self.workers)} workers>"


# Carries out what the scheduler decides, and reports what happens: on the loop's thread or a receiver thread. They also
# start processes. Two threads for each process send its payload, wait for its end and forward its stderr.

_NOTICE = (
    "each worker is a fresh interpreter that builds its own dataset (start_method='portable'), so starting takes "
    "longer than with the template of Linux"
)


class PortableExecutor(LocalExecutor[PortableSupervisor, PortableWorker, Inbox, Posted]):
    """The workers of one loader. It owns the supervisor, whose first process may be running already."""

    def start(self) -> None:
        """Start the workers. Blocks until the first one has built the dataset.

        Raises `LoaderClosed` if another thread has closed the executor, `WorkerDied` if the first worker died, or what
        building the dataset raised.
        """
        supervisor, options = self._supervisor, self._supervisor.options
        self._log(_NOTICE)
        supervisor.start_others()
        built = supervisor.wait_first_build(self._warn_of_build, options.stall_warning_s)
        plan = Plan.of(built.num_samples, supervisor.spec.plan)
        reader = self._begin_to_run(
            lambda: supervisor.workers,
            plan,
            built.build_s,
            supervisor.definitions,
            supervisor.datasets,
            self._on_segment,
        )
        inboxes = self._inboxes = Inboxes(options, Posted(), partial(Inbox, reader))
        with suppress(FileNotFoundError):  # it has ended since then, which is an event
            event = reader.read(supervisor.workers[0], built.message, inboxes.all[0])
            if event is not None:
                inboxes.posted.post(event)
        try:
            supervisor.watch_all(inboxes)
        except LoaderClosed:  # another thread may have closed the executor before it had these
            inboxes.close()
            raise

    def _warn_of_build(self) -> None:
        stacks = attached(traces=self._supervisor.workers[0].ask_for_stacks())
        warn(f"building the dataset has taken {self._supervisor.options.stall_warning_s:g} s so far{stacks}")
