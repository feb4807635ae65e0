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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

from swift_loader.errors import LoaderClosed, WorkerStalled
from swift_loader.executors.base import Inbox, ToDo
from swift_loader.executors.local_builder import LocalBuilder, Speaker, dataset_of
from swift_loader.executors.process.deaths import attached
from swift_loader.executors.process.explain import Explainer
from swift_loader.executors.thread.inbox import Mailbox, ThreadInbox
from swift_loader.executors.thread.worker import Surroundings, ThreadWorker
from swift_loader.metrics.metrics import Metrics
from swift_loader.options import DeliveryOptions
from swift_loader.process_owner import ProcessOwner
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.messages import (
    Death,
    Dismiss,
    Ended,
    Event,
    ExecutorFailed,
    Kill,
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
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.messages import NewPlan
from swift_loader.transport.segments import PrivateSlots
from swift_loader.worker.seeding import Rng, snapshot_generators
from swift_loader.worker.spec import WorkerSpec, length_of
from swift_loader.worker.torch_worker import TorchThread

# Notices that a dataset draws from the global random generators.
#
# Worker threads share them, so no thread can seed them for its sample. A change of their states shows that something
# drew. It was a worker if the loop's thread was blocked meanwhile; else it may have been the loop. So the first batch
# isn't built before the loop's thread waits for it. It waits for the first batch when the loader starts, too.

FIRST_WAIT_S = 0.1
"""How long the first batch waits for the loop's thread to block. A loop that comes later loses so much prefetching."""

_NAMES = ("random", "numpy.random", "torch's default generator")
"""In the order of a snapshot."""


class DrawWatch:
    """Warns once. All worker threads of a loader use it."""

    def __init__(self, inbox: ThreadInbox[Event], note: Callable[[str], None]) -> None:
        """Begin to watch. Call it on the loop's thread. `inbox` knows whether that thread blocks.

        `note` gets the warning, on any thread.
        """
        self._inbox = inbox
        self._note = note
        self._once = threading.Lock()
        """Held from the warning on."""
        self._has_waited = False
        """Whether a thread has waited for the loop. Others may wait at the same time."""
        snapshot_generators()  # the first call in a process draws, and puts the states back

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Warn if something is drawn in the `with` block."""
        if not self._has_waited:
            self._inbox.await_first_block(FIRST_WAIT_S)
            self._has_waited = True
        num_moves = self._inbox.num_moves
        if num_moves % 2 == 0 or self._once.locked():
            yield
            return
        before = snapshot_generators()
        yield
        after = snapshot_generators()
        # A torch that was imported meanwhile is only in `after`.
        changed = [name for name, old, new in zip(_NAMES, before, after, strict=False) if old != new]
        if changed and self._inbox.num_moves == num_moves and self._once.acquire(blocking=False):
            self._note(_warning(changed))

    def __repr__(self) -> str:
        return f"<DrawWatch{' that has warned' if self._once.locked() else ''}>"


def _warning(names: list[str]) -> str:
    return (
        f"the dataset draws from {' and '.join(names)}. Worker threads share these generators, so they aren't seeded, "
        f"and what a sample draws differs from run to run. Draw from swift_loader.sample_rng(), or give "
        f"worker_type='process'. rng=None turns this warning off"
    )


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

        `dataset`: that of the first worker, or of all. `note` gets warnings for the user, on any thread.
        """
        self.owner = ProcessOwner()
        """A fork of it has none of the threads."""
        self._mailbox = Mailbox[Event]()
        self.inboxes: Sequence[Inbox] = [self._mailbox.of_loop, self._mailbox.of_receiver]
        """One thread takes over while the loop is busy, and sends the next tasks."""
        self._spec = spec
        self._options = options
        self._max_free = options.limits.max_ready_per_worker
        """Slots that a worker keeps while no batch is in them."""
        self._metrics = metrics
        self._dataset = dataset
        self._note = note
        self._explainer: Explainer | None = None
        self._first_plan: Plan | None = None
        self._plan = NewPlan(0, spec.plan)
        """The plan of the tasks that are sent now, and from which generation on. The thread that holds the dispatch
        lock uses this and the next one."""
        self._plans: dict[int, NewPlan] = {}
        """The same with where a worker's dataset continues then, by the worker's id, where that isn't its beginning."""
        self._surroundings: Surroundings | None = None
        self._heaps: dict[int, PrivateSlots] = {}
        """By the worker's serial number."""
        self._lock = threading.RLock()
        """Guards the next two. Reentrant: a signal handler may close the loader on the thread that starts it."""
        self._state = _State.NEW
        self._workers: dict[int, ThreadWorker] = {}
        """By serial number."""
        self._num_started = 0

    # Starting

    def start(self) -> None:
        """Start the threads. With `dataset_per_worker`, it builds the other datasets first.

        Raises what building a dataset raised, or `LoaderClosed` if another thread has stopped the executor.
        """
        num_samples = length_of(self._dataset, self._spec.options.torch)
        self._first_plan = plan = Plan.of(num_samples, self._spec.plan)
        self._explainer = explainer = Explainer(self._options, plan, Definitions(), 0.0)
        watching = self._watching()
        self._surroundings = Surroundings(self._mailbox.post, explainer.is_needed, watching, self._describe_end)
        datasets = [self._dataset, *(self._another_dataset() for _ in range(1, self._options.num_workers))]
        with self._lock:
            if self._state is _State.STOPPED:
                raise LoaderClosed("the loader was closed while it started")
            self._state = _State.RUNNING
            for number, dataset in enumerate(datasets):
                self._start_worker(number, lambda dataset=dataset: dataset)  # type: ignore[misc]

    def _start_worker(self, worker_id: int, make_dataset: Callable[[], Any]) -> None:
        """Start a worker, whose thread makes the dataset. Does nothing once the executor is stopped."""
        with self._lock:
            if self._state is not _State.RUNNING:
                return
            assert self._surroundings is not None
            serial, self._num_started = self._num_started, self._num_started + 1
            heap = self._heaps[serial] = PrivateSlots(self._max_free)
            make = partial(self._builder, serial, worker_id, make_dataset, heap)
            worker = ThreadWorker(serial, worker_id, make, self._surroundings)
            self._workers = {**self._workers, serial: worker}
            worker.start()

    def _another_dataset(self) -> Any:
        options = self._spec.options
        if not options.dataset_per_worker:
            return self._dataset
        return copy.deepcopy(self._dataset) if options.dataset_class is None else dataset_of(options)

    def _late_dataset(self) -> Any:
        """Return the dataset of a worker that starts while others run. On its thread, so the loop doesn't wait.

        If it builds one, the user's generators aren't put back: the loop may be drawing from them at the same time.
        """
        options = self._spec.options
        return options.make_dataset() if options.dataset_per_worker else self._dataset

    def _builder(
        self, serial: int, worker_id: int, make_dataset: Callable[[], Any], heap: PrivateSlots
    ) -> LocalBuilder:
        """Return a builder that leaves the random generators alone."""
        spec = replace(self._spec, options=replace(self._spec.options, rng=Rng.NONE))
        who = f"worker {worker_id} of {self._options.num_workers} (rank {spec.plan.rank}, a thread)"
        return LocalBuilder(
            serial,
            make_dataset(),
            self.plan.order.num_samples,
            spec,
            batch_decoder=self._options.batch_decoder,
            metrics=self._metrics,
            speaker=Speaker(who, self._describe),
            store=heap,
            identity=TorchThread(worker_id),
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
        return max((worker.largest_nbytes for worker in self._workers.values()), default=0)

    # Acting

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Use this plan from this generation on. Batches of earlier generations aren't needed any more."""
        self.explainer.current = (generation, plan)
        if plan.settings != self._plan.settings or self._spec.options.torch is not None:
            self._plan = NewPlan(generation, plan.settings)
            self._plans = {number: NewPlan(generation, plan.settings, at) for number, at in (resume or {}).items()}

    def resize(self, num_workers: int, limits: Limits) -> None:
        """Be ready for so many workers from now on.

        Raises `RuntimeError` if another worker would need a copy of the dataset, which others use.
        """
        options = self._spec.options
        if num_workers > self._options.num_workers and options.dataset_per_worker and options.dataset_class is None:
            raise RuntimeError(
                "worker threads can't be added with dataset_per_worker=True and a dataset instance, because it can't "
                "be copied while others use it. Give dataset_class, or leave dataset_per_worker out"
            )
        self._options = replace(self._options, num_workers=num_workers)
        self.explainer.options = self._options
        self._max_free = limits.max_ready_per_worker
        for heap in self._heaps.values():
            heap.max_free = self._max_free

    def carry_out(self, action: ToDo) -> list[Any]:
        """Send a task, start a thread or let one end. Instead of killing a worker, give up: no thread can be killed."""
        if isinstance(action, Send):
            worker = self._workers.get(action.worker)
            if worker is not None:  # else the loader is being closed
                worker.send(action, self._plans.get(worker.worker_id, self._plan))
            return []
        if isinstance(action, Start):
            self._start_worker(action.worker_id, self._late_dataset)
            return []
        assert not isinstance(action, ReplaceTemplate), "there is no template"
        worker = self._workers.get(action.worker)
        if worker is None:
            return []
        if isinstance(action, Kill):
            self._mailbox.post([ExecutorFailed(self._stalled(action.stall, worker))])
        elif isinstance(action, Dismiss):
            worker.dismiss()
        elif isinstance(action, Reap):
            self._mailbox.post([Ended(worker.serial, Death(is_at_work=False))])
        elif isinstance(action, Release):
            self._release(worker)
        return []

    def _release(self, worker: ThreadWorker) -> None:
        """Forget a worker that was dismissed, and whose thread has said so last."""
        worker.join(JOIN_LIMIT_S)
        with self._lock:
            self._workers = {serial: other for serial, other in self._workers.items() if other is not worker}
            del self._heaps[worker.serial]

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
        return self.explainer.batch(task.work)

    def _describe_end(self, worker: ThreadWorker, task: Send | None) -> str:
        at_work = "" if task is None else f", at {self._describe(task)},"
        return f"{self.explainer.who(worker)}{at_work}"

    # Stopping

    def stop(self) -> None:
        """Tell the threads to end, and wake whoever waits in the inbox. Any thread. Idempotent."""
        with self._lock:
            self._state = _State.STOPPED
            workers = self._workers
        for worker in workers.values():
            worker.stop()
        self._mailbox.of_loop.wake()

    def close(self) -> list[Any]:
        """Wait for the threads to end, at most `JOIN_LIMIT_S`, and release the dataset. Idempotent."""
        deadline_s = time.monotonic() + JOIN_LIMIT_S
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.join(max(0.0, deadline_s - time.monotonic()))
        self._dataset = self._surroundings = None
        return []

    def __repr__(self) -> str:
        return f"<ThreadExecutor {self._state.value}, {len(self._workers)} threads>"
