"""Builds batches in this process: for worker threads, and in the thread that waits for them, if there are no workers.

The code is that of worker processes: plan, fetch, collate, encode, decode. So batches and errors are the same, and
batches share no memory with the dataset. If the calling thread seeds the user's generators for a batch, it restores
them afterwards.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import RemoteTraceback, noted, set_cause
from swift_loader.executors.base import Executor, Inbox, ToDo
from swift_loader.executors.failures import describe_work, place_of, rebuild, rebuild_sample, task_of
from swift_loader.executors.process.reader import BatchReader, OnArrival
from swift_loader.executors.wording import rank_in
from swift_loader.metrics.metrics import Metrics
from swift_loader.runtime import is_interrupt
from swift_loader.sampling.plan import Plan, PlanSettings
from swift_loader.scheduler.messages import Answered, Event, NoBatch, Ready, SampleFailed, Send
from swift_loader.scheduler.queues import Limits
from swift_loader.transport import messages
from swift_loader.transport.by_value import NewDefinitions
from swift_loader.transport.messages import Batch
from swift_loader.transport.payload import chosen_threads
from swift_loader.transport.segments import CounterWriter
from swift_loader.transport.slots import HeapStore, SlotStore
from swift_loader.worker.build import BatchBuilder
from swift_loader.worker.failure import BuildError
from swift_loader.worker.seeding import Rng, preserved_generators
from swift_loader.worker.spec import WorkerOptions, WorkerSpec, length_of
from swift_loader.worker.stream import StreamEnd
from swift_loader.worker.torch_worker import TorchIdentity, limited_threads, ordinary_tensors


class LocalBuilder:
    """Builds the batches of one dataset. One thread at a time uses it."""

    def __init__(
        self,
        worker: int,
        dataset: Any,
        num_samples: int,
        spec: WorkerSpec,
        *,
        batch_decoder: Callable[[bytes], Any] | None,
        on_arrival: OnArrival | None,
        metrics: Metrics,
        who: str,
        store: SlotStore,
        identity: TorchIdentity | None = None,
    ) -> None:
        """Prepare to build batches.

        `worker`: its serial number, for the events; also its id, because it is never replaced. `dataset`: map-style; in
        torch mode, what torch accepts. `num_samples`: 0 in torch mode. `batch_decoder` and `on_arrival`: see
        `BatchReader`. `who` builds the batches, for the causes of errors. `store` has the memory of the batches; the
        builder alone uses it.
        `identity`: see `BatchBuilder`. None: in the loop's thread.
        """
        self._worker = worker
        self._definitions = NewDefinitions()
        self._reader = BatchReader(self._definitions, batch_decoder, on_arrival)
        self._builder = BatchBuilder(dataset, num_samples, spec, self._definitions, identity, has_handlers=True)
        self._metrics = metrics
        self._who, self._rank, self._is_worker = who, rank_in(spec), identity is not None
        self._plan = Plan.of(num_samples, spec.plan)
        self._store = store
        self.largest_nbytes = 0
        """Of the batches so far. Any thread may read it."""

    @property
    def counters(self) -> CounterWriter:
        """Show how far the current batch is."""
        return self._builder.samples.counters

    def read_ahead(self, waiting: Callable[[], Iterable[Send]], *, begins_here: bool = False) -> None:
        """Let it know the tasks after the present one. `begins_here`: see `Ahead`."""
        samples = self._builder.samples
        samples.coming = lambda: map(task_of, waiting())
        if samples.ahead is not None:
            samples.ahead.begins_here = begins_here

    def stack_of_read(self) -> str:
        """Return where the read of a mapped dataset is that it waits for; empty if it doesn't. Any thread."""
        return self._builder.samples.ahead.stack() if self._builder.samples.ahead is not None else ""

    def close(self) -> None:
        """Read nothing more for a mapped dataset. Any thread."""
        if self._builder.samples.ahead is not None:
            self._builder.samples.ahead.close()

    def use_plan(self, plan: PlanSettings, resume: bytes | None = None) -> None:
        """Build the batches of another plan from now on. `resume`: see `NewPlan`."""
        self._plan = Plan.of(self._plan.order.num_samples, plan)
        self._builder.samples.use_plan(plan, resume)

    def answer(self, task: Send, building: AbstractContextManager[Any]) -> list[Event]:
        """Build a batch within this context, and decode it. Return its events: its failed samples, then the batch.

        If the user's code raised, they say so. Raises what a signal handler raised.
        """
        self._definitions.clear()
        try:
            with building:
                batch = self._builder.build(self._store, task_of(task))
                memory = self._store.lend(batch.slot, batch.used_nbytes)
            return self._decode(task, batch, memory)
        except StreamEnd:
            return [NoBatch(task)]
        except Exception as error:
            raised = error.__cause__ if isinstance(error, BuildError) else error
            if raised is not None and is_interrupt(raised):
                raise raised from None
            return self.failed(task, error)

    def _decode(self, task: Send, batch: Batch, memory: NDArray[np.uint8]) -> list[Event]:
        started_ns = time.perf_counter_ns()
        answer = Answered(task, self._reader.read(batch, memory))
        answer.snapshot, decode_ns = self._builder.samples.state, time.perf_counter_ns() - started_ns
        answer.arrival = self._metrics.note_arrival(batch, task, self._worker, started_ns, decode_ns)
        answer.build_s = (batch.fetch_ns + batch.collate_ns + batch.encode_ns) / 1e9
        answer.reads_ahead = batch.reads_ahead
        self.largest_nbytes = max(self.largest_nbytes, batch.used_nbytes or batch.meta_nbytes)
        return [*self._sample_failures(task, self._builder.failures), answer]

    def failed(self, task: Send, error: Exception) -> list[Event]:
        """Return the events for what building or decoding raised.

        The loop gets the user's own exception. The end of its chain of causes says where it happened.
        """
        events: list[Event] = []
        if isinstance(error, BuildError):
            events = self._sample_failures(task, error.failures)
            error = self._explain(error, task)
        events.append(Answered(task, error=error))
        return events

    def _sample_failures(self, task: Send, failures: Sequence[messages.SampleFailed]) -> list[Event]:
        events: list[Event] = []
        for failed in failures:
            where = f", {describe_work(task.work, self._plan)}"
            error = rebuild(failed.failure, self._who, self._definitions, where)
            failure = rebuild_sample(failed, task.work, error)
            events.append(SampleFailed(task, failure))
        return events

    def _explain(self, failed: BuildError, task: Send) -> Exception:
        error = failed.__cause__ if isinstance(failed.__cause__, Exception) else failed
        sample = f", dataset index {failed.index}" if failed.index is not None else ""
        note = f". {failed.note}" if failed.note else ""
        last: BaseException = error
        while last.__cause__ is not None:
            last = last.__cause__
        where = f"{failed.stage.value}{sample}, {describe_work(task.work, self._plan)}"
        set_cause(last, RemoteTraceback(f"In {self._who}, {where}{note}"))
        return noted(error, place_of(task.work, self._rank, self._worker if self._is_worker else None, failed.index))


