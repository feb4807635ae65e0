"""Builds a batch for a task: fetch, collate, encode.

All executors use the same code. A worker process provides slots of shared memory; the inline executor provides heap
memory.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.batch.collate import collate_into
from swift_loader.batch.tree import type_name
from swift_loader.errors import EncodeError, SharedMemoryFull
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import BatchEncoder
from swift_loader.transport.encoder import Encoded
from swift_loader.transport.failpoints import failpoint
from swift_loader.transport.messages import MAX_INLINE_BYTES, NO_SLOT, Batch, FailureStage, Hung, SampleFailed
from swift_loader.transport.slots import SlotStore
from swift_loader.transport.task import Task
from swift_loader.worker.failure import BuildError
from swift_loader.worker.fetch import KeyedSamples, OnError, PlannedSamples, Samples
from swift_loader.worker.seeding import Rng, Seeding
from swift_loader.worker.spec import WorkerSpec
from swift_loader.worker.stream import StreamSamples
from swift_loader.worker.torch_worker import TorchIdentity

# CPU time of a worker, and how long it was ready to run but had no core -----------------------------------------------

NOT_MEASURED = -1

_LONG_NS = 500_000
"""After a batch that took so long, the run delay is read: 1 us for 500."""

_EVERY = 32
"""After shorter ones, it is read for one batch of so many."""

_MAX_BYTES = 128
"""Of /proc/self/schedstat."""


class ThreadUsage:
    """Measures the calling thread, while it builds a batch. Other threads of the process do other things."""

    def __init__(self) -> None:
        self._began_ns = 0

    def begin(self) -> None:
        """Begin a batch. The same thread ends it."""
        self._began_ns = time.thread_time_ns()

    def end(self, build_ns: int) -> tuple[int, int]:  # noqa: ARG002 - it doesn't depend on it
        """Return the thread's CPU time since `begin`. The run delay isn't measured."""
        return time.thread_time_ns() - self._began_ns, NOT_MEASURED


class ProcessUsage:
    """Measures this process, whose only task is to build batches: from the end of one batch to the end of the next.

    Linux tells the run delay of the main thread alone, in /proc/self/schedstat. Without that file, it isn't measured.
    The process that builds batches makes it, so after a fork. It keeps a descriptor from the first reading on.
    """

    def __init__(self) -> None:
        self._cpu_ns = time.process_time_ns()
        """At the end of the batch before."""
        self._delay_ns = NOT_MEASURED
        """At the end of the batch before, if it was read there."""
        self._num_batches = 0
        self._descriptor: int | None = None
        """None: not opened yet. -1: there is nothing to read."""

    def begin(self) -> None:
        """Do nothing: a batch begins where the one before has ended."""

    def end(self, build_ns: int) -> tuple[int, int]:
        """Return the CPU time and the run delay of a batch."""
        before_ns, self._cpu_ns = self._cpu_ns, time.process_time_ns()
        self._num_batches += 1
        if build_ns < _LONG_NS and self._num_batches % _EVERY > 1:  # two readings in a row make a difference
            self._delay_ns = run_delay_ns = NOT_MEASURED
        else:
            delayed_ns, self._delay_ns = self._delay_ns, self._read()
            is_known = delayed_ns != NOT_MEASURED and self._delay_ns >= delayed_ns
            run_delay_ns = self._delay_ns - delayed_ns if is_known else NOT_MEASURED
        return self._cpu_ns - before_ns, run_delay_ns

    def _read(self) -> int:
        """Return the run delay since the process began; -1 if it can't be read."""
        try:
            if self._descriptor is None:
                self._descriptor = os.open("/proc/self/schedstat", os.O_RDONLY)
            return int(os.pread(self._descriptor, _MAX_BYTES, 0).split()[1]) if self._descriptor >= 0 else NOT_MEASURED
        except (OSError, ValueError, IndexError, AttributeError):  # also if the user's code closed our descriptor
            self._descriptor = -1
            return NOT_MEASURED


Usage = ThreadUsage | ProcessUsage

# Batches --------------------------------------------------------------------------------------------------------------

_NUM_REMEMBERED_SIZES = 16

_EMPTY = np.empty(0, np.uint8)


