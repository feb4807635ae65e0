"""The processes of an engine: templates, which hold the dataset, and the workers made from them.

All workers are forked from one template. With the start method "spawn", or if the dataset's modules leave threads
behind, each worker is an interpreter that was a template first. A worker has a place, 0 to n-1, and a serial number. A
worker that died is replaced by another in the same place, a template by another with the same payload.

One thread, the pool's, starts all processes. It lives as long as they do, because the kernel kills them when it ends.
It waits for orders, for messages of the templates, and for stderr output of the processes, which it forwards.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from enum import Enum
from functools import partial
from typing import Protocol, TypeVar

from swift_loader.engine.builds import Builds, settle
from swift_loader.engine.failures import died, rebuild
from swift_loader.engine.ladder import stop_processes
from swift_loader.engine.launch import Launch
from swift_loader.engine.pump import Pump
from swift_loader.engine.template import TemplateProcess, WorkerProcess
from swift_loader.engine.witness import Witness
from swift_loader.engine.worker import BatchReader, WorkerHandle
from swift_loader.errors import DatasetMismatch, LoaderClosed, WorkerDied
from swift_loader.options import DeliveryOptions
from swift_loader.transport.channel import Channel
from swift_loader.transport.definitions import Definitions
from swift_loader.transport.descriptors import explained
from swift_loader.transport.messages import Built, Failure
from swift_loader.transport.payload import Environment, PayloadLayout, same_payload, write_payload
from swift_loader.transport.segments import Segment
from swift_loader.worker.nesting import refuse_nesting
from swift_loader.worker.setup import StartMethod, WorkerSetup

__all__ = ["PoolOwner", "WorkerPool"]

SPARE_SEGMENTS = 8
"""Per worker, in addition to one per batch in flight: those that the loop holds, and those on their way back."""

FIRST_WORKERS = 4
"""Forked before the loader starts. The others are forked while these build batches. A fork takes some ms."""

FORK_LIMIT_S = 30.0
"""A template that doesn't fork within this time hangs and is replaced."""

JOIN_LIMIT_S = 2.0

EXIT_LIMIT_S = 0.5
"""How much later than the end of its pipe a worker's exit status may arrive."""


Result = TypeVar("Result")


class PoolState(Enum):
    """OPEN ─► STOPPING ─► STOPPED."""

    OPEN = "open"
    STOPPING = "stopping"
    """No new process starts. The existing ones are being stopped."""
    STOPPED = "stopped"


class PoolOwner(Protocol):
    """The part of the engine that the pool calls, always on the pool's thread."""

    def on_worker(self, worker: WorkerHandle) -> None:
        """Add a worker that has just started and isn't ready yet."""
        ...

    def on_worker_death(self, worker: WorkerHandle, *, died_with_template: bool) -> bool:
        """Handle the death of a worker. Return whether to replace it."""
        ...

    def on_worker_gone(self, worker: WorkerHandle) -> None:
        """Stop using a worker and close it. Its memory stays valid."""
        ...

    def on_template_death(self, error: WorkerDied) -> bool:
        """Handle the death of the template, with which its workers died. Return whether to replace it."""
        ...

    def on_failure(self, error: BaseException) -> None:
        """Handle that the pool failed and does nothing any more."""
        ...


class _Stopped(Exception):
    """The pool is being closed, so what its thread waits for won't come."""


