"""Starts the processes of one loader, learns how they ended, and stops them.

A worker has an id, 0 to n-1, and a serial number. A worker that died is replaced by another one with the same id.

One thread, the supervisor's, starts all processes. It lives as long as they do, because the kernel kills them when it
ends. It waits for calls, for messages of the templates, and for stderr output of the processes, which it forwards. It
tells nobody directly what it learns: it posts events to the inboxes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial

from swift_loader.errors import LoaderClosed, WorkerDied, warn
from swift_loader.executors.handle import AnyHandle
from swift_loader.executors.inboxes import Inboxes
from swift_loader.executors.process.deaths import ForkWatch, attached
from swift_loader.executors.process.event_loop_thread import EventLoopThread, stop_processes
from swift_loader.executors.process.inbox import Inbox, Posted, ProcessInboxes
from swift_loader.executors.process.memory import WorkerMemory
from swift_loader.executors.process.template import WorkerProcess
from swift_loader.executors.process.templates import Templates
from swift_loader.executors.process.workers import WorkerHandle, Workers
from swift_loader.executors.running import LocalExecutor
from swift_loader.executors.wording import LOADER_WORDING, Wording
from swift_loader.options import DeliveryOptions
from swift_loader.process_owner import ProcessOwner
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.messages import Death, Ended, ExecutorFailed, TemplateEnded
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.segments import Segment
from swift_loader.transport.template_messages import Built
from swift_loader.worker.process import refuse_start
from swift_loader.worker.spec import WorkerSpec

EXIT_LIMIT_S = 0.5
"""How much later than the end of its pipe a worker's exit status may arrive."""


