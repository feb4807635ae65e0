"""The executor without workers, for debugging. It builds batches in the thread that waits for them.

It gives the same bytes and the same errors as worker processes, because it runs the same code; see `local_builder`. If
it seeds the user's random generators for a batch, it restores them afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from swift_loader.executors.base import Inbox, ToDo
from swift_loader.executors.failures import describe_work
from swift_loader.executors.local_builder import LocalBuilder
from swift_loader.metrics.metrics import Metrics
from swift_loader.sampling.plan import Plan
from swift_loader.scheduler.messages import Event, Ready, Send, Skipped, Stall, TemplateLost, WorkerLost
from swift_loader.scheduler.queues import Limits
from swift_loader.scheduler.work import Work
from swift_loader.transport.payload import chosen_threads
from swift_loader.transport.slots import HeapStore
from swift_loader.worker.seeding import Rng, preserved_generators
from swift_loader.worker.spec import WorkerSpec, length_of
from swift_loader.worker.torch_worker import limited_threads, ordinary_tensors

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
        self._spec = spec
        self._metrics = metrics
        self._batch_decoder = batch_decoder
        self._dataset = dataset
        self._builder: Any = None
        """What `_build` builds with; None while it is closed."""
        self._first_plan: Plan | None = None
        self._current: tuple[int, Plan | None] = (0, None)
        """The generation whose batches are needed, and its plan."""
        self._events: list[Event] = []
        self._tasks: deque[Send] = deque()
        self.interrupt: Exception | None = None
        self.is_taking_in = False

    @property
    def inboxes(self) -> Sequence[Inbox]:
        """No thread takes over while the loop is busy."""
        return [self]

    @property
    def plan(self) -> Plan:
        """The plan that it starts with. Known after `start`."""
        assert self._first_plan is not None, "the executor hasn't started"
        return self._first_plan

    def start(self) -> None:
        """Measure the dataset and make the builder."""
        num_samples = length_of(self._dataset, self._spec.options.torch)
        self._first_plan = Plan.of(num_samples, self._spec.plan)
        self._current = (0, self._first_plan)
        self._builder = LocalBuilder(
            _WORKER,
            self._dataset,
            num_samples,
            self._spec,
            batch_decoder=self._batch_decoder,
            metrics=self._metrics,
            who="the loop's process",
            describe=self._describe,
            store=HeapStore(),
        )
        self._events.append(Ready(_WORKER, _WORKER))

    def use_plan(self, generation: int, plan: Plan, resume: Mapping[int, bytes] | None = None) -> None:
        """Use this plan from this generation on."""
        _, before = self._current
        is_new = self._spec.options.torch is not None or (before is not None and plan.settings != before.settings)
        if self._builder is not None and is_new:
            self._builder.use_plan(plan.settings, (resume or {}).get(_WORKER))
        self._current = (generation, plan)

    def resize(self, num_workers: int, limits: Limits) -> None:  # noqa: ARG002
        """Raise: there are no workers."""
        raise RuntimeError(f"batches are built in the calling thread, so there can't be {num_workers} workers")

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

        Raises what a signal handler raised. The next call builds the batch then.
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

    def _build(self, builder: LocalBuilder, task: Send) -> list[Event]:
        with ordinary_tensors():
            return builder.answer(task, self._building())

    @contextmanager
    def _building(self) -> Iterator[None]:
        keeping = preserved_generators() if self._spec.options.rng is Rng.SAMPLE else nullcontext()
        with keeping, limited_threads(chosen_threads()):
            yield

    def _describe(self, work: Work) -> str:
        _, plan = self._current
        assert plan is not None
        return describe_work(work, plan)

    def __repr__(self) -> str:
        return f"<InlineExecutor{' closed' if self._builder is None else ''}>"