class WorkerPool:
    """Starts the processes, replaces those that die, and stops them."""

    def __init__(self, setup: WorkerSetup, settings: DeliveryOptions) -> None:
        self.setup = setup
        """Sent to the processes when they start."""
        self.settings = settings
        self._owner_pid = os.getpid()
        self._owner: PoolOwner | None = None
        self._payload: tuple[PayloadLayout, int] | None = None
        """The payload and its descriptor, kept so that each later template gets the same."""
        self._launch: Launch | None = None
        """The environment in which all interpreters start."""
        self._building: Future[tuple[Built, float]] | None = None
        self._built: Built | None = None
        """The first template's report on the dataset."""
        self.builds = Builds()
        """The reports of all processes that built the dataset. Pool and engine use it, under `builds_lock`."""
        self.builds_lock = threading.Lock()
        self.build_s = 0.0
        """Seconds that the first template needed, including the start of its interpreter."""
        self.definitions = Definitions()
        """The definitions that travel by value, under the numbers that the processes use."""
        self._templates: tuple[TemplateProcess, ...] = ()
        """The templates that hold a dataset. Replaced as a whole, like `workers`, so that any thread may read it."""
        self.workers: dict[int, WorkerHandle] = {}
        """By serial number. Only the pool's thread changes it, and replaces it as a whole."""
        self._num_started = 0
        self._orders: deque[Callable[[], None]] = deque()
        self._pump = Pump()
        self._state = PoolState.OPEN
        self._lock = threading.RLock()
        """Keeps a process from being started while the pool is stopped."""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        """The error that ended the thread's work."""

    # For whoever starts and stops it; any thread ----------------------------------------------------------------------

    def begin(self) -> None:
        """Start the first template, unless that was done. Returns while it builds the dataset.

        Raises:
            RuntimeError: This process is itself a template that imports the user's module.
            EncodeError: The dataset or a function can't be sent.
        """
        if self._building is not None:
            return
        refuse_nesting()
        layout, descriptor, self.definitions = write_payload(
            self.setup, Environment.of_this_process(self.setup.modules)
        )
        with self._lock:
            is_open = self._state is PoolState.OPEN
            if is_open:
                self._payload = layout, descriptor
                self._launch = Launch.of_this_process()
        if not is_open:
            os.close(descriptor)
            raise LoaderClosed("the loader was closed; make a new one")
        self._building = self._order(self._build_first)

    def start_template(self, on_wait: Callable[[], None] | None = None, patience_s: float | None = None) -> int:
        """Start the first template, unless that was done. Wait until it built the dataset, and return its length.

        Args:
            on_wait: Called once if the wait takes longer than `patience_s`.
            patience_s: Seconds; None: never call `on_wait`.

        Raises:
            WorkerDied: The template died.
            Exception: Whatever `begin` or building the dataset raised.
        """
        self.begin()
        assert self._building is not None
        built, self.build_s = _answer(self._building, on_wait, patience_s)
        self._built = built
        return built.report.num_samples

    def is_current(self) -> bool:
        """Return whether a new pool would build the same. The dataset or the trainer's environment may have changed."""
        if self._launch is None or self._payload is None or not self._launch.is_current():
            return False
        layout, descriptor, _ = write_payload(self.setup, Environment.of_this_process(self.setup.modules))
        try:
            return same_payload(self._payload, (layout, descriptor))
        finally:
            os.close(descriptor)

    @property
    def reason_for_own_datasets(self) -> str:
        """Why each worker builds its own dataset; empty if they share one."""
        return "" if self._built is None else self._built.reason

    @property
    def is_ours(self) -> bool:
        """Whether this process started the pool. A fork of the trainer only has a copy."""
        return os.getpid() == self._owner_pid

    def start_workers(self, owner: PoolOwner) -> None:
        """Start the first workers, or all if each is an interpreter of its own. Returns when their processes exist.

        They needn't be ready by then. From then on, the pool calls `owner` and replaces workers and the template.

        Raises:
            WorkerDied: A template died.
            Exception: Whatever building a dataset raised.
        """

        def start() -> None:
            if self._forks:
                self._fork_places(range(min(FIRST_WORKERS, self.settings.num_workers)))
            else:
                self._convert_all()
            self._owner = owner

        self._order(start).result()

    def start_others(self) -> None:
        """Have the workers started that `start_workers` left; returns at once. The owner is told of each."""
        if self._forks:
            self._submit(partial(self._start_other, FIRST_WORKERS))

    def replace(self, worker: WorkerHandle) -> None:
        """Replace a worker that is gone, unless its owner refuses. Returns at once."""
        self._submit(lambda: self._replace(worker))

    def ask_for_stacks(self) -> str:
        """Return the Python stacks of the template that builds the dataset. Blocks for half a second at most."""
        templates = self._templates
        return templates[-1].witness.ask_for_stacks(templates[-1].pid, templates[-1].pidfd) if templates else ""

    def stop(self) -> None:
        """Stop all processes. Descriptors stay open, because other threads may wait on them."""
        with self._lock:
            self._state = PoolState.STOPPING
            workers, templates = self.workers, self._templates
        self._pump.poke()
        try:
            for worker in workers.values():
                worker.channel.shutdown()
            stop_processes(worker.process.pidfd for worker in workers.values())
            for template in templates:
                template.hang_up()
            stop_processes(template.pidfd for template in templates)
        finally:
            self._state = PoolState.STOPPED
            self._pump.poke()
        if self._thread is not None and self._thread is not threading.current_thread():
            # With a limit: if a signal handler closes the loader, its thread may hold a lock that the pool waits for.
            self._thread.join(JOIN_LIMIT_S)

    def close_processes(self) -> list[Segment]:
        """Close all handles. The processes must have ended, and no thread may listen to them any more. Idempotent.

        Returns:
            The workers' memory, see `WorkerHandle.send`.
        """
        given_up = [segment for worker in self.workers.values() for segment in worker.close()]
        for template in self._templates:
            template.close()
        if self._payload is not None:
            os.close(self._payload[1])
            self._payload = None
        if self._launch is not None:
            self._launch.close()
            self._launch = None
        self._pump.close()
        return given_up

    def close(self) -> None:
        """Stop all processes and close all handles, if no engine listens to them yet. Idempotent."""
        if self.is_ours and not self._pump.is_closed:
            self.stop()
            self.close_processes()

    def _order(self, task: Callable[[], Result]) -> Future[Result]:
        """Run a task on the pool's thread. The future holds its result."""
        answer: Future[Result] = Future()

        def carry_out() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                answer.set_result(task())
            except BaseException as error:
                answer.set_exception(LoaderClosed("the loader was closed") if isinstance(error, _Stopped) else error)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="swift_loader-pool", daemon=True)
            self._thread.start()
        if self._failure is not None:
            raise self._failure
        if not self._submit(carry_out):
            raise LoaderClosed("the loader was closed; make a new one")
        return answer

    def _submit(self, order: Callable[[], None]) -> bool:
        """Queue an order for the pool's thread. Return False if the pool is stopping."""
        with self._lock:
            if self._state is not PoolState.OPEN:
                return False
            self._orders.append(order)
        self._pump.poke()
        return True

    # The pool's thread: waiting ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._state is PoolState.OPEN:
                self._carry_out_orders()
                self._look_after_template()
                if not self._orders:  # orders may have arrived while the template was replaced
                    self._pump.run_once()
        except _Stopped:
            pass
        except BaseException as error:
            self._failure = error
            if self._owner is not None:
                self._owner.on_failure(error)
            self._carry_out_orders()  # so that the waiting threads get the error
        # The kernel kills the processes when this thread ends, so it stays until they have ended by themselves.
        while self._state is not PoolState.STOPPED:
            self._pump.run_once()
            if self._failure is not None:
                self._carry_out_orders()
        with contextlib.suppress(_Stopped):
            self._carry_out_orders()  # so that the waiting threads get an error

    def _carry_out_orders(self) -> None:
        while self._orders:
            self._orders.popleft()()

    def _run_until(self, is_done: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Process events until `is_done()` is true. Return False if that takes longer than `limit_s`.

        Raises:
            _Stopped: The pool is being closed.
        """
        done_in_time = self._pump.run_until(lambda: is_done() or self._state is not PoolState.OPEN, limit_s)
        self._check_open()
        return done_in_time

    def _check_open(self) -> None:
        if self._state is not PoolState.OPEN:
            raise _Stopped

    def _watch_witness(self, witness: Witness) -> None:
        descriptor = witness.fileno()

        def forward() -> None:
            if not witness.forward():
                self._pump.unwatch(descriptor)

        self._pump.watch(descriptor, forward)

    # The pool's thread: templates -------------------------------------------------------------------------------------

    def _build_first(self) -> tuple[Built, float]:
        """Return the first template's report and the seconds that it needed."""
        began_s = time.monotonic()
        built = self._wait_built(self._add_template())
        with self.builds_lock:
            self.builds.compare(built.report, "the template process")
        return built, time.monotonic() - began_s

    def _add_template(self) -> TemplateProcess:
        assert self._payload is not None
        assert self._launch is not None
        with self._lock:  # so that `stop` either sees the process or keeps it from being started
            self._check_open()
            with explained():
                template = TemplateProcess(self._launch)
            self._templates = (*self._templates, template)
        self._watch_witness(template.witness)
        for descriptor in (template.fileno(), template.pidfd):
            self._pump.watch(descriptor, lambda: self._listen_to(template))
        template.send_setup(*self._payload)
        return template

    def _listen_to(self, template: TemplateProcess) -> None:
        template.take_in()
        if template.is_gone:
            for descriptor in (template.fileno(), template.pidfd):
                self._pump.unwatch(descriptor)

    def _wait_built(self, template: TemplateProcess) -> Built:
        self._run_until(lambda: template.answer is not None or template.is_gone)
        if isinstance(template.answer, Failure):
            raise rebuild(template.answer, f"the template process (pid {template.pid})", self.definitions)
        if template.answer is None:
            raise self._death_of(template)
        return template.answer

    def _death_of(self, template: TemplateProcess) -> WorkerDied:
        witness = template.witness
        return died(
            f"the template process (pid {template.pid})",
            template.wait_exit_code(),
            template.reason or "it builds the dataset and starts the workers",
            traces=witness.last_traces(),
            stderr=witness.last_lines(),
        )

    def _look_after_template(self) -> None:
        """Replace the template that workers are forked from, if it is gone. Its workers are replaced one by one."""
        if self._owner is not None and self._forks:
            self._living_template()

    def _living_template(self) -> TemplateProcess:
        """Return the template that workers are forked from. If it is gone, replace it first."""
        while self._templates[0].is_gone:
            self._bury(self._templates[0])
            self._build_again()
        return self._templates[0]

    def _build_again(self) -> TemplateProcess:
        """Start a new template and return it. It may be gone already."""
        template = self._add_template()
        try:
            built = self._wait_built(template)
        except WorkerDied:
            return template
        self._compare(template, built)
        return template

    def _compare(self, template: TemplateProcess, built: Built) -> None:
        """Check that a later template built the same dataset as the first one.

        Raises:
            DatasetMismatch: It didn't.
        """
        who = f"another template process (pid {template.pid})"
        with self.builds_lock:
            differing = self.builds.compare(built.report, who)
        if self._forks and not built.forkable:
            raise DatasetMismatch(
                f"{who} can't be forked, unlike the first one: {built.reason}. Each build of the dataset must open "
                f"the same files and start the same threads. If that isn't possible, give start_method='spawn'"
            )
        if differing:
            template.ask_to_verify()
            self._run_until(lambda: template.verdicts is not None or template.is_gone)
            settle(differing, template.verdicts or {}, who)

    def _build_replacement(self) -> TemplateProcess:
        """Return a new template, which will become a worker."""
        while (template := self._build_again()).is_gone:
            self._bury(template)
        return template

    def _bury(self, template: TemplateProcess) -> None:
        """Close a template that is gone. Raise its error if it must not be replaced."""
        self._check_open()
        error = self._death_of(template)
        if self._owner is None or not self._owner.on_template_death(error):
            raise error
        self._retire(template)

    def _retire(self, template: TemplateProcess) -> None:
        """Remove and close a template that is gone."""
        for descriptor in (template.fileno(), template.pidfd, template.witness.fileno()):
            self._pump.unwatch(descriptor)
        with self._lock:  # `stop` either has seen it, and closes it, or doesn't see it any more
            self._check_open()
            self._templates = tuple(other for other in self._templates if other is not template)
        template.close()

    # The pool's thread: workers ---------------------------------------------------------------------------------------

    @property
    def _forks(self) -> bool:
        """Whether workers are forks of one template."""
        forkable = self._built is not None and self._built.forkable
        return forkable and self.setup.options.start_method is StartMethod.TEMPLATE

    def _fork_places(self, places: Iterable[int]) -> None:
        for place in places:
            self._fork(self._living_template(), place)

    def _start_other(self, place: int) -> None:
        if place < self.settings.num_workers and self._failure is None and self._state is PoolState.OPEN:
            self._fork_places((place,))
            self._submit(partial(self._start_other, place + 1))  # after the deaths that came meanwhile

    def _convert_all(self) -> None:
        places = range(self.settings.num_workers)
        while len(self._templates) < len(places):  # start all interpreters before waiting for the first one
            self._add_template()
        for place, template in zip(places, self._templates, strict=True):
            built = self._wait_built(template)
            if place:
                self._compare(template, built)
            self._convert(template, place)

    def _replace(self, worker: WorkerHandle) -> None:
        if self._failure is not None:
            return
        self._check_open()
        assert self._owner is not None
        process = worker.process
        template = process.template
        if process.pid == template.pid:
            process.exit_code = template.wait_exit_code()
        else:
            self._run_until(lambda: process.exit_code is not None or template.is_gone, EXIT_LIMIT_S)
        died_with_template = process.exit_code is None and template.is_gone and process.pid != template.pid
        if not self._owner.on_worker_death(worker, died_with_template=died_with_template):
            return
        self._let_go(worker)
        if self._forks:
            self._fork(self._living_template(), worker.place)
        else:
            self._convert(self._build_replacement(), worker.place)

    def _let_go(self, worker: WorkerHandle) -> None:
        assert self._owner is not None
        template = worker.process.template
        self._pump.unwatch(worker.process.witness.fileno())
        with self._lock:  # as in `_retire`
            self._check_open()
            self.workers = {serial: other for serial, other in self.workers.items() if other is not worker}
        template.forget(worker.serial)
        self._owner.on_worker_gone(worker)
        if template.pid == worker.process.pid:
            self._retire(template)

    def _fork(self, template: TemplateProcess, place: int) -> None:
        while True:
            serial, witness = self._num_started, Witness()
            try:
                ours, theirs = Channel.pair()
            except BaseException:
                witness.close()
                raise
            try:
                template.request_fork(serial, theirs, witness)
                theirs.close()
                witness.close_their_ends()
                process = self._wait_forked(template, serial)
            except BaseException:
                theirs.close()
                ours.close()
                witness.close()
                raise
            if process is not None:
                self._add_worker(place, ours, process)
                return
            ours.close()
            witness.close()
            template = self._living_template()

    def _wait_forked(self, template: TemplateProcess, serial: int) -> WorkerProcess | None:
        """Return the worker; None if the template is gone, or was killed because it hung."""
        if not self._run_until(lambda: template.has_forked(serial) or template.is_gone, FORK_LIMIT_S):
            template.end(f"it didn't start a worker within {FORK_LIMIT_S:g} s, and was killed")
            self._run_until(lambda: template.is_gone)
        return template.claim(serial)

    def _convert(self, template: TemplateProcess, place: int) -> None:
        """Turn a template into a worker."""
        ours, theirs = Channel.pair()
        try:
            process = template.become_worker(self._num_started, theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._add_worker(place, ours, process)

    def _add_worker(self, place: int, ours: Channel, process: WorkerProcess) -> None:
        keep = self.settings.limits.max_of_worker(self.settings.num_workers) + SPARE_SEGMENTS
        reader = BatchReader(self.definitions, self.settings.batch_decoder)
        worker = WorkerHandle(place, self._num_started, ours, process, reader, keep)
        self._num_started += 1
        if process.pid != process.template.pid:
            self._watch_witness(process.witness)
        self.workers = {**self.workers, worker.serial: worker}
        if self._owner is not None:
            self._owner.on_worker(worker)

    def __repr__(self) -> str:
        return f"<WorkerPool {self._state.value}, {len(self._templates)} templates, {len(self.workers)} workers>"


def _answer(answer: Future[Result], on_wait: Callable[[], None] | None, patience_s: float | None) -> Result:
    """Wait for the result of an order. Call `on_wait` once if that takes longer than `patience_s`."""
    try:
        return answer.result(patience_s)
    except FutureTimeoutError:
        if answer.done():  # the task itself raised it
            raise
    if on_wait is not None:
        on_wait()
    return answer.result()