class Supervisor:
    """Starts the processes, replaces those that the scheduler wants replaced, and stops them."""

    def __init__(self, spec: WorkerSpec, options: DeliveryOptions, wording: Wording = LOADER_WORDING) -> None:
        self.spec = spec
        """Sent to the processes when they start."""
        self.options = options
        self.wording = wording
        """For errors and warnings."""
        self.owner = ProcessOwner()
        self._thread = EventLoopThread(self._look_after, self._note_failure)
        self.templates = Templates(spec, self._thread, self._await_replacement, wording)
        self.workers = Workers(options, self._thread, self.templates)
        self._building: Future[tuple[Built, float]] | None = None
        self._inboxes: ProcessInboxes | None = None
        """Where events are posted, once all that fails isn't raised by `wait_built` or `start_workers` any more."""
        self._next_look_s = 0.0
        """When forks of the trainer are looked at again."""
        self._replaceable = threading.Semaphore(0)
        """Counts the templates that died and are to be replaced."""
        self._early: list[WorkerDied] = []
        """How templates died that were replaced before the workers ran."""

    # For whoever starts and stops it; any thread ----------------------------------------------------------------------

    def start_first(self) -> None:
        """Start the first template, unless that was done. Returns while it builds the dataset.

        Raises `RuntimeError` if this process is itself a template that imports the user's module, `EncodeError` if the
        dataset or a function can't be sent.
        """
        if self._building is None:
            refuse_start()
            self.templates.prepare()
            self._building = self._thread.call(partial(self.templates.build_first, self.options.num_workers))

    def is_current(self) -> bool:
        """Return whether another start would build the same. The dataset or the environment may have changed."""
        return self.templates.is_current()

    def wait_built(
        self, on_wait: Callable[[], None] | None = None, patience_s: float | None = None
    ) -> tuple[int, float]:
        """Start the first template, unless that was done. Wait until it built the dataset.

        Calls `on_wait` once if the wait takes longer than `patience_s`; None: never. Returns the length of the dataset,
        and the seconds that it took to build it, including the interpreter's start. Raises `WorkerDied` if the template
        died, or what `start_first` or building the dataset raised.
        """
        self.start_first()
        assert self._building is not None
        if not wait([self._building], patience_s).done and on_wait is not None:
            on_wait()
        self.templates.first, build_s = self._building.result()
        return self.templates.first.report.num_samples, build_s

    def start_workers(self, inboxes: ProcessInboxes) -> None:
        """Start the first workers. Returns when their processes exist. `Workers.start_others` starts the rest.

        They needn't be ready by then. From then on, what happens to the processes is posted as an event. Raises
        `WorkerDied` if a template died, or what building a dataset raised.
        """

        def start() -> None:
            self.workers.start_first(inboxes)
            self._inboxes = inboxes
            for error in self._early:
                inboxes.posted.post(TemplateEnded(error, is_replaced=True))

        self._thread.call(start).result()

    def processes(self) -> list[WorkerProcess]:
        """Return the processes of the workers, by id; without those that are just being replaced."""
        num_before = -1
        while len(self.workers.all) < self.options.num_workers and len(self.workers.all) != num_before:
            num_before = len(self.workers.all)
            try:
                self._thread.call(lambda: None).result()  # runs after the start of another worker
            except LoaderClosed:
                break
        return [one.process for one in sorted(self.workers.all.values(), key=lambda one: one.worker_id)]

    def reap(self, worker: WorkerHandle) -> None:
        """Find out how a worker ended. Returns at once; an event tells."""
        self._thread.submit(lambda: self._reap(worker))

    def _close(self, worker: WorkerHandle, then: Callable[[], None]) -> list[Segment]:
        """Close a worker, and have a function called on the supervisor's thread."""
        with self._thread.lock:  # `stop` either has seen the worker, and closes it, or doesn't see it any more
            if not self._thread.is_open:
                return []
            self.workers.remove(worker)
        given_up = worker.close()  # before its template, which may be the same process, is closed on the other thread
        self._thread.submit(then)
        return given_up

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Be ready for so many workers. Starts and ends none."""
        self.workers.limits = limits
        self.options = self.workers.options = replace(self.options, num_workers=num_workers)
        for worker in self.workers.all.values():
            worker.memory.max_segments = self.workers.max_segments

    def start_worker(self, worker_id: int) -> None:
        """Start another worker. Returns at once."""
        self._thread.submit(partial(self.workers.start_late, worker_id, worker_id + 1))

    def release(self, worker: WorkerHandle) -> list[Segment]:
        """Close a worker that was reaped. Returns at once.

        Returns:
            The worker's memory, see `WorkerHandle.close`.
        """
        if not worker.process.has_ended:  # it was told to end, and has had `EXIT_LIMIT_S`
            worker.process.kill()
        return self._close(worker, lambda: self._forget(worker))

    def dismiss(self, worker: WorkerHandle) -> None:
        """Have a worker end that has nothing left to do."""
        worker.channel.shutdown()

    def replace_template(self) -> None:
        """Replace the template whose end was posted last. Returns at once."""
        self._replaceable.release()
        self._thread.loop.wake()

    def stop(self) -> None:
        """Stop all processes. Descriptors stay open, because other threads may wait on them."""
        with self._thread.lock:
            self._thread.stop()
            workers, templates = self.workers.all, self.templates.all
        try:
            for worker in workers.values():
                worker.channel.shutdown()
            for template in templates:
                template.request_exit()  # it ends when its workers have ended
            stop_processes(worker.process.pidfd for worker in workers.values())
            stop_processes(template.pidfd for template in templates)
        finally:
            self._thread.end()

    def close_processes(self) -> list[Segment]:
        """Close all handles. The processes must have ended, and no thread may listen to them any more. Idempotent.

        Returns:
            The workers' memory, see `WorkerHandle.close`.
        """
        mode, given_up = self.spec.options.torch, list[Segment]()
        for worker in self.workers.all.values():
            if mode is not None and mode.pool is not None and worker.process.has_ended:
                assert isinstance(worker.memory, WorkerMemory)
                mode.pool.add(worker.memory.take_free())
            given_up += worker.close()
        self.templates.close()
        self._thread.loop.close()
        return given_up

    def close(self) -> None:
        """Stop all processes and close all handles, if nobody listens to them yet. Idempotent."""
        if self.owner.is_here() and not self._thread.loop.is_closed:
            self.stop()
            self.close_processes()

    # The supervisor's thread ------------------------------------------------------------------------------------------

    def _note_failure(self, error: BaseException) -> None:
        if self._inboxes is not None:
            self._inboxes.posted.post(ExecutorFailed(error))

    def _look_after(self) -> float | None:
        """Replace the template that workers are forked from, if it is gone. Its workers are replaced one by one.

        Returns in how many seconds to look again; None: when something happens. Raises `ForkHangs` if a worker hangs.
        """
        if self._inboxes is None or not self.templates.are_forkable:
            return None
        self.templates.living()
        if not self.templates.forks_trainer:
            return None
        if time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + ForkWatch.look_s
            for worker in self.workers.all.values():
                self.templates.check_fork(worker.process, f"worker {worker.worker_id}")
        return ForkWatch.look_s

    def _await_replacement(self, error: WorkerDied) -> None:
        """Return when a template that died may be replaced. Raises the error if it is one too many at the start."""
        if self._inboxes is None:
            if (num := len(self._early)) >= self.options.max_restarts:
                raise type(error)(f"{error}\nAs many others ended before it: {num}") if num else error
            self._early.append(error)
            return
        self._inboxes.posted.post(TemplateEnded(error))
        self._thread.run_until(partial(self._replaceable.acquire, blocking=False))

    def _reap(self, worker: WorkerHandle) -> None:
        process, inboxes = worker.process, self._inboxes
        template, diagnostics = process.template, process.diagnostics
        assert inboxes is not None
        inboxes.forget(worker)  # again: if it ended as it was added, an inbox may have got it after the first time
        if process.pid == template.pid:
            process.exit_code = template.wait_exit_code()
        else:
            self._thread.run_until(lambda: process.exit_code is not None or template.is_gone, EXIT_LIMIT_S)
        with_template = process.exit_code is None and template.is_gone and process.pid != template.pid
        self._thread.loop.unwatch(diagnostics.fileno())
        death = Death(
            process.exit_code, worker.is_at_work, with_template, diagnostics.last_traces(), diagnostics.last_lines()
        )
        inboxes.posted.post(Ended(worker.serial, death))

    def _forget(self, worker: WorkerHandle) -> None:
        template = worker.process.template
        template.forget(worker.serial)
        if template.pid == worker.process.pid:
            self.templates.remove(template)

    def __repr__(self) -> str:
        return f"<Supervisor {self._thread!r}, {len(self.templates.all)} templates, {len(self.workers.all)} workers>"


# Carries out what the scheduler decides, and reports what happens: on the loop's thread or a receiver thread, which
# holds the dispatcher's dispatch lock.


class ProcessExecutor(LocalExecutor[Supervisor, AnyHandle, Inbox, Posted]):
    """The workers of one loader. It owns the supervisor, whose first process may be running already."""

    def start(self) -> None:
        """Start template and workers. Blocks until the dataset is built.

        Raises `WorkerDied`, or what building the dataset raised.
        """
        supervisor, options = self._supervisor, self._supervisor.options
        num_samples, build_s = supervisor.wait_built(self._warn_of_template, options.stall_warning_s)
        templates = supervisor.templates
        if templates.first is not None and templates.first.reason:
            self._log(f"each worker builds its own dataset: {templates.first.reason}")
        plan = Plan.of(num_samples, supervisor.spec.plan)
        reader = self._begin_to_run(
            lambda: supervisor.workers.all, plan, build_s, templates.definitions, templates.datasets, self._on_segment
        )
        inboxes = self._inboxes = Inboxes(options, Posted(), partial(Inbox, reader))
        try:
            supervisor.start_workers(inboxes)
        except LoaderClosed:  # another thread may have closed the executor before it had these
            inboxes.close()
            raise
        supervisor.workers.start_others()

    def _warn_of_template(self) -> None:
        stacks = self._supervisor.templates.ask_for_stacks()
        what = "importing what the dataset needs" if "<frozen importlib" in stacks else "building the dataset"
        warn(f"{what} has taken {self._supervisor.options.stall_warning_s:g} s so far{attached(traces=stacks)}")
