"""Builds batches in worker processes on every system: carries out what the scheduler decides, reports what happens.

Which thread does what:

    loop's thread, or a receiver thread    Inbox.wait; carry_out, under the dispatcher's dispatch lock; starts processes
    two threads for each process           send its payload and wait for its end; forward its stderr
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from swift_loader.errors import LoaderClosed, warn
from swift_loader.executors.base import ToDo
from swift_loader.executors.batch_reader import BatchReader
from swift_loader.executors.num_receivers import num_receivers
from swift_loader.executors.portable.inbox import Inbox, Inboxes, PortableWorker
from swift_loader.executors.portable.supervisor import PortableSupervisor
from swift_loader.executors.process.deaths import attached
from swift_loader.executors.process.explain import Explainer
from swift_loader.executors.process.reader import MessageReader
from swift_loader.executors.process.resume import ResumePoints
from swift_loader.executors.running import RunningWorkers
from swift_loader.metrics.metrics import Metrics
from swift_loader.process_owner import ProcessOwner
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.actions import (
    Dismiss,
    Kill,
    Reap,
    Release,
    Replace,
    Send,
    Stall,
    Start,
    TemplateLost,
    WorkerLost,
)
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.segments import Segment

_NOTICE = (
    "each worker is a fresh interpreter that builds its own dataset (start_method='portable'), so starting takes "
    "longer than with the template of Linux"
)


class PortableExecutor:
    """The workers of one loader."""

    def __init__(
        self,
        supervisor: PortableSupervisor,
        metrics: Metrics,
        log: Callable[[str], None],
        on_segment: Callable[[Segment], None] | None = None,
    ) -> None:
        """Make an executor that isn't started. It owns the supervisor, whose first worker may be running already.

        `on_segment` gets each segment before the first batch lies in it, and again with each batch. Any thread calls
        it.
        """
        self._supervisor = supervisor
        self._metrics = metrics
        self._log = log
        self._on_segment = on_segment
        self._running: RunningWorkers[PortableWorker] | None = None
        self._inboxes: Inboxes | None = None
        """Made with the running workers."""

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
        explainer = Explainer(options, plan, supervisor.definitions, built.build_s, supervisor.wording)
        batches = BatchReader(supervisor.definitions, options.batch_decoder)
        resumes = ResumePoints()
        reader = MessageReader(batches, supervisor.datasets, explainer, self._metrics, self._on_segment, resumes)
        self._running = RunningWorkers(
            lambda: supervisor.workers,
            plan,
            explainer,
            reader,
            resumes,
            sends_each_plan=supervisor.spec.options.torch is not None,
        )
        inboxes = self._inboxes = Inboxes(num_receivers(options), reader)
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

    # What it is -------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> RunningWorkers[PortableWorker]:
        """The workers, once the dataset is built."""
        assert self._running is not None, "the executor hasn't started"
        return self._running

    @property
    def listening(self) -> Inboxes:
        """The inboxes, once the dataset is built."""
        assert self._inboxes is not None, "the executor hasn't started"
        return self._inboxes

    @property
    def owner(self) -> ProcessOwner:
        """The process that started the workers. A fork of it can't use them."""
        return self._supervisor.owner

    @property
    def inboxes(self) -> Sequence[Inbox]:
        """The loop's inbox, then one for each thread that takes over while the loop is busy."""
        return self.listening.all

    @property
    def plan(self) -> Plan:
        """The plan that the workers start with. Known after `start`."""
        return self.running.plan

    @property
    def largest_batch_nbytes(self) -> int:
        """Bytes of the largest batch that has come from a worker; 0 before the first."""
        return 0 if self._running is None else self._running.reader.largest_batch_nbytes

    @property
    def grace_s(self) -> float:
        """Seconds that replacing a worker may take."""
        return self.running.grace_s

    # Acting -----------------------------------------------------------------------------------------------------------

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Use this plan from this generation on. Batches of earlier generations aren't needed any more."""
        self.running.use_plan(generation, plan, resume)

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Be ready for so many workers from now on."""
        self._supervisor.resize(num_workers, limits)
        options = self._supervisor.options
        self.running.explainer.options = options
        self.listening.grow(num_receivers(options))

    def carry_out(self, action: ToDo) -> list[Segment]:
        """Do what the scheduler decided. The caller holds the dispatch lock.

        Returns:
            Memory of workers. Unlocking and unmapping it takes a while, so drop it where nobody waits.
        """
        if isinstance(action, Send):
            return self.running.send(action)
        if isinstance(action, Start):
            self._supervisor.start_worker(action.worker_id)
            return []
        worker = self.running.get(getattr(action, "worker", -1))
        if worker is None:
            return []
        if isinstance(action, Kill):
            self.running.note_hang(worker, action.stall)
            worker.process.kill()
        elif isinstance(action, Reap):
            self.listening.forget(worker)
            self._supervisor.reap(worker)
        elif isinstance(action, Dismiss):
            worker.process.request_exit()
        elif isinstance(action, Replace):
            return self._supervisor.replace(worker)
        elif isinstance(action, Release):
            return self._supervisor.release(worker)
        return []

    def error_of(self, cause: WorkerLost | Stall | BaseException) -> BaseException:
        """Return the error for the loop."""
        return self.running.error_of(cause)

    def notice_of(self, about: WorkerLost | Stall | TemplateLost) -> str:
        """Return the warning for the user."""
        return self.running.notice_of(about)

    # Stopping ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all processes, and wake whoever waits in the loop's inbox. Any thread. Idempotent."""
        if self._inboxes is not None:
            self._inboxes.all[0].wake()
        self._supervisor.stop()

    def close(self) -> list[Any]:
        """Close all handles. The processes must have ended, and no thread may wait in an inbox. Idempotent."""
        given_up = self._supervisor.close_processes()
        if self._inboxes is not None:
            self._inboxes.close()
        return given_up

    def __repr__(self) -> str:
        return f"<PortableExecutor, {self._supervisor!r}>"
