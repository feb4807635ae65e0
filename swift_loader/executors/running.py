"""What executors of worker processes have in common, once the dataset is built.

task of the scheduler ──send──► handle of the worker, with the plan if that is new to it
loss or stall ──error_of, notice_of──► words for the loop and the user
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from swift_loader.errors import WorkerStalled
from swift_loader.executors.base import ToDo
from swift_loader.executors.failures import keys_of
from swift_loader.executors.handle import AnyHandle, Hang, ResumePoints
from swift_loader.executors.inboxes import AnInbox, APosted, Inboxes
from swift_loader.executors.process.dataset_check import DatasetCheck
from swift_loader.executors.process.deaths import attached
from swift_loader.executors.process.explain import GRACE_BUILDS, Explainer
from swift_loader.executors.process.reader import BatchReader, MessageReader
from swift_loader.executors.wording import Wording
from swift_loader.metrics.metrics import Metrics
from swift_loader.options import DeliveryOptions
from swift_loader.process_owner import ProcessOwner
from swift_loader.sampling.plan import Plan, PlanSettings
from swift_loader.scheduler.messages import (
    Dismiss,
    Kill,
    Look,
    Reap,
    Release,
    ReplaceTemplate,
    Send,
    Stall,
    Start,
    TemplateLost,
    WorkerLost,
)
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.work import key_of
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.messages import Hung
from swift_loader.transport.segments import Segment
from swift_loader.worker.fetch import MAX_REPLACEMENTS, OnError
from swift_loader.worker.spec import WorkerSpec

AHandle = TypeVar("AHandle", bound=AnyHandle)

OnSegment: TypeAlias = Callable[[Segment], None] | None


class RunningWorkers(Generic[AHandle]):
    """The workers of one executor, whichever processes they are."""

    def __init__(
        self,
        workers: Callable[[], Mapping[int, AHandle]],
        plan: Plan,
        explainer: Explainer,
        reader: MessageReader,
        resumes: ResumePoints,
        *,
        sends_each_plan: bool,
        on_error: OnError,
    ) -> None:
        """`workers` returns those that there are now, by serial number. `plan`: what they start with.

        `resumes`: where their datasets continue. The reader keeps them up to date. `sends_each_plan`: workers get a
        plan also if it is the one before, because a new iteration begins. `on_error`: what becomes of samples at
        which workers hung.
        """
        self.plan = plan
        self.explainer = explainer
        self.reader = reader
        self._workers = workers
        self._resumes = resumes
        self._sends_each_plan = sends_each_plan
        self._on_error = on_error
        self._hung: dict[Hashable, dict[Any, Hung]] = {}
        """By `key_of` of their work and by index, the samples at which workers hung."""
        self._sent: tuple[int, PlanSettings] = (0, plan.settings)
        """The plan of the tasks that are sent now, and the first generation that uses it. The thread that holds the
        dispatch lock uses it."""

    @property
    def grace_s(self) -> float:
        """Seconds that replacing a worker may take: a new build of the dataset may be slower than the first one."""
        return GRACE_BUILDS * self.explainer.build_s

    def get(self, serial: int) -> AHandle | None:
        """Return a worker. None if it is gone, because the loader is being closed."""
        return self._workers().get(serial)

    # Acting; the caller holds the dispatch lock -----------------------------------------------------------------------

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None) -> None:
        """Use this plan from this generation on. Batches of earlier generations aren't needed any more."""
        self.explainer.current = (generation, plan)
        self._resumes.begin(generation, resume)
        if plan.settings != self._sent[1] or self._sends_each_plan:
            self._sent = (generation, plan.settings)

    def send(self, task: Send) -> list[Segment]:
        """Send a task. Return memory of the worker, see `Handle.send`."""
        worker = self.get(task.worker)
        hung = [*self._hung.get(key_of(task.work), {}).values()] if self._hung else ()
        return [] if worker is None else worker.send(task, *self._sent, self._resumes, hung)

    def note_hang(self, worker: AHandle, stall: Stall) -> None:
        """Note why a worker is about to be killed, and what it is doing. Idempotent: an interrupt may repeat it."""
        if worker.hang is not None:
            return
        position, work = worker.look(), stall.work
        keys = [] if work is None else keys_of(work, self.explainer.current[1])
        is_at_sample, raises = position is not None and position < len(keys), self._on_error is OnError.RAISE
        text, traces = self.explainer.hang(stall, worker), worker.ask_for_stacks(by_force=True)
        why = f"{self.explainer.who(worker)} {text}"
        if work is not None and position is not None and is_at_sample and not raises:
            samples, index = self._hung.setdefault(key_of(work), {}), keys[position]
            num = samples[index].num_replacements + 1 if index in samples else 0
            stall.is_of_sample = num == 0 or (self._on_error is OnError.REPLACE and num <= MAX_REPLACEMENTS)
            samples[index] = Hung(work.epoch, index, why, num)
        stall.error = WorkerStalled(f"{why}{attached(traces=traces)}")
        worker.hang = Hang(text, traces, is_at_sample and raises)

    # Words ------------------------------------------------------------------------------------------------------------

    def error_of(self, cause: WorkerLost | Stall | BaseException) -> BaseException:
        """Return the error for the loop."""
        if isinstance(cause, WorkerLost):
            return self.explainer.death(cause, self._workers()[cause.worker])
        if not isinstance(cause, Stall):
            return cause
        if cause.worker is None:
            return self.explainer.no_worker_error(cause)
        worker = self._workers()[cause.worker]
        return self.explainer.stall_error(cause, worker, attached(traces=worker.ask_for_stacks()))

    def notice_of(self, about: WorkerLost | Stall | TemplateLost) -> str:
        """Return the warning for the user."""
        explainer = self.explainer
        if isinstance(about, TemplateLost):
            return explainer.template_replacement(about)
        if isinstance(about, WorkerLost):
            return explainer.replacement(about, self._workers()[about.worker])
        if about.worker is None:
            return f"{explainer.no_worker(about)}, for {explainer.options.stall_warning_s:g} s now"
        worker = self._workers()[about.worker]
        stacks = attached(traces=worker.ask_for_stacks())
        return f"{explainer.who(worker)} {explainer.stall(about, worker)}{stacks}"


