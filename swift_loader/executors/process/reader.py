"""Turns a worker's messages into events. Runs on the thread that listens to the worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import DatasetMismatch, ProtocolError
from swift_loader.executors.handle import Handle, ResumePoints
from swift_loader.executors.wording import Explainer
from swift_loader.metrics.metrics import Metrics
from swift_loader.runtime import is_interrupt
from swift_loader.scheduler.messages import Answered, Event, ExecutorFailed, NoBatch, Ready, SampleFailed
from swift_loader.transport import messages
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import decode
from swift_loader.transport.messages import Batch, BuildReport, FailureStage, Received, unpack
from swift_loader.transport.segments import Segment
from swift_loader.worker.torch_worker import is_inference_mode, ordinary_tensors

# Whether all processes have built the same dataset: no I/O ------------------------------------------------------------

_MUST_NOT_CHANGE = (
    "All processes of a loader must build the same one; otherwise some samples would be lost and others come twice. "
)

_LENGTH_HINT = (
    "If it lists files or other data that change while the loader runs, list them once and pass the list in "
    "dataset_kwargs. If it chooses samples at random, give its generator a fixed seed"
)

_SAMPLE_HINT = (
    "Either its constructor uses a random source that the loader doesn't seed, such as numpy.random.default_rng(), "
    "random.Random(), os.urandom, uuid or the time: give it a fixed seed, or use random, numpy.random or torch's "
    "default generator, which the loader seeds. Or a file or something else that it reads has changed: don't change "
    "the dataset's data while the loader runs"
)

_OFF = ". validate=False turns off this check of samples"


class DatasetCheck:
    """The reports of the processes so far. Thread-safe: workers report to several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the reports."""
        self._first: BuildReport | None = None
        self._checksums: dict[int, int] = {}
        """dataset index -> checksum of the sample, from the first process that reported it"""
        self.compares_seeds = True
        """False: the dataset was made here, and sent to processes with another hash seed."""

    def compare(self, report: BuildReport, who: str) -> None:
        """Add a report. Raises `DatasetMismatch` if it differs from an earlier one."""
        with self._lock:
            first = self._first = self._first or report
            if report.num_samples != first.num_samples:
                raise DatasetMismatch(
                    f"{who} built a dataset of {report.num_samples} samples, but the first one has "
                    f"{first.num_samples}. {_MUST_NOT_CHANGE}{_LENGTH_HINT}"
                )
            if self.compares_seeds and report.hash_of_text != first.hash_of_text:
                raise DatasetMismatch(
                    f"{who} built a dataset with another hash seed than the first one, so sets of strings have another "
                    f"order. {_MUST_NOT_CHANGE}Set PYTHONHASHSEED before the trainer starts"
                )
            for index, checksum in report.checksums:
                if self._checksums.setdefault(index, checksum) != checksum:
                    raise DatasetMismatch(
                        f"{who} built a dataset whose sample at dataset index {index} differs from that of the first "
                        f"one. {_MUST_NOT_CHANGE}{_SAMPLE_HINT}{_OFF}"
                    )


# Messages -------------------------------------------------------------------------------------------------------------


class SegmentLock(Protocol):
    """Page-locks the memory of batches; `device.pinning`."""

    def lock(self, segment: Segment) -> None:
        """Page-lock a segment until it is unmapped, if it isn't page-locked yet."""


OnArrival = Callable[[Any, NDArray[np.uint8]], Any]
"""Gets each batch, and the memory that it lies in, on the thread that has decoded it. Returns what the loop gets, or
what is moved to a device."""


class BatchReader:
    """Decodes the contents of a slot into a batch."""

    def __init__(
        self,
        definitions: Definitions,
        batch_decoder: Callable[[bytes], Any] | None,
        on_arrival: OnArrival | None = None,
    ) -> None:
        self._definitions = definitions
        self._batch_decoder = batch_decoder
        self._on_arrival = on_arrival

    def read(self, batch: Batch, memory: NDArray[np.uint8]) -> Any:
        """Return the batch. Its arrays are views of `memory`, unless `batch_decoder` or `on_arrival` made others."""
        meta = memoryview(batch.meta)
        if batch.meta_nbytes and not meta:
            meta = memory[batch.meta_offset : batch.meta_offset + batch.meta_nbytes].data
            if len(meta) != batch.meta_nbytes:
                raise ProtocolError(
                    f"a structure of {batch.meta_nbytes} bytes lies outside a slot of {len(memory)} bytes"
                )
        decoded = decode(meta, batch.num_blocks, memory, self._definitions)
        if self._batch_decoder is not None:
            decoded = self._batch_decoder(decoded.tobytes())
        return decoded if self._on_arrival is None else self._on_arrival(decoded, memory)


