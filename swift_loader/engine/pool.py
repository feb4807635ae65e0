"""The processes of an engine: templates, which hold the dataset, and the workers made from them.

One template is forked into all workers; with the start method "spawn", or where the dataset's modules leave threads
behind, each worker has been a template of its own. A worker has a place, 0 to n-1, and a serial number; one that died
is followed by another in the same place, a template by another with the same payload.

All of them are started by one thread, the pool's, which lives as long as they do: the kernel ends them when it ends. It
waits for orders, for what templates have to say, and for what the processes write to stderr, which it passes on.
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
from swift_loader.engine.settings import ProcessSettings, StartMethod
from swift_loader.engine.template import TemplateProcess, WorkerProcess
from swift_loader.engine.witness import Witness
from swift_loader.engine.worker import BatchReader, WorkerHandle
from swift_loader.errors import DatasetMismatch, LoaderClosed, WorkerDied
from swift_loader.transport.channel import Channel
from swift_loader.transport.definitions import Definitions
from swift_loader.transport.descriptors import explained
from swift_loader.transport.messages import Built, Failure
from swift_loader.transport.payload import Environment, PayloadLayout, same_payload, write_payload
from swift_loader.worker.nesting import refuse_nesting
from swift_loader.worker.setup import WorkerSetup

__all__ = ["PoolOwner", "WorkerPool"]

SPARE_SEGMENTS = 8
"""Per worker, beside one for each of its batches in flight: those the loop has, and those on their way back."""

FIRST_WORKERS = 4
"""Forked before the loader starts. The others are forked while these build batches: each takes some ms."""

FORK_LIMIT_S = 30.0
"""A template that doesn't fork within this time hangs, and is replaced."""

JOIN_LIMIT_S = 2.0

EXIT_LIMIT_S = 0.5
"""How long a worker's exit status may lag behind the end of its stream."""


Result = TypeVar("Result")


class PoolState(Enum):
    """OPEN ─► STOPPING ─► STOPPED."""

    OPEN = "open"
    STOPPING = "stopping"
    """No process is started any more; those there are, are being ended."""
    STOPPED = "stopped"


class PoolOwner(Protocol):
    """The engine, as far as the pool knows it. All of it is called by the pool's thread."""

    def on_worker(self, worker: WorkerHandle) -> None:
        """Take note of a worker that has just been started, before it is ready."""
        ...

    def on_worker_death(self, worker: WorkerHandle, *, died_with_template: bool) -> bool:
        """Take note that a worker died; return whether it is to be replaced."""
        ...

    def on_worker_gone(self, worker: WorkerHandle) -> None:
        """Let go of a worker, which is to be closed; its memory stays valid."""
        ...

    def on_template_death(self, error: WorkerDied) -> bool:
        """Take note that the template died, and the workers with it; return whether it is to be replaced."""
        ...

    def on_failure(self, error: BaseException) -> None:
        """Take note that the pool can't go on."""
        ...


class _Stopped(Exception):
    """The pool is being closed: whatever its thread waits for won't come."""