class _Supervisor(Protocol):
    """What starts the processes of an executor."""

    owner: ProcessOwner
    spec: WorkerSpec
    wording: Wording

    @property
    def options(self) -> DeliveryOptions: ...


ASupervisor = TypeVar("ASupervisor", bound=_Supervisor)


class WorkersExecutor(Generic[ASupervisor, AHandle]):
    """What such executors have in common: all of `Executor` but starting, acting and stopping."""

    def __init__(
        self, supervisor: ASupervisor, metrics: Metrics, log: Callable[[str], None], on_segment: OnSegment
    ) -> None:
        """Begin an executor that isn't started. `log` gets what happens. `on_segment`: see `MessageReader`."""
        self._supervisor = supervisor
        self._metrics = metrics
        self._log = log
        self._on_segment = on_segment
        self._running: RunningWorkers[AHandle] | None = None

    def _begin_to_run(
        self,
        workers: Callable[[], Mapping[int, AHandle]],
        plan: Plan,
        build_s: float,
        definitions: Definitions,
        datasets: DatasetCheck,
        on_segment: OnSegment,
    ) -> MessageReader:
        """Make what exists once the dataset is built. Return what reads the workers' messages.

        `workers`: see `RunningWorkers`. `plan`: what they start with. `build_s`: seconds that the first build took.
        `datasets` compares what all workers have built.
        """
        supervisor, options = self._supervisor, self._supervisor.options
        explainer = Explainer(options, plan, definitions, build_s, supervisor.wording)
        resumes = ResumePoints()
        reader = MessageReader(
            BatchReader(definitions, options.batch_decoder), datasets, explainer, self._metrics, on_segment, resumes
        )
        given = supervisor.spec.options
        self._running = RunningWorkers(
            workers,
            plan,
            explainer,
            reader,
            resumes,
            sends_each_plan=given.torch is not None,
            on_error=given.on_error,
        )
        return reader

    @property
    def owner(self) -> ProcessOwner:
        """The process that started the workers. A fork of it can't use them."""
        return self._supervisor.owner

    @property
    def running(self) -> RunningWorkers[AHandle]:
        """The workers, once the dataset is built."""
        assert self._running is not None, "the executor hasn't started"
        return self._running

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

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Use this plan from this generation on. Batches of earlier generations aren't needed any more."""
        self.running.use_plan(generation, plan, resume)

    def error_of(self, cause: WorkerLost | Stall | BaseException) -> BaseException:
        """Return the error for the loop."""
        return self.running.error_of(cause)

    def notice_of(self, about: WorkerLost | Stall | TemplateLost) -> str:
        """Return the warning for the user."""
        return self.running.notice_of(about)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {self._supervisor!r}>"


