"""Builds batches in threads of this process: see `CrewExecutor`.

Each thread has a builder of its own, and the dataset is shared unless `dataset_per_worker` is set. No thread can be
killed: `timeout` ends the loop's wait with an error. A thread that hangs stays until the user's code returns.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from swift_loader.errors import LoaderClosed, SwiftLoaderError, WorkerDied, WorkerStalled
from swift_loader.executors.crew import CrewExecutor, ThreadInbox, WorkerThread
from swift_loader.executors.inline import LocalBuilder, dataset_of
from swift_loader.executors.process.reader import OnArrival
from swift_loader.executors.wording import Explainer, attached, rank_in
from swift_loader.metrics.metrics import Metrics
from swift_loader.options import DeliveryOptions
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler import messages
from swift_loader.scheduler.messages import Event, Send, Stall
from swift_loader.scheduler.queues import Limits
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.messages import NewPlan
from swift_loader.transport.segments import PrivateSlots
from swift_loader.worker.seeding import Rng, keep_to_this_thread, snapshot_generators
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

    def __init__(self, inbox: ThreadInbox, notices: deque[str]) -> None:
        """Begin to watch. Call it on the loop's thread. `inbox` knows whether that thread blocks.

        `notices` gets the warning, on any thread.
        """
        self._inbox = inbox
        self._notices = notices
        self._once = threading.Lock()
        """Held from the warning on."""
        self._has_waited = False
        """Whether a thread has waited for the loop. Others may wait at the same time."""
        snapshot_generators()  # the first call in a process draws, and puts the states back

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Warn if something is drawn in the `with` block."""
        if not self._has_waited:
            self._inbox.first_block.wait(FIRST_WAIT_S)
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
            self._notices.append(_warning(changed))


def _warning(names: list[str]) -> str:
    return (
        f"the dataset draws from {' and '.join(names)}. Worker threads share these generators, so they aren't seeded, "
        f"and what a sample draws differs from run to run. Draw from swift_loader.sample_rng(), or give "
        f"worker_type='process'. rng=None turns this warning off"
    )


class ThreadWorker(WorkerThread):
    """A worker thread that builds batches. It shares the dataset, and nothing else, with other worker threads."""

    place = "a thread"
    """Where it runs."""

    executor: ThreadExecutor

    def __init__(self, executor: ThreadExecutor, serial: int, worker_id: int) -> None:
        super().__init__(executor, serial, worker_id)
        self.slots = PrivateSlots(executor.max_free)
        self._builder: LocalBuilder | None = None
        """None until it is ready."""
        self._waiting: deque[Send] = deque()
        """What is in `tasks`."""
        self._plan_generation = 0
        """The first generation of the builder's plan; 0: the plan that it was made with."""

    @property
    def largest_nbytes(self) -> int:
        """Bytes of its largest batch so far."""
        return 0 if self._builder is None else self._builder.largest_nbytes

    def position_in_batch(self) -> int | None:
        """Return the position of the sample that it is fetching; None if unknown."""
        return None if self._builder is None else self._builder.counters.position_in_batch()

    def stack(self) -> str:
        """Return its stack, and that of the read that it waits for."""
        return f"{super().stack()}\n{self._builder.stack_of_read() if self._builder is not None else ''}".rstrip()

    def stop(self) -> None:
        """Let the thread end after its current task, which waits for no more reads."""
        super().stop()
        if self._builder is not None:
            self._builder.close()

    def send(self, task: Send) -> None:
        """Have the thread build a batch of the plan of now, after those that it has."""
        self._waiting.append(task)
        self.tasks.put((task, self.executor.plans.get(self.worker_id, self.executor.plan_now)))

    def serve(self) -> None:
        """Build batches until None comes. A task is a `Send`, and the plan of which it is; generation 0: the first."""
        keep_to_this_thread()
        task: Send | None = None
        try:
            self._builder = self.executor.builder_of(self)
            self.post([messages.Ready(self.serial, self.worker_id)])
            self._builder.read_ahead(self._waiting.copy)
            for task, plan in iter(self.tasks.get, None):
                self._waiting.popleft()
                self.post(self._answer(self._builder, task, plan))
                task = None  # noqa: PLW2901 - its keys may be large, and the next task may come much later
            self.post([messages.Disconnected(self.serial, self.worker_id)])
        except Exception as error:  # of building a dataset, or ours: those of samples are answers
            self.post([messages.ExecutorFailed(error)])
        except BaseException as error:  # SystemExit of the dataset, above all: the loop must hear of it
            explainer = self.executor.explainer
            at_work = "" if task is None else f", at {explainer.describe(task.work)},"
            died = WorkerDied(
                f"{explainer.who(self)}{at_work} was ended by {error!r}, and a worker thread isn't "
                f"replaced. The dataset's code ended it: look for sys.exit"
            )
            died.__cause__ = error
            self.post([messages.ExecutorFailed(died)])

    def _answer(self, builder: LocalBuilder, task: Send, plan: NewPlan) -> list[Event]:
        if not self.executor.explainer.is_needed(task.generation):
            return [messages.NoBatch(task)]
        if plan.generation != self._plan_generation:
            self._plan_generation = plan.generation
            try:
                builder.use_plan(plan.settings, plan.resume)
            except Exception as error:
                return builder.failed(task, error)
        return builder.answer(task, self.executor.watching())