class BatchBuilder:
    """Builds batches of one dataset. Not thread-safe."""

    def __init__(
        self,
        dataset: Any,
        num_samples: int,
        spec: WorkerSpec,
        definitions: Definitions,
        worker: TorchIdentity | None = None,
        usage: Usage | None = None,
        *,
        has_handlers: bool = False,
    ) -> None:
        """Prepare to build batches.

        `dataset`: map-style; in torch mode, what torch accepts. `num_samples`: 0 in torch mode. `definitions`: numbered
        as in the trainer. `worker`: in torch mode, which worker this is; None: the calling thread. `usage` measures the
        CPU time; None: that of the calling thread. `has_handlers`: whether the program's signal handlers run here. What
        they raise isn't the user's code's.
        """
        options, mode, seed = spec.options, spec.options.torch, spec.plan.order.seed
        is_cache = "_swift_loader_views" in vars(type(dataset))  # what wraps one may forward the attribute
        if is_cache and options.has_own_collate:
            dataset = dataset._swift_loader_views  # noqa: SLF001
        self.definitions = definitions
        """Numbered as in the trainer."""
        self._encoder = BatchEncoder(definitions)
        self.hung: dict[tuple[int, Any], Hung] = {}
        """By epoch and dataset index: these samples fail."""
        self.failures: Sequence[SampleFailed] = ()
        """The samples that failed in the last batch."""
        self.samples: Samples
        """Where the samples come from. It takes another plan, and has the dataset's state after the last batch."""
        if mode is None:
            seeding = Seeding(options.rng, by_sample=spec.draws and options.rng is Rng.SAMPLE)
            on_error = options.on_error
            self.samples = PlannedSamples(
                dataset, num_samples, on_error, seeding, definitions, self.hung, has_handlers=has_handlers
            )
            self.samples.use_plan(spec.plan)
        elif mode.is_stream:
            self.samples = StreamSamples(dataset, mode, seed, worker)
        else:
            skips_with = definitions if options.on_error is OnError.SKIP else None
            self.samples = KeyedSamples(dataset, mode, options.rng, seed, worker, skips_with)
        self._collate = collate_into(options.collate_fn)
        self._has_users_collate = not options.has_own_collate
        self._batch_encoder = options.batch_encoder
        self._usage = ThreadUsage() if usage is None else usage
        self._sizes: deque[int] = deque([0], _NUM_REMEMBERED_SIZES)

    def build(self, store: SlotStore, task: Task) -> Batch:
        """Build a batch and return its announcement. The bulk data is in a slot of `store`.

        It is built twice if the first attempt shows that it draws random numbers. Raises `BuildError` if the user's
        code raised; `__cause__` is its exception. Raises `StreamEnd` if the worker's shard of a stream has no batch
        left for this task.
        """
        needs_rebuild = self.samples.seeding.needs_rebuild
        try:
            built = self._attempt(store, task)
        except BaseException as error:
            is_owed = needs_rebuild()
            if not is_owed or not isinstance(error, BuildError):
                raise
        else:
            if not needs_rebuild():
                return built
            if built.slot != NO_SLOT:
                store.release(built.slot)
        try:
            return self._attempt(store, task)
        finally:
            needs_rebuild()

    def _attempt(self, store: SlotStore, task: Task) -> Batch:
        self.failures = ()
        failpoint("worker.started")
        samples, clock = self.samples, time.perf_counter_ns
        self._usage.begin()
        samples.slow_ns = 0
        start = clock()
        fetched = samples.fetch(task)
        failpoint("worker.fetched")
        fetched_ns = clock()
        samples.note_batch(fetched_ns - start, fetched.num_samples)
        # The second largest of the last sizes: a single outlier must not make all slots that large.
        slot = _BatchSlot(store, sorted(self._sizes)[-2:][0])
        try:
            arena = Arena(slot.memory, more=slot.take_for)
            if self._has_users_collate or samples.seeding.by_sample:
                samples.seeding.begin_collate()
            try:
                batch = self._collate(fetched.samples, arena)
            except Exception as error:
                raise BuildError(FailureStage.COLLATE) from error
            collated_ns = clock()
            failpoint("worker.collated")
            encoded = self._encode(batch, arena)
            failpoint("worker.before-commit")
            is_inline = len(encoded.meta) <= MAX_INLINE_BYTES
            meta_offset = 0 if is_inline else arena.place(np.frombuffer(encoded.meta, np.uint8)).offset
            slot.settle(arena)
        except BaseException:
            slot.release()
            raise
        self._sizes.append(arena.used)
        self.failures = fetched.failures
        samples.counters.samples.clear()  # they may be large, and the next batch may come much later
        done = clock()
        cpu_ns, run_delay_ns = self._usage.end(done - start)
        return Batch(
            task.generation,
            encoded.meta if is_inline else b"",
            task.sequence,
            slot.number,
            encoded.num_blocks,
            meta_offset,
            len(encoded.meta),
            fetched.num_samples,
            fetched_ns - start,
            collated_ns - fetched_ns,
            done - collated_ns,
            arena.used,
            start,
            cpu_ns,
            run_delay_ns,
            samples.slow_index,
            samples.slow_ns,
            *samples.take_reads(),
        )

    def _encode(self, batch: Any, arena: Arena) -> Encoded:
        try:
            if self._batch_encoder is not None:
                batch = self._batch_encoder(batch)
                if not isinstance(batch, (bytes, bytearray, memoryview)):
                    raise TypeError(f"batch_encoder returned a {type_name(batch)}; it must return bytes")
                batch = np.frombuffer(batch, np.uint8)
            return self._encoder.encode(batch, arena)
        except EncodeError as error:
            raise BuildError(FailureStage.ENCODE) from error.with_traceback(None)
        except Exception as error:
            raise BuildError(FailureStage.ENCODE) from error


class _BatchSlot:
    """The slot that a batch is written to; `NO_SLOT` while there is none."""

    def __init__(self, store: SlotStore, nbytes: int) -> None:
        """Take a slot for so many bytes; 0: none yet."""
        self._store = store
        self.number, self.memory = NO_SLOT, _EMPTY
        if nbytes:
            self._take(nbytes)

    def _take(self, nbytes: int) -> None:
        try:
            self.number, self.memory = self._store.take(nbytes)
        except SharedMemoryFull as error:
            raise BuildError(FailureStage.ENCODE) from error

    def take_for(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Take a slot for the batch's first block, and return its memory; None if there is none."""
        with suppress(BuildError):  # raised again when the whole batch needs a slot
            self._take(nbytes)
            return self.memory
        return None

    def settle(self, arena: Arena) -> None:
        """Have the whole batch in a single slot, or in none if it has no bulk data."""
        if arena.fits and arena.used:
            return
        outgrown, self.number = self.number, NO_SLOT
        try:
            if not arena.fits:
                self._take(arena.used)
                arena.move_to(self.memory)
        finally:
            if outgrown != NO_SLOT:
                self._store.release(outgrown)

    def release(self) -> None:
        """Give the slot back, if there is one."""
        if self.number != NO_SLOT:
            self._store.release(self.number)