class _LocalSupervisor(_Supervisor, Protocol):
    """Starts processes on this machine."""

    def resize(self, num_workers: int, limits: Limits) -> None: ...
    def start_worker(self, worker_id: int) -> None: ...
    def reap(self, worker: Any) -> None: ...
    def dismiss(self, worker: Any) -> None: ...
    def replace_template(self) -> None: ...
    def release(self, worker: Any) -> list[Segment]: ...
    def stop(self) -> None: ...
    def close_processes(self) -> list[Segment]: ...


ALocalSupervisor = TypeVar("ALocalSupervisor", bound=_LocalSupervisor)


class LocalExecutor(WorkersExecutor[ALocalSupervisor, AHandle], Generic[ALocalSupervisor, AHandle, AnInbox, APosted]):
    """What executors of processes on this machine have in common."""

    _inboxes: Inboxes[AnInbox, APosted] | None = None
    """Made with the running workers."""

    @property
    def listening(self) -> Inboxes[AnInbox, APosted]:
        """The inboxes, once the dataset is built."""
        assert self._inboxes is not None, "the executor hasn't started"
        return self._inboxes

    @property
    def inboxes(self) -> Sequence[AnInbox]:
        """The loop's inbox, then one for each thread that takes over while the loop is busy."""
        return self.listening.all

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Be ready for so many workers from now on."""
        self._supervisor.resize(num_workers, limits)
        self.running.explainer.options = self._supervisor.options
        self.listening.grow(self._supervisor.options)

    def carry_out(self, action: ToDo) -> list[Segment]:
        """Do what the scheduler decided. The caller holds the dispatch lock. See `Executor`."""
        if isinstance(action, Send):
            return self.running.send(action)
        if isinstance(action, Start):
            self._supervisor.start_worker(action.worker_id)
            return []
        if isinstance(action, ReplaceTemplate):
            self._supervisor.replace_template()
            return []
        worker = self.running.get(action.worker)
        if worker is None:
            return []
        if isinstance(action, Kill):
            self.running.note_hang(worker, action.stall)
            worker.process.kill()
        elif isinstance(action, Look):
            worker.look()
        elif isinstance(action, Reap):
            self.listening.forget(worker)
            self._supervisor.reap(worker)
        elif isinstance(action, Dismiss):
            self._supervisor.dismiss(worker)
        elif isinstance(action, Release):
            return self._supervisor.release(worker)
        return []

    def stop(self) -> None:
        """End all processes, and wake whoever waits in the loop's inbox. Any thread. Idempotent."""
        if self._inboxes is not None:
            self._inboxes.all[0].wake()
        self._supervisor.stop()

    def close(self) -> list[Segment]:
        """Close all handles. The processes must have ended, and no thread may wait in an inbox. Idempotent."""
        given_up = self._supervisor.close_processes()
        if self._inboxes is not None:
            self._inboxes.close()
        return given_up