class MessageReader:
    """Reads the messages of all workers of an executor."""

    def __init__(
        self,
        batches: BatchReader,
        datasets: DatasetCheck,
        explainer: Explainer,
        metrics: Metrics,
        page_lock: SegmentLock | None,
        resumes: ResumePoints,
    ) -> None:
        """`page_lock` locks each segment before the first batch lies in it, and is asked again with each batch.

        `resumes` gets the states of the workers' datasets.
        """
        self._resumes = resumes
        self._batches = batches
        self.datasets = datasets
        """Compares the workers' datasets."""
        self._explainer = explainer
        self._metrics = metrics
        self.page_lock = page_lock
        self.largest_batch_nbytes = 0
        """Of the batches that workers have sent; 0 before the first."""

    def read(self, worker: Handle, received: Received) -> Event | None:
        """Return the event of a message; None if it is of no interest to the scheduler.

        Raises `ProtocolError` if the message is invalid.
        """
        match message := unpack(received.data):
            case Batch():
                return self.read_batch(worker, message)
            case messages.SegmentMade():
                segment = worker.add_segment(message, received.descriptors)
                if self.page_lock is not None:
                    self.page_lock.lock(segment)
            case messages.SegmentGone():
                worker.memory.drop(message.slot)
            case messages.State():
                worker.state = message.snapshot
            case messages.Ready():
                return self._read_ready(worker, worker.note_ready(message, received.descriptors))
            case messages.SampleFailed():
                if self._explainer.is_needed(message.failure.generation) and worker.tasks:
                    task = worker.tasks[0]
                    return SampleFailed(task, self._explainer.sample_failure(message, worker, task.work))
            case messages.Failure():
                return self._read_failure(worker, message)
            case messages.PayloadRead():
                pass  # who waited for it has seen that something came
            case messages.NoBatch():
                return NoBatch(worker.answered(message.generation, message.sequence))
            case _:
                who = self._explainer.who(worker)
                raise ProtocolError(f"{who} sent an unexpected message: {type(message).__name__}")
        return None

    def _read_ready(self, worker: Handle, report: BuildReport) -> Event:
        try:
            self.datasets.compare(report, self._explainer.who(worker))
        except DatasetMismatch as error:
            return ExecutorFailed(error)
        return Ready(worker.serial, worker.worker_id)

    def _read_failure(self, worker: Handle, failure: messages.Failure) -> Event:
        if failure.stage in (FailureStage.BUILD, FailureStage.SET_UP):  # it takes no tasks
            return ExecutorFailed(self._explainer.failure(failure, worker))
        task = worker.answered(failure.generation, failure.sequence)
        return Answered(task, error=self._explainer.failure(failure, worker, task))

    def read_batch(self, worker: Handle, batch: Batch) -> Event:
        """Return the event of a batch that a worker announces, see `read`."""
        started_ns, task = time.perf_counter_ns(), worker.answered(batch.generation, batch.sequence)
        self.largest_batch_nbytes = max(self.largest_batch_nbytes, batch.used_nbytes or batch.meta_nbytes)
        answer, error = Answered(task), None
        if worker.state is not None:
            answer.snapshot, worker.state = worker.state, None
            # From now on, a replacement of the worker would begin with it.
            self._resumes.note(worker.worker_id, task.generation, answer.snapshot, task.work)
        if self._explainer.is_needed(task.generation):
            error = self._decode(worker, batch, answer)
        else:
            worker.memory.discard(batch)
        decode_ns = time.perf_counter_ns() - started_ns
        answer.arrival = self._metrics.note_arrival(batch, task, worker.worker_id, started_ns, decode_ns)
        if error is not None:
            return Answered(task, error=error)
        answer.build_s = (batch.fetch_ns + batch.collate_ns + batch.encode_ns) / 1e9
        answer.reads_ahead = batch.reads_ahead
        return answer

    def _decode(self, worker: Handle, batch: Batch, answer: Answered) -> Exception | None:
        """Put the batch into the answer, as views of its slot. Return the error of decoding it, if there is one.

        Raises what a signal handler raised.
        """
        if self.page_lock is not None and (segment := worker.memory.segment_of(batch)) is not None:
            self.page_lock.lock(segment)
        memory, answer.lease = worker.memory.lend(batch)
        try:
            if not is_inference_mode():
                answer.batch = self._batches.read(batch, memory)
                return None
            with ordinary_tensors():
                answer.batch = self._batches.read(batch, memory)
        except Exception as error:
            if is_interrupt(error):
                raise
            return error
        return None
