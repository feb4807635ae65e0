"""The engine without workers, for debugging. It builds batches in the thread that calls `next`.

It gives the same bytes and the same errors as worker processes, because it runs the same code: plan, fetch, collate,
encode, decode. If it seeds the user's random generators for a batch, it restores them afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from typing import Any

from swift_loader.bad_samples import SampleFailure
from swift_loader.engine.base import Delivery
from swift_loader.engine.failures import describe_batch, rebuild_samples
from swift_loader.engine.interrupts import is_interrupt
from swift_loader.engine.worker import BatchReader
from swift_loader.errors import LoaderClosed, RemoteTraceback
from swift_loader.inference_mode import ordinary_tensors
from swift_loader.metrics import Metrics
from swift_loader.plan import Plan, PlanSettings
from swift_loader.transport.definitions import NewDefinitions
from swift_loader.transport.messages import Task
from swift_loader.transport.payload import chosen_threads
from swift_loader.transport.store import HeapStore
from swift_loader.worker.build import BatchBuilder
from swift_loader.worker.failure import BuildError
from swift_loader.worker.generators import preserved_generators
from swift_loader.worker.seeding import Rng
from swift_loader.worker.setup import WorkerSetup, length_of
from swift_loader.worker.torch_settings import limited_threads

__all__ = ["InlineEngine"]


class InlineState(Enum):
    """NEW ─► RUNNING ─► CLOSED."""

    NEW = "new"
    RUNNING = "running"
    CLOSED = "closed"


class InlineEngine:
    """Builds batches in the calling thread."""

    def __init__(
        self, setup: WorkerSetup, metrics: Metrics, batch_decoder: Callable[[bytes], Any] | None, dataset: Any
    ) -> None:
        self._setup = setup
        self._metrics = metrics
        self._state = InlineState.NEW
        self._definitions = NewDefinitions()
        self._reader = BatchReader(self._definitions, batch_decoder)
        self._dataset = dataset
        self._builder: BatchBuilder | None = None
        self._plan: Plan | None = None
        self._position = (0, 0)

    @property
    def num_samples(self) -> int:
        """Length of the dataset. Known after `start`."""
        assert self._plan is not None, "the engine hasn't started"
        return self._plan.order.num_samples

    @property
    def largest_batch_nbytes(self) -> int:
        """Return 0: nothing is in flight."""
        return 0

    def start(self) -> None:
        """Measure the dataset and make the builder."""
        num_samples = length_of(self._dataset)
        self._plan = Plan.of(num_samples, self._setup.plan)
        self._builder = BatchBuilder(
            self._dataset, num_samples, self._setup, self._definitions, is_interrupt=is_interrupt
        )
        self._state = InlineState.RUNNING

    def seek(self, epoch: int, step: int, plan: PlanSettings) -> None:
        """Make `next_batch` continue at this batch of this plan."""
        assert self._plan is not None
        assert self._builder is not None
        if plan != self._plan.settings:
            self._plan = Plan.of(self.num_samples, plan)
            self._builder.follow(plan)
        self._position = (epoch, step)

    def is_ready(self) -> bool:
        """Return False: `next_batch` always has to build the batch first."""
        return False

    def next_batch(self) -> Delivery:
        """Build and return the next batch. The option `timeout` has no effect here.

        Raises:
            Exception: A signal handler raised it. The next call builds the batch.
        """
        epoch, step = self._position
        try:
            return self._build_next(epoch, step)
        except Exception as error:
            if is_interrupt(error):
                raise
            return Delivery(None, epoch, step, error=error)

    def _build_next(self, epoch: int, step: int) -> Delivery:
        builder = self._builder  # another thread may call close() meanwhile
        if self._state is not InlineState.RUNNING or builder is None or self._plan is None:
            raise LoaderClosed("the loader was closed; make a new one")
        started_ns = time.perf_counter_ns()
        self._definitions.clear()
        store = HeapStore()
        try:
            keeping = preserved_generators() if self._setup.options.rng is Rng.SAMPLE else nullcontext()
            with keeping, limited_threads(chosen_threads()), ordinary_tensors():
                built = builder.build(store, Task(0, 0, epoch, step))
        except BuildError as failed:
            if failed.__cause__ is not None and is_interrupt(failed.__cause__):
                raise failed.__cause__ from None
            error = self._explain(failed, epoch, step)
            raise error from error.__cause__
        failures = self._take_failures(builder, epoch, step)
        decode_started_ns = time.perf_counter_ns()
        with ordinary_tensors():
            batch = self._reader.read(built, store.memory)
        now_ns = time.perf_counter_ns()
        self._metrics.note_batch(built, now_ns - decode_started_ns)
        self._metrics.note_wait(now_ns - started_ns, 0)
        epoch_is_over = step + 1 >= self._plan.num_batches(epoch)
        self._position = (epoch + 1, 0) if epoch_is_over else (epoch, step + 1)
        return Delivery(batch, epoch, step, failures)

    def close(self) -> None:
        """Release the dataset. Idempotent."""
        self._state = InlineState.CLOSED
        self._builder = None

    def _explain(self, failed: BuildError, epoch: int, step: int) -> BaseException:
        """Return the user's own exception. The end of its chain of causes says where it happened."""
        error = failed.__cause__ or failed
        place = f", dataset index {failed.index}" if failed.index is not None else ""
        note = f". {failed.note}" if failed.note else ""
        last = error
        while last.__cause__ is not None:
            last = last.__cause__
        last.__cause__ = RemoteTraceback(f"While {failed.stage.value}{place}, {self._describe(epoch, step)}{note}")
        return error

    def _take_failures(self, builder: BatchBuilder, epoch: int, step: int) -> tuple[SampleFailure, ...]:
        """Return the failed samples of the batch that was just built."""
        if not builder.failures:
            return ()
        where = f", {self._describe(epoch, step)}"
        return rebuild_samples(builder.failures, epoch, step, "the loop's process", self._definitions, where)

    def _describe(self, epoch: int, step: int) -> str:
        assert self._plan is not None
        return describe_batch(epoch, step, self._plan.batch(epoch, step).indices.tolist())

    def __repr__(self) -> str:
        return f"<InlineEngine {self._state.value}>"
