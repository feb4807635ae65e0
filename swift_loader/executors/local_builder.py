"""Builds batches in this process, for the calling thread and for worker threads.

The code is that of worker processes: plan, fetch, collate, encode, decode. So batches have the same bytes and types,
and share no memory with the dataset.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import RemoteTraceback
from swift_loader.executors.failures import rebuild, rebuild_sample, task_of
from swift_loader.executors.process.reader import BatchReader
from swift_loader.interrupts import is_interrupt
from swift_loader.metrics.metrics import Metrics
from swift_loader.sampling.plan import PlanSettings
from swift_loader.scheduler.messages import Answered, Event, SampleFailed, Send, StreamEnded
from swift_loader.scheduler.work import Work
from swift_loader.transport import messages
from swift_loader.transport.by_value import NewDefinitions
from swift_loader.transport.messages import Batch
from swift_loader.transport.segments import CounterWriter
from swift_loader.transport.slots import SlotStore
from swift_loader.worker.build import BatchBuilder
from swift_loader.worker.failure import BuildError
from swift_loader.worker.seeding import Rng, preserved_generators
from swift_loader.worker.spec import WorkerOptions, WorkerSpec
from swift_loader.worker.stream import StreamEnd
from swift_loader.worker.torch_worker import TorchIdentity, limited_threads


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
        metrics: Metrics,
        who: str,
        describe: Callable[[Work], str],
        store: SlotStore,
        identity: TorchIdentity | None = None,
    ) -> None:
        """Prepare to build batches.

        `worker`: its serial number, for the events; also its id, because it is never replaced. `dataset`: map-style; in
        torch mode, what torch accepts. `num_samples`: 0 in torch mode. `batch_decoder`: see `BatchReader`. `who` builds
        the batches, and `describe` returns number, epoch and dataset indices of one, for the causes of errors. `store`
        has the memory of the batches; the builder alone uses it. `identity`: see `BatchBuilder`.
        """
        self._worker = worker
        self._definitions = NewDefinitions()
        self._reader = BatchReader(self._definitions, batch_decoder)
        self._builder = BatchBuilder(dataset, num_samples, spec, self._definitions, identity, has_handlers=True)
        self._metrics = metrics
        self._who = who
        self._describe = describe
        self._store = store
        self.largest_nbytes = 0
        """Of the batches so far. Any thread may read it."""

    @property
    def counters(self) -> CounterWriter:
        """Show how far the current batch is."""
        return self._builder.samples.counters

    def use_plan(self, plan: PlanSettings, resume: bytes | None = None) -> None:
        """Build the batches of another plan from now on. `resume`: see `NewPlan`."""
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
            return [StreamEnded(self._worker, task.generation, task.sequence)]
        except Exception as error:
            raised = error.__cause__ if isinstance(error, BuildError) else error
            if raised is not None and is_interrupt(raised):
                raise raised from None
            return self.failed(task, error)

    def _decode(self, task: Send, batch: Batch, memory: NDArray[np.uint8]) -> list[Event]:
        started_ns = time.perf_counter_ns()
        answer = Answered(self._worker, task.generation, task.sequence, self._reader.read(batch, memory))
        answer.snapshot, decode_ns = self._builder.samples.state, time.perf_counter_ns() - started_ns
        answer.arrival = self._metrics.note_arrival(batch, task, self._worker, started_ns, decode_ns)
        answer.build_s = (batch.fetch_ns + batch.collate_ns + batch.encode_ns) / 1e9
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
        events.append(Answered(self._worker, task.generation, task.sequence, error=error))
        return events

    def _sample_failures(self, task: Send, failures: Sequence[messages.SampleFailed]) -> list[Event]:
        events: list[Event] = []
        for failed in failures:
            where = f", {self._describe(task.work)}"
            error = rebuild(failed.failure, self._who, self._definitions, where)
            failure = rebuild_sample(failed, task.work.epoch, task.work.step, error)
            events.append(SampleFailed(self._worker, task.generation, task.sequence, failure))
        return events

    def _explain(self, failed: BuildError, task: Send) -> Exception:
        error = failed.__cause__ if isinstance(failed.__cause__, Exception) else failed
        sample = f", dataset index {failed.index}" if failed.index is not None else ""
        note = f". {failed.note}" if failed.note else ""
        last: BaseException = error
        while last.__cause__ is not None:
            last = last.__cause__
        where = f"{failed.stage.value}{sample}, {self._describe(task.work)}"
        last.__cause__ = RemoteTraceback(f"In {self._who}, {where}{note}")
        return error


def dataset_of(options: WorkerOptions) -> Any:
    """Return a dataset of this process. The user's generators are put back, and torch has one thread meanwhile."""
    if options.rng is Rng.NONE:
        with limited_threads(1):
            return options.make_dataset()
    with preserved_generators(), limited_threads(1):
        return options.make_dataset()
