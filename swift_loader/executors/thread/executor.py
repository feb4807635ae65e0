"""Builds batches in threads of this process: carries out what the scheduler decides, and reports what happens.

    loop's thread, or the receiver thread    ThreadInbox.wait; carry_out, under the dispatcher's dispatch lock
    worker threads                           fetch, collate, encode, decode

Each thread has a builder of its own, and the dataset is shared unless `dataset_per_worker` is set. No thread can be
killed: `timeout` ends the loop's wait with an error. A thread that hangs stays until the user's code returns.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import Enum
from typing import Any

from swift_loader.errors import LoaderClosed, WorkerStalled
from swift_loader.executors.base import Inbox, ToDo
from swift_loader.executors.local_builder import LocalBuilder, Speaker, dataset_of
from swift_loader.executors.process.deaths import attached
from swift_loader.executors.process.explain import Explainer
from swift_loader.executors.thread.draws import DrawWatch
from swift_loader.executors.thread.heap import RecycledHeap
from swift_loader.executors.thread.inbox import Mailbox
from swift_loader.executors.thread.worker import Surroundings, ThreadWorker
from swift_loader.metrics.metrics import Metrics
from swift_loader.options import DeliveryOptions
from swift_loader.process_owner import ProcessOwner
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.actions import Kill, Send, Stall, TemplateLost, WorkerLost
from swift_loader.scheduler.events import ExecutorFailed, Ready
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.messages import NewPlan
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import WorkerSpec, length_of
from swift_loader.worker.torch_identity import TorchThread

__all__ = ["JOIN_LIMIT_S", "ThreadExecutor"]

JOIN_LIMIT_S = 1.5
"""How long `close` waits for the threads, which finish their batches. Those that hang are left alone."""


class _State(Enum):
    """NEW ─start─► RUNNING ─stop─► STOPPED. `stop` works in each."""

    NEW = "new"
    RUNNING = "running"
    STOPPED = "stopped"


class ThreadExecutor:
    """The worker threads of one loader."""

    grace_s = 0.0
    """Nothing is replaced."""

    def __init__(
        self, spec: WorkerSpec, options: DeliveryOptions, metrics: Metrics, dataset: Any, note: Callable[[str], None]
    ) -> None:
        """Make an executor that isn't started.

        Args:
            spec: How batches are made.
            options: How many workers there are, among others.
            metrics: Counts the stages.
            dataset: The dataset of the first worker, or of all.
            note: Gets warnings for the user. Any thread calls it.
        """
        self.owner = ProcessOwner()
        """A fork of it has none of the threads."""
        self._mailbox = Mailbox()
        self.inboxes: Sequence[Inbox] = [self._mailbox.of_loop, self._mailbox.of_receiver]
        """One thread takes over while the loop is busy, and sends the next tasks."""
        self._spec = spec
        self._options = options
        self._metrics = metrics
        self._dataset = dataset
        self._note = note
        self._explainer: Explainer | None = None
        self._first_plan: Plan | None = None
        self._plans = [NewPlan(0, spec.plan)] * options.num_workers
        """By worker: the plan of the tasks that are sent now, from which generation on, and where its dataset continues
        then. The thread that holds the dispatch lock uses it."""
        self._lock = threading.RLock()
        """Guards the next two. Reentrant: a signal handler may close the loader on the thread that starts it."""
        self._state = _State.NEW
        self._workers: list[ThreadWorker] = []

    # Starting

    def start(self) -> None:
        """Start the threads. With `dataset_per_worker`, it builds the other datasets first.

        Raises:
            Exception: Whatever building a dataset raised.
            LoaderClosed: Another thread has stopped the executor.
        """
        num_samples = length_of(self._dataset, self._spec.options.torch)
        self._first_plan = plan = Plan.of(num_samples, self._spec.plan)
        self._explainer = explainer = Explainer(self._options, plan, Definitions(), 0.0)
        surroundings = Surroundings(self._mailbox.post, explainer.is_needed, self._watching(), self._describe_end)
        datasets = [self._dataset, *(self._another_dataset() for _ in range(1, self._options.num_workers))]
        workers = [
            ThreadWorker(number, self._builder(number, dataset, num_samples), surroundings)
            for number, dataset in enumerate(datasets)
        ]
        with self._lock:
            if self._state is _State.STOPPED:
                raise LoaderClosed("the loader was closed while it started")
            self._state, self._workers = _State.RUNNING, workers
            for worker in workers:
                worker.start()
        self._mailbox.post(Ready(worker.worker_id, worker.worker_id) for worker in workers)

    def _another_dataset(self) -> Any:
        options = self._spec.options
        if not options.dataset_per_worker:
            return self._dataset
        return copy.deepcopy(self._dataset) if options.dataset_class is None else dataset_of(options)

    def _builder(self, worker: int, dataset: Any, num_samples: int) -> LocalBuilder:
        """Return a builder that leaves the random generators alone."""
        spec = replace(self._spec, options=replace(self._spec.options, rng=Rng.NONE))
        who = f"worker {worker} of {self._options.num_workers} (rank {spec.plan.rank}, a thread)"
        return LocalBuilder(
            worker,
            dataset,
            num_samples,
            spec,
            batch_decoder=self._options.batch_decoder,
            metrics=self._metrics,
            speaker=Speaker(who, self._describe),
            store=RecycledHeap(self._options.limits.max_ready_per_worker),
            identity=TorchThread(worker),
        )

    def _watching(self) -> Callable[[], AbstractContextManager[None]]:
        if self._spec.options.rng is not Rng.SAMPLE:
            return nullcontext
        return DrawWatch(self._mailbox.of_loop, self._note).watching

    # What it is

    @property
    def explainer(self) -> Explainer:
        """The words for the workers. Known after `start`."""
        assert self._explainer is not None, "the executor hasn't started"
        return self._explainer

    @property
    def plan(self) -> Plan:
        """The plan that the workers start with. Known after `start`."""
        assert self._first_plan is not None, "the executor hasn't started"
        return self._first_plan

    @property
    def largest_batch_nbytes(self) -> int:
        """Bytes of the largest batch so far; 0 before the first."""
        return max((worker.largest_nbytes for worker in self._workers), default=0)

    # Acting

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Use this plan from this generation on. Batches of earlier generations aren't needed any more."""
        self.explainer.current = (generation, plan)
        points = resume or {}
        if plan.settings != self._plans[0].settings or self._spec.options.torch is not None:
            self._plans = [NewPlan(generation, plan.settings, points.get(number)) for number in range(len(self._plans))]

    def carry_out(self, action: ToDo) -> list[Any]:
        """Send a task. Instead of killing a worker, give up: no thread can be killed."""
        workers = self._workers
        if not workers:  # the loader is being closed
            return []
        if isinstance(action, Send):
            workers[action.worker].send(action, self._plans[action.worker])
        else:
            assert isinstance(action, Kill), f"a worker thread never ends by itself: {action}"
            self._mailbox.post([ExecutorFailed(self._stalled(action.stall, workers[action.worker]))])
        return []

    def _stalled(self, stall: Stall, worker: ThreadWorker) -> WorkerStalled:
        explainer = self.explainer
        return WorkerStalled(
            f"{explainer.who(worker)} {explainer.stall(stall, worker)}, longer than "
            f"timeout={self._options.timeout_s:g} s. A thread can't be killed, so it stays until the dataset's code "
            f"returns. With worker_type='process', it could be killed{attached(traces=worker.stack())}"
        )

    def error_of(self, cause: WorkerLost | Stall | BaseException) -> BaseException:
        """Return the error for the loop."""
        if isinstance(cause, Stall):
            if cause.worker is None:
                return self.explainer.no_worker_error(cause)
            return self._stalled(cause, self._workers[cause.worker])
        assert isinstance(cause, BaseException), f"a worker thread is never lost: {cause}"
        return cause

    def notice_of(self, about: WorkerLost | Stall | TemplateLost) -> str:
        """Return the warning for the user."""
        assert isinstance(about, Stall), f"a worker thread is never lost: {about}"
        explainer = self.explainer
        if about.worker is None:
            return f"{explainer.no_worker(about)}, for {self._options.stall_warning_s:g} s now"
        worker = self._workers[about.worker]
        return f"{explainer.who(worker)} {explainer.stall(about, worker)}{attached(traces=worker.stack())}"

    def _describe(self, task: Send) -> str:
        return self.explainer.batch(task.work, is_trial=not task.generation)

    def _describe_end(self, worker: ThreadWorker, task: Send | None) -> str:
        at_work = "" if task is None else f", at {self._describe(task)},"
        return f"{self.explainer.who(worker)}{at_work}"

    # Stopping

    def stop(self) -> None:
        """Tell the threads to end, and wake whoever waits in the inbox. Any thread. Idempotent."""
        with self._lock:
            self._state = _State.STOPPED
            workers = self._workers
        for worker in workers:
            worker.stop()
        self._mailbox.of_loop.wake()

    def close(self) -> list[Any]:
        """Wait for the threads to end, at most `JOIN_LIMIT_S`, and release the dataset. Idempotent."""
        deadline_s = time.monotonic() + JOIN_LIMIT_S
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.join(max(0.0, deadline_s - time.monotonic()))
        self._dataset = None
        return []

    def __repr__(self) -> str:
        return f"<ThreadExecutor {self._state.value}, {len(self._workers)} threads>"