def dataset_of(options: WorkerOptions) -> Any:
    """Return a dataset of this process. The user's generators are put back, and torch has one thread meanwhile."""
    with nullcontext() if options.rng is Rng.NONE else preserved_generators(), limited_threads(1):
        return options.make_dataset()


_WORKER = 0
"""The serial number and the id of the only worker: the calling thread."""


class InlineExecutor(Inbox, Executor):
    """Builds batches in the thread that calls `wait`. It is its own inbox. A fork has a copy of everything."""

    _current: tuple[int, Plan]
    """The generation whose batches are needed, and its plan."""

    def __init__(
        self,
        spec: WorkerSpec,
        metrics: Metrics,
        batch_decoder: Callable[[bytes], Any] | None,
        dataset: Any,
        on_arrival: OnArrival | None = None,
    ) -> None:
        super().__init__()
        self._spec = spec
        self._metrics = metrics
        self._batch_decoder = batch_decoder
        self._on_arrival = on_arrival
        self._dataset = dataset
        self._builder: Any = None
        """What `_build` builds with; None while it is closed."""
        self._events: list[Event] = []
        self._tasks: deque[Send] = deque()

    @property
    def inboxes(self) -> Sequence[Inbox]:
        """No thread takes over while the loop is busy."""
        return [self]

    def start(self) -> None:
        """Measure the dataset and make the builder."""
        num_samples = length_of(self._dataset, self._spec.options.torch)
        self._begin(num_samples)
        self._builder = LocalBuilder(
            _WORKER,
            self._dataset,
            num_samples,
            self._spec,
            batch_decoder=self._batch_decoder,
            on_arrival=self._on_arrival,
            metrics=self._metrics,
            who="the loop's process",
            store=HeapStore(),
        )
        self._builder.read_ahead(partial(islice, self._tasks, 1, 2), begins_here=True)

    def _begin(self, num_samples: int) -> None:
        self.plan = Plan.of(num_samples, self._spec.plan)
        self._current = (0, self.plan)
        self._events.append(Ready(_WORKER, _WORKER))

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Use this plan from this generation on."""
        is_new = self._spec.options.torch is not None or plan.settings != self._current[1].settings
        if self._builder is not None and is_new:
            self._builder.use_plan(plan.settings, (resume or {}).get(_WORKER))
        self._current = (generation, plan)

    def resize(self, num_workers: int, limits: Limits) -> None:  # noqa: ARG002
        """Raise: there are no workers."""
        raise RuntimeError(f"batches are built in the calling thread, so there can't be {num_workers} workers")

    def renew(self) -> list[Any]:
        """Forget the tasks."""
        self._tasks.clear()
        self._events = [Ready(_WORKER, _WORKER)]
        return []

    def carry_out(self, action: ToDo) -> list[Any]:
        """Keep a task for `wait`."""
        assert isinstance(action, Send), f"the calling thread can't be stopped or replaced: {action}"
        self._tasks.append(action)
        return []

    def close(self) -> list[Any]:
        """Release the dataset. Idempotent."""
        builder, self._builder = self._builder, None
        if builder is not None:
            builder.close()
        return []

    # Its inbox --------------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Build the next batch. Return nothing if there is no time or no task. Raises what a signal handler raised."""
        builder = self._builder  # another thread may call close() meanwhile
        if not self._events and self._tasks and builder is not None and timeout_s is None:
            task = self._tasks[0]
            is_needed = task.generation == self._current[0]
            answer: list[Event] = self._build(builder, task) if is_needed else [NoBatch(task)]
            self._tasks.popleft()
            return answer
        events, self._events = self._events, []
        return events

    def _build(self, builder: LocalBuilder, task: Send) -> list[Event]:
        with ordinary_tensors():
            return builder.answer(task, self._building())

    @contextmanager
    def _building(self) -> Iterator[None]:
        keeping = preserved_generators() if self._spec.options.rng is Rng.SAMPLE else nullcontext()
        with keeping, limited_threads(chosen_threads()):
            yield
