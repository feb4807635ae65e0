"""The executor without workers, for debugging. It builds batches in the thread that waits for them.

It gives the same bytes and the same errors as worker processes, because it runs the same code: plan, fetch, collate,
encode, decode. If it seeds the user's random generators for a batch, it restores them afterwards.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from swift_loader.errors import RemoteTraceback
from swift_loader.executors.base import Inbox, Outcome, ToDo
from swift_loader.executors.batch_reader import BatchReader
from swift_loader.executors.failures import describe_batch, rebuild, rebuild_sample
from swift_loader.inference_mode import ordinary_tensors
from swift_loader.interrupts import is_interrupt
from swift_loader.metrics import Metrics
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.actions import Send, Stall, TemplateLost, WorkerLost
from swift_loader.scheduler.events import Built, Event, Failed, Ready, SampleFailed, Skipped
from swift_loader.scheduler.work import IndexWork, Work
from swift_loader.transport.by_value import NewDefinitions
from swift_loader.transport.messages import Task
from swift_loader.transport.payload import chosen_threads
from swift_loader.transport.store import HeapStore
from swift_loader.worker.build import BatchBuilder
from swift_loader.worker.failure import BuildError
from swift_loader.worker.generators import preserved_generators
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import WorkerSpec, length_of
from swift_loader.worker.torch_settings import limited_threads

__all__ = ["InlineExecutor"]

_WORKER = 0
"""The serial number and the id of the only worker: the calling thread."""


class InlineExecutor:
    """Builds batches in the thread that calls `wait`. It is its own inbox."""

    owner = None
    """A fork has a copy of everything."""
    largest_batch_nbytes = 0
    """Nothing is in flight."""
    grace_s = 0.0
    """Nothing is replaced."""

    def __init__(
        self, spec: WorkerSpec, metrics: Metrics, batch_decoder: Callable[[bytes], Any] | None, dataset: Any
    ) -> None:
        self.inboxes: Sequence[Inbox] = [self]
        """No thread takes over while the loop is busy."""
        self._spec = spec
        self._metrics = metrics
        self._definitions = NewDefinitions()
        self._reader = BatchReader(self._definitions, batch_decoder)
        self._dataset = dataset
        self._builder: BatchBuilder | None = None
        self._first_plan: Plan | None = None
        self._current: tuple[int, Plan | None] = (0, None)
        """The generation whose batches are needed, and its plan."""
        self._events: list[Event] = []
        self._tasks: deque[Send] = deque()
        self.interrupt: Exception | None = None
        self.is_taking_in = False

    @property
    def plan(self) -> Plan:
        """The plan that it starts with. Known after `start`."""
        assert self._first_plan is not None, "the executor hasn't started"
        return self._first_plan

    def start(self) -> None:
        """Measure the dataset and make the builder."""
        num_samples = length_of(self._dataset)
        self._first_plan = Plan.of(num_samples, self._spec.plan)
        self._current = (0, self._first_plan)
        self._builder = BatchBuilder(
            self._dataset, num_samples, self._spec, self._definitions, is_interrupt=is_interrupt
        )
        self._events.append(Ready(_WORKER, _WORKER))

    def use_plan(self, generation: int, plan: Plan) -> None:
        """Use this plan from this generation on."""
        _, before = self._current
        if self._builder is not None and before is not None and plan.settings != before.settings:
            self._builder.use_plan(plan.settings)
        self._current = (generation, plan)

    def carry_out(self, action: ToDo) -> list[Any]:
        """Keep a task for `wait`."""
        assert isinstance(action, Send), f"the calling thread can't be stopped or replaced: {action}"
        self._tasks.append(action)
        return []

    def error_of(self, cause: WorkerLost | Stall | BaseException) -> BaseException:
        """Return the error for the loop."""
        assert isinstance(cause, BaseException), f"the calling thread can't die or hang: {cause}"
        return cause

    def notice_of(self, about: WorkerLost | Stall | TemplateLost) -> str:
        """Raise: there is nothing to warn of."""
        raise AssertionError(f"the calling thread can't die or hang: {about}")

    def stop(self) -> None:
        """Do nothing: no process runs."""

    def close(self) -> list[Any]:
        """Release the dataset. Idempotent."""
        self._builder = None
        return []

    # Its inbox --------------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> list[Event]:
        """Build the next batch. Return nothing if there is no time or no task.

        Raises:
            Exception: A signal handler raised it. The next call builds the batch.
        """
        builder = self._builder  # another thread may call close() meanwhile
        if not self._events and self._tasks and builder is not None and timeout_s is None:
            task = self._tasks[0]
            is_needed = task.generation == self._current[0]
            answer: list[Event] = self._build(builder, task) if is_needed else [Skipped(_WORKER, task.generation)]
            self.is_taking_in = True  # from here on, an interrupt would lose the answer
            self._tasks.popleft()
            return answer
        self.is_taking_in = bool(self._events)
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """Do nothing: `wait` doesn't block."""

    def sleep(self) -> None:
        """Do nothing: `wait` doesn't block."""

    def _build(self, builder: BatchBuilder, task: Send) -> list[Event]:
        try:
            return self._events_of(builder, task)
        except BuildError as failed:
            if failed.__cause__ is not None and is_interrupt(failed.__cause__):
                raise failed.__cause__ from None
            return [Failed(_WORKER, task.generation, task.sequence, self._explain(failed, task.work))]
        except Exception as error:
            if is_interrupt(error):
                raise
            return [Failed(_WORKER, task.generation, task.sequence, error)]

    def _events_of(self, builder: BatchBuilder, task: Send) -> list[Event]:
        """Build a batch. Return its failed samples, then the batch."""
        self._definitions.clear()
        store, work = HeapStore(), task.work
        indices = work.indices if isinstance(work, IndexWork) else None
        wanted = Task(task.generation, task.sequence, work.epoch, work.step, indices)
        keeping = preserved_generators() if self._spec.options.rng is Rng.SAMPLE else nullcontext()
        with keeping, limited_threads(chosen_threads()), ordinary_tensors():
            built = builder.build(store, wanted)
        decode_started_ns = time.perf_counter_ns()
        with ordinary_tensors():
            batch = self._reader.read(built, store.memory)
        self._metrics.note_batch(built, time.perf_counter_ns() - decode_started_ns)
        events: list[Event] = []
        for failed in builder.failures:
            error = rebuild(failed.failure, "the loop's process", self._definitions, f", {self._describe(work)}")
            failure = rebuild_sample(failed, work.epoch, work.step, error)
            events.append(SampleFailed(_WORKER, task.generation, task.sequence, failed.position, failure))
        events.append(Built(_WORKER, task.generation, task.sequence, Outcome(batch), 0.0))
        return events

    def _explain(self, failed: BuildError, work: Work) -> BaseException:
        """Return the user's own exception. The end of its chain of causes says where it happened."""
        error = failed.__cause__ or failed
        sample = f", dataset index {failed.index}" if failed.index is not None else ""
        note = f". {failed.note}" if failed.note else ""
        last = error
        while last.__cause__ is not None:
            last = last.__cause__
        last.__cause__ = RemoteTraceback(f"While {failed.stage.value}{sample}, {self._describe(work)}{note}")
        return error

    def _describe(self, work: Work) -> str:
        _, plan = self._current
        assert plan is not None
        indices = work.indices if isinstance(work, IndexWork) else plan.batch(work.epoch, work.step).indices.tolist()
        return describe_batch(work.epoch, work.step, indices)

    def __repr__(self) -> str:
        return f"<InlineExecutor{' closed' if self._builder is None else ''}>"