class ThreadExecutor(CrewExecutor[ThreadWorker]):
    """The worker threads of one loader."""

    def __init__(
        self,
        spec: WorkerSpec,
        options: DeliveryOptions,
        metrics: Metrics,
        dataset: Any,
        notices: deque[str],
        on_arrival: OnArrival | None = None,
    ) -> None:
        """Make an executor that isn't started.

        `dataset`: that of the first worker, or of all. `notices` gets warnings for the user, on any thread.
        `on_arrival`: see `BatchReader`.
        """
        super().__init__("worker", leaves_stalled_out=False)
        self._spec = spec
        self._options = options
        self.explainer = Explainer(options, rank_in(spec))
        """The words for the workers."""
        self.max_free = options.limits.max_ready_per_worker
        """Slots that a worker keeps while no batch is in them."""
        self._metrics = metrics
        self._on_arrival = on_arrival
        self._dataset = dataset
        self._datasets: dict[int, Any] = {}
        """Those of the first workers, by serial number, until they have started."""
        self.plan_now = NewPlan(0, spec.plan)
        """The plan of the tasks that are sent now, and from which generation on. The thread that holds the dispatch
        lock uses this and the next one."""
        self.plans: dict[int, NewPlan] = {}
        """The same with where a worker's dataset continues then, by the worker's id, where that isn't its beginning."""
        self._draws = DrawWatch(self.inboxes[0], notices) if spec.options.rng is Rng.SAMPLE else None

    # Starting

    def start(self) -> None:
        """Start the threads. With `dataset_per_worker`, it builds the other datasets first.

        Raises what building a dataset raised, or `LoaderClosed` if another thread has stopped the executor.
        """
        num_workers = self._options.num_workers
        num_samples = length_of(self._dataset, self._spec.options.torch)
        self.plan = Plan.of(num_samples, self._spec.plan)
        self.explainer.begin(self.plan, Definitions(), 0.0)
        self._datasets = {0: self._dataset, **{serial: self._another_dataset() for serial in range(1, num_workers)}}
        if not self._open(num_workers):
            raise LoaderClosed("the loader was closed while it started")

    def _make(self, serial: int, worker_id: int) -> ThreadWorker:
        return ThreadWorker(self, serial, worker_id)

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

    def builder_of(self, worker: ThreadWorker) -> LocalBuilder:
        """Return a builder that leaves the random generators alone. On the worker's thread: it may build a dataset."""
        spec = replace(self._spec, options=replace(self._spec.options, rng=Rng.NONE))
        return LocalBuilder(
            worker.serial,
            self._datasets.pop(worker.serial) if worker.serial in self._datasets else self._late_dataset(),
            self.plan.order.num_samples,
            spec,
            batch_decoder=self._options.batch_decoder,
            on_arrival=self._on_arrival,
            metrics=self._metrics,
            who=self.explainer.who(worker),
            store=worker.slots,
            identity=TorchThread(worker.worker_id),
        )

    def watching(self) -> AbstractContextManager[None]:
        """Return what surrounds the building of a batch."""
        return nullcontext() if self._draws is None else self._draws.watching()

    # What it is

    @property
    def largest_batch_nbytes(self) -> int:
        """Bytes of the largest batch so far; 0 before the first."""
        return max((worker.largest_nbytes for worker in self._workers.values()), default=0)

    # Acting

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Use this plan from this generation on. Batches of earlier generations aren't needed any more."""
        self.explainer.current = (generation, plan)
        if plan.settings != self.plan_now.settings or self._spec.options.torch is not None:
            self.plan_now = NewPlan(generation, plan.settings)
            self.plans = {number: NewPlan(generation, plan.settings, at) for number, at in (resume or {}).items()}

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
        self._options = self.explainer.options = replace(self._options, num_workers=num_workers)
        self.num_workers = num_workers
        self.max_free = limits.max_ready_per_worker
        for worker in self._workers.values():
            worker.slots.max_free = self.max_free

    def renew(self) -> list[Any]:
        """See `CrewExecutor`. Raises `SwiftLoaderError` if the other threads would share a dataset."""
        options = self._spec.options
        if options.dataset_per_worker and options.dataset_class is None:
            raise SwiftLoaderError(
                "the loop was interrupted while it took a batch, and its threads can't be replaced: with "
                "dataset_per_worker=True, each needs a copy of the dataset, which can't be copied while others use it. "
                "Make a new loader with the state_dict() of this one, or give dataset_class"
            )
        return super().renew()

    # Words

    def _stalled(self, stall: Stall) -> WorkerStalled:
        explainer = self.explainer
        if stall.worker is None:
            return explainer.no_worker_error(stall)
        if (worker := self._workers.get(stall.worker)) is None:  # another thread has closed the loader
            return explainer.no_worker_error(stall)
        return WorkerStalled(
            f"{explainer.who(worker)} {explainer.hang(stall, worker)}. A thread can't be killed, so it stays until the "
            f"dataset's code returns. With worker_type='process', it could be killed{attached(traces=worker.stack())}"
        )

    def notice_of(self, about: messages.WorkerLost | Stall | messages.TemplateLost) -> str:
        """Return the warning for the user."""
        assert isinstance(about, Stall), f"a worker thread is never lost: {about}"
        explainer = self.explainer
        worker = None if about.worker is None else self._workers.get(about.worker)
        if worker is None:
            return f"{explainer.no_worker(about)}, for {self._options.stall_warning_s:g} s now"
        return f"{explainer.who(worker)} {explainer.stall(about, worker)}{attached(traces=worker.stack())}"

    def close(self) -> list[Any]:
        """Wait for the threads to end, at most `JOIN_LIMIT_S`, and release the dataset. Idempotent."""
        super().close()
        self._dataset, self._datasets = None, {}
        return []
