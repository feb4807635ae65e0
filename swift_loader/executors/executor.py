"""Carries out what the scheduler decides about the workers of a fleet, and finds the words for what happens to them.

On the loop's thread or a receiver thread, which holds the engine's dispatch lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from swift_loader.errors import LoaderClosed, WorkerStalled
from swift_loader.executors.base import Executor, Inbox, ToDo
from swift_loader.executors.failures import keys_of
from swift_loader.executors.fleet import Fleet
from swift_loader.executors.handle import Handle, Hang, ResumePoints
from swift_loader.executors.process.reader import BatchReader, MessageReader, OnArrival, SegmentLock
from swift_loader.executors.wording import GRACE_BUILDS, attached
from swift_loader.metrics.metrics import Metrics
from swift_loader.sampling.plan import Plan, PlanSettings
from swift_loader.sampling.work import key_of
from swift_loader.scheduler import messages
from swift_loader.scheduler.messages import Send, Stall, TemplateLost, WorkerLost
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.messages import Hung
from swift_loader.transport.segments import Segment
from swift_loader.worker.fetch import MAX_REPLACEMENTS, OnError


class WorkerExecutor(Executor):
    """The worker processes of one loader. It owns the fleet, whose first process may be running already."""

    _sent: tuple[int, PlanSettings]
    """The plan of the tasks that are sent now, and the first generation that uses it."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        log: Callable[[str], None],
        notices: deque[str] | None = None,
        page_lock: SegmentLock | None = None,
        on_arrival: OnArrival | None = None,
    ) -> None:
        """Make an executor that isn't started. `log` gets what the user may want to know of the start.

        `notices` gets warnings for the user that come while the loop runs, on any thread. `page_lock`: see
        `MessageReader`. `on_arrival`: see `BatchReader`.
        """
        self.fleet = fleet
        if notices is not None:
            fleet.notices = notices
        self.explainer = fleet.explainer
        self.owner = fleet.owner
        """The process that started the workers. A fork of it can't use them."""
        self.reader: MessageReader | None = None
        """Reads what the workers send. Known after `start`."""
        self._metrics = metrics
        self._log = log
        self._page_lock = page_lock
        self._on_arrival = on_arrival
        self._resumes = ResumePoints()
        """Where the workers' datasets continue. The reader keeps them up to date."""
        self._hung: dict[Hashable, dict[Any, Hung]] = {}
        """By `key_of` of their work and by index, the samples at which workers hung."""

    # What it is -------------------------------------------------------------------------------------------------------

    @property
    def largest_batch_nbytes(self) -> int:
        """Bytes of the largest batch that has come from a worker; 0 before the first."""
        return 0 if self.reader is None else self.reader.largest_batch_nbytes

    @property
    def inboxes(self) -> Sequence[Inbox]:
        """The fleet's: more with more workers."""
        return self.fleet.inboxes

    # Starting ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes. Blocks until the dataset is built.

        Raises `LoaderClosed` if another thread has closed the executor, `WorkerDied`, or what building the dataset
        raised.
        """
        fleet = self.fleet
        fleet.start_ahead()
        num_samples, build_s = fleet.wait_built(warns=True)
        if fleet.notice:
            self._log(fleet.notice)
        self.plan, self._sent = Plan.of(num_samples, fleet.spec.plan), (0, fleet.spec.plan)
        self.explainer.begin(self.plan, fleet.definitions, build_s)
        self.grace_s = GRACE_BUILDS * build_s  # a new build of the dataset may be slower than the first one
        batches = BatchReader(fleet.definitions, fleet.options.batch_decoder, self._on_arrival)
        self.reader = MessageReader(
            batches, fleet.datasets, self.explainer, self._metrics, self._page_lock, self._resumes
        )
        fleet.listen(self.reader)
        try:
            fleet.run()
        except LoaderClosed:  # another thread may have closed the executor before it had the inboxes
            fleet.close_inboxes()
            raise

    # Acting -----------------------------------------------------------------------------------------------------------

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Use this plan from this generation on. Batches of earlier generations aren't needed any more."""
        self.explainer.current = (generation, plan)
        self.fleet.use_generation(generation)
        self._resumes.begin(generation, resume)
        # In torch mode, workers get a plan also if it is the one before: a new iteration begins.
        if plan.settings != self._sent[1] or self.fleet.spec.options.torch is not None:
            self._sent = (generation, plan.settings)

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Be ready for so many workers from now on."""
        self.fleet.resize(num_workers, limits)
        self.explainer.options = self.fleet.options

    def renew(self) -> list[Any]:
        """Kill all workers, and start others."""
        return self.fleet.renew()

    def carry_out(self, action: ToDo) -> list[Segment]:
        """Do what the scheduler decided. Returns memory of workers, see `Executor`."""
        fleet = self.fleet
        if isinstance(action, Send):
            if (worker := fleet.get(action.worker)) is None:  # gone, because the loader is being closed
                return []
            hung = [*self._hung.get(key_of(action.work), {}).values()] if self._hung else ()
            given_up: list[Segment] = worker.send(action, *self._sent, self._resumes, hung)
            for inbox in self.fleet.inboxes if worker.channel.outbox else ():
                inbox.watch_room(worker)
            return given_up
        if isinstance(action, messages.Start):
            fleet.start_worker(action.worker_id)
            return []
        if isinstance(action, messages.ReplaceTemplate):
            fleet.replace_template()
            return []
        fleet = fleet.of(action.worker)
        worker = fleet.get(action.worker)
        if worker is None:
            return []
        if isinstance(action, messages.Kill):
            self._note_hang(worker, action.stall)
            fleet.kill(worker)
        elif isinstance(action, messages.Look):
            worker.look()
        elif isinstance(action, messages.Reap):
            fleet.forget(worker)
            fleet.reap(worker)
        elif isinstance(action, messages.Dismiss):
            fleet.dismiss(worker)
        elif isinstance(action, messages.Release):
            return fleet.release(worker)
        return []

    def _note_hang(self, worker: Handle, stall: Stall) -> None:
        """Note why a worker is about to be killed, and what it is doing."""
        on_error = self.fleet.spec.options.on_error
        position, work = worker.look(), stall.work
        keys = [] if work is None else keys_of(work, self.explainer.current[1])
        is_at_sample, raises = position is not None and position < len(keys), on_error is OnError.RAISE
        text = f"{self.explainer.hang(stall, worker)}, and was killed"
        traces = worker.process.ask_for_stacks(by_force=True)
        why = f"{self.explainer.who(worker)} {text}"
        if work is not None and position is not None and is_at_sample and not raises:
            samples, index = self._hung.setdefault(key_of(work), {}), keys[position]
            num = samples[index].num_replacements + 1 if index in samples else 0
            stall.is_of_sample = num == 0 or (on_error is OnError.REPLACE and num <= MAX_REPLACEMENTS)
            samples[index] = Hung(work.epoch, index, why, num)
        stall.error = WorkerStalled(f"{why}{attached(traces=traces)}")
        worker.hang = Hang(text, traces, is_at_sample and raises)

    # Words ------------------------------------------------------------------------------------------------------------

    def error_of(self, cause: WorkerLost | Stall | BaseException) -> BaseException:
        """Return the error for the loop."""
        if isinstance(cause, WorkerLost):
            worker = self.fleet.get(cause.worker)
            error, told = self.explainer.death(cause, worker), self.fleet.of(cause.worker).explain(worker)
            return type(error)(f"{error}{told}") if told else error
        if not isinstance(cause, Stall):
            return cause
        if cause.worker is None:
            return self.explainer.no_worker_error(cause)
        worker = self.fleet.get(cause.worker)
        what = f"{self.explainer.who(worker)} {self.explainer.hang(cause, worker)}"
        return WorkerStalled(f"{what}{attached(traces=worker.process.ask_for_stacks())}")

    def notice_of(self, about: WorkerLost | Stall | TemplateLost) -> str:
        """Return the warning for the user."""
        explainer = self.explainer
        if isinstance(about, TemplateLost):
            return explainer.template_replacement(about)
        if isinstance(about, WorkerLost):
            worker = self.fleet.get(about.worker)
            return f"{explainer.replacement(about, worker)}{self.fleet.of(about.worker).explain(worker)}"
        if about.worker is None:
            waits = f"{explainer.no_worker(about)}, for {explainer.options.stall_warning_s:g} s now"
            return f"{waits}{self.fleet.explain(None)}"
        worker = self.fleet.get(about.worker)
        stacks = attached(traces=worker.process.ask_for_stacks())
        return f"{explainer.who(worker)} {explainer.stall(about, worker)}{stacks}"

    # Stopping ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all processes, and wake whoever waits in the loop's inbox. Any thread. Idempotent."""
        if self.fleet.inboxes:
            self.fleet.inboxes[0].wake()
        self.fleet.stop()

    def close(self) -> list[Any]:
        """Close all handles. The processes must have ended, and no thread may wait in an inbox. Idempotent."""
        return self.fleet.close_processes()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {self.fleet!r}>"