class WorkerPool:
    """Starts the processes, replaces those that die, and stops them."""

    def __init__(self, setup: WorkerSetup, settings: ProcessSettings) -> None:
        self.setup = setup
        """What the processes are told when they start."""
        self.settings = settings
        self._owner_pid = os.getpid()
        self._owner: PoolOwner | None = None
        self._payload: tuple[PayloadLayout, int] | None = None
        """The second is a descriptor, kept so that a later template gets what the first one got."""
        self._launch: Launch | None = None
        """How the first interpreter was started, and so all others."""
        self._building: Future[tuple[Built, float]] | None = None
        self._built: Built | None = None
        """What the first template said of the dataset."""
        self.builds = Builds()
        """What all processes that built the dataset say of it. Used under `builds_lock`, by the pool and the engine."""
        self.builds_lock = threading.Lock()
        self.build_s = 0.0
        """How long that took, with the start of the interpreter."""
        self.definitions = Definitions()
        """What travels by value, as the processes number it."""
        self._templates: tuple[TemplateProcess, ...] = ()
        """Those that hold a dataset. Like `workers` replaced as a whole, so that any thread may read it."""
        self.workers: dict[int, WorkerHandle] = {}
        """By serial number; changed by the pool's thread only, and replaced as a whole."""
        self._num_started = 0
        self._orders: deque[Callable[[], None]] = deque()
        self._pump = Pump()
        self._state = PoolState.OPEN
        self._lock = threading.RLock()
        """Guards the beginning of processes against the end of the pool."""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        """Why the thread does nothing any more."""

    # For whoever starts and stops it; any thread ----------------------------------------------------------------------

    def begin(self) -> None:
        """Start the first template, unless that was done; returns while it builds the dataset.

        Raises:
            RuntimeError: This process is a template, which is importing what it was sent.
            EncodeError: The dataset, or a callable, can't be sent.
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
            raise LoaderClosed("the loader was closed; make a new one to go on")
        self._building = self._order(self._build_first)

    def start_template(self, on_wait: Callable[[], None] | None = None, patience_s: float | None = None) -> int:
        """Start the first template, unless that was done, and return the dataset's length once it is built.

        Args:
            on_wait: Called once if that takes longer than `patience_s`.
            patience_s: Seconds.

        Raises:
            WorkerDied: It ended.
            Exception: What `begin` or building the dataset raised.
        """
        self.begin()
        assert self._building is not None
        built, self.build_s = _answer(self._building, on_wait, patience_s)
        self._built = built
        return built.report.num_samples

    def is_current(self) -> bool:
        """Return whether a pool that began now would build the same: the dataset, or the trainer, may have changed."""
        if self._launch is None or self._payload is None or not self._launch.is_current():
            return False
        layout, descriptor, _ = write_payload(self.setup, Environment.of_this_process(self.setup.modules))
        try:
            return same_payload(self._payload, (layout, descriptor))
        finally:
            os.close(descriptor)

    @property
    def reason_for_own_datasets(self) -> str:
        """Why each worker builds a dataset of its own; empty if it doesn't."""
        return "" if self._built is None else self._built.reason

    @property
    def is_ours(self) -> bool:
        """Whether this process started it; a fork of the trainer has only a copy."""
        return os.getpid() == self._owner_pid

    def start_workers(self, owner: PoolOwner) -> None:
        """Start the first workers, or all if each is an interpreter of its own; returns when their processes exist.

        They needn't be ready by then. From the return on, `owner` is told of what happens, and workers and template are
        replaced.

        Raises:
            WorkerDied: A template ended.
            Exception: What building a dataset raised.
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
        for place in range(FIRST_WORKERS, self.settings.num_workers) if self._forks else ():
            self._submit(partial(self._start_other, place))  # one by one, so that deaths can be seen to in between

    def replace(self, worker: WorkerHandle) -> None:
        """Have a worker replaced that is gone, unless its owner doesn't want it to be; returns at once."""
        self._submit(lambda: self._replace(worker))

    def ask_for_stacks(self) -> str:
        """Return the Python stacks of the template that is building the dataset; blocks for half a second at most."""
        templates = self._templates
        return templates[-1].witness.ask_for_stacks(templates[-1].pid, templates[-1].pidfd) if templates else ""

    def stop(self) -> None:
        """End all processes, by the stop ladder. Descriptors stay open for those who wait on them."""
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
            # Not for ever: whoever closes may hold a lock that the thread waits for, if a signal's handler does it.
            self._thread.join(JOIN_LIMIT_S)

    def close_processes(self) -> None:
        """Give back what belongs to them; they must have ended, and nobody listen to them any more. Idempotent."""
        for worker in self.workers.values():
            worker.close()
        for template in self._templates:
            template.close()
        if self._payload is not None:
            os.close(self._payload[1])
            self._payload = None
        if self._launch is not None:
            self._launch.close()
            self._launch = None
        self._pump.close()

    def close(self) -> None:
        """End all processes and give everything back, if nobody has begun to listen to them. Idempotent."""
        if self.is_ours and not self._pump.is_closed:
            self.stop()
            self.close_processes()

    def _order(self, task: Callable[[], Result]) -> Future[Result]:
        """Have the pool's thread do something; the future has what it returns."""
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
            raise LoaderClosed("the loader was closed; make a new one to go on")
        return answer

    def _submit(self, order: Callable[[], None]) -> bool:
        """Leave an order for the pool's thread; return False if that takes none any more."""
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
                if not self._orders:  # some may have come in while the template was being replaced
                    self._pump.run_once()
        except _Stopped:
            pass
        except BaseException as error:
            self._failure = error
            if self._owner is not None:
                self._owner.on_failure(error)
            self._carry_out_orders()  # whoever waits for one of them gets to know
        # The kernel kills the processes when this thread ends, and so it stays until they have ended by themselves.
        while self._state is not PoolState.STOPPED:
            self._pump.run_once()
            if self._failure is not None:
                self._carry_out_orders()
        with contextlib.suppress(_Stopped):
            self._carry_out_orders()  # whoever waits for one of them is told that it won't be

    def _carry_out_orders(self) -> None:
        while self._orders:
            self._orders.popleft()()

    def _run_until(self, is_done: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Go on taking in until something is done; return False if it isn't in time.

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
        """Return what the first template says, and how long that took, in seconds."""
        began_s = time.monotonic()
        built = self._wait_built(self._add_template())
        with self.builds_lock:
            self.builds.compare(built.report, "the template process")
        return built, time.monotonic() - began_s

    def _add_template(self) -> TemplateProcess:
        assert self._payload is not None
        assert self._launch is not None
        with self._lock:  # so that whoever stops the pool sees the process, or it isn't started
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
        """Replace the template that workers are forked from, if it is gone; the workers are asked for one by one."""
        if self._owner is not None and self._forks:
            self._living_template()

    def _living_template(self) -> TemplateProcess:
        """Return the template that workers are forked from, replaced if need be."""
        while self._templates[0].is_gone:
            self._bury(self._templates[0])
            self._build_again()
        return self._templates[0]

    def _build_again(self) -> TemplateProcess:
        """Return a new template, which may turn out to be gone."""
        template = self._add_template()
        try:
            built = self._wait_built(template)
        except WorkerDied:
            return template
        self._compare(template, built)
        return template

    def _compare(self, template: TemplateProcess, built: Built) -> None:
        """Make sure that a later template has built what the first one has.

        Raises:
            DatasetMismatch: It hasn't.
        """
        who = f"another template process (pid {template.pid})"
        with self.builds_lock:
            differing = self.builds.compare(built.report, who)
        if self._forks and not built.forkable:
            raise DatasetMismatch(
                f"{who} can't be forked, unlike the first one: {built.reason}. What the dataset opens and starts must "
                f"not change while the loader runs; start_method='spawn' starts an interpreter for each worker"
            )
        if differing:
            template.ask_to_verify()
            self._run_until(lambda: template.verdicts is not None or template.is_gone)
            settle(differing, template.verdicts or {}, who)

    def _build_replacement(self) -> TemplateProcess:
        """Return a template that is to become a worker."""
        while (template := self._build_again()).is_gone:
            self._bury(template)
        return template

    def _bury(self, template: TemplateProcess) -> None:
        """Close a template that is gone; raises if it isn't to be replaced."""
        self._check_open()
        error = self._death_of(template)
        if self._owner is None or not self._owner.on_template_death(error):
            raise error
        self._retire(template)

    def _retire(self, template: TemplateProcess) -> None:
        """Close a template that is gone, and forget it."""
        for descriptor in (template.fileno(), template.pidfd, template.witness.fileno()):
            self._pump.unwatch(descriptor)
        with self._lock:  # whoever stops the pool has seen it, and closes it, or doesn't see it any more
            self._check_open()
            self._templates = tuple(other for other in self._templates if other is not template)
        template.close()

    # The pool's thread: workers ---------------------------------------------------------------------------------------

    @property
    def _forks(self) -> bool:
        """Whether workers are forks of one template."""
        forkable = self._built is not None and self._built.forkable
        return forkable and self.settings.start_method is StartMethod.TEMPLATE

    def _fork_places(self, places: Iterable[int]) -> None:
        for place in places:
            self._fork(self._living_template(), place)

    def _start_other(self, place: int) -> None:
        if self._failure is None and self._state is PoolState.OPEN:
            self._fork_places((place,))

    def _convert_all(self) -> None:
        places = range(self.settings.num_workers)
        while len(self._templates) < len(places):  # all interpreters are started before the first is waited for
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
        """Return the worker; None if the template is gone, or had to be killed because it hangs."""
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
        keep = self.settings.limits.max_of_worker + SPARE_SEGMENTS
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
    """Return what the pool's thread returns; call `on_wait` once if that takes longer than `patience_s`."""
    try:
        return answer.result(patience_s)
    except FutureTimeoutError:
        if answer.done():  # the task's own
            raise
    if on_wait is not None:
        on_wait()
    return answer.result()
