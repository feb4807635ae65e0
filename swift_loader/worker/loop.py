"""The main loop of a worker: it builds the dataset, receives tasks and sends batches until the trainer hangs up.

Runs on the process's main thread, and blocks on its channel while it has no task. It shares no lock, pipe or writable
memory with any other worker.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from multiprocessing import spawn
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from swift_loader.batch.tree import type_name
from swift_loader.errors import ProtocolError
from swift_loader.sampling.mixture import Mixture
from swift_loader.transport import messages
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.failpoints import failpoint
from swift_loader.transport.messages import Batch, Received
from swift_loader.transport.payload import Environment, Payload
from swift_loader.transport.segments import NUM_BEGUN, Segment, capacity_for
from swift_loader.transport.slots import RecycledSlots
from swift_loader.transport.task import Task
from swift_loader.worker.build import BatchBuilder, ProcessUsage, Usage
from swift_loader.worker.failure import BuildError, describe_failure
from swift_loader.worker.fetch import OnError
from swift_loader.worker.fingerprint import check_samples, check_samples_in_fork, chosen_indices, report
from swift_loader.worker.process import importing
from swift_loader.worker.seeding import seed_for_worker
from swift_loader.worker.spec import WorkerSpec, length_of
from swift_loader.worker.stream import StreamEnd
from swift_loader.worker.torch_worker import TorchWorker, set_default_dtype, set_num_threads

if TYPE_CHECKING:
    from swift_loader.transport.channel import Channel

# Tasks ----------------------------------------------------------------------------------------------------------------


class TaskChannel(Protocol):
    """The worker's end of its pipe to the trainer."""

    def send(self, message: bytes) -> None:
        """Send a message."""

    def receive(self, *, wait: bool = True) -> Received | None:
        """Return the next message; None at the end of the stream.

        Raises `BlockingIOError` if `wait` is False and there is no message.
        """


class AnnouncedSlots(RecycledSlots[Segment]):
    """Slots in shared memory. The trainer maps a segment when it is announced, and unmaps those that are given up."""

    def __init__(self, channel: Any) -> None:
        """Begin without slots. The channel carries descriptors, unless a subclass makes segments otherwise."""
        super().__init__()
        self._channel = channel

    def make(self, slot: int, nbytes: int) -> Segment:
        """Return a new segment, once the trainer was told of it. Raises `SharedMemoryFull` if there is no memory."""
        segment, descriptor = Segment.create(capacity_for(nbytes))
        try:
            self._channel.send(messages.SegmentMade(slot, segment.nbytes).pack(), [descriptor])
        finally:
            os.close(descriptor)
        return segment

    def drop(self, slot: int) -> None:
        """Tell the trainer."""
        self._channel.send(messages.SegmentGone(slot).pack())


class TaskLoop:
    """The tasks of one worker, and the slots it writes to."""

    def __init__(self, channel: TaskChannel, builder: BatchBuilder, slots: RecycledSlots[Segment]) -> None:
        self.newest_generation = 0
        """Tasks of earlier ones are skipped, even if no later task is here. Any thread may raise it."""
        self._channel = channel
        self._builder = builder
        self._words = builder.samples.counters.words
        self._slots = slots
        self._queue: deque[Task] = deque()
        builder.samples.coming = self._queue.copy
        self._plans: deque[messages.NewPlan] = deque()
        """Received plans that aren't used yet."""

    @property
    def has_tasks(self) -> bool:
        """Whether there is a task for `do_next`."""
        return bool(self._queue)

    def serve(self) -> None:
        """Answer the tasks in the order received, each with a `Batch`, `Failure` or `NoBatch`."""
        while self.refill(wait=True):
            self.do_next()

    def do_next(self) -> None:
        """Answer the next task. There must be one."""
        task = self._queue.popleft()
        self._words[NUM_BEGUN] += 1
        newest = max(self._queue[-1].generation if self._queue else task.generation, self.newest_generation)
        if task.generation < newest:
            self._channel.send(messages.NoBatch(task.generation, task.sequence).pack())
        else:
            answer = self._answer(task).pack()
            failpoint("worker.after-commit")
            self._channel.send(answer)
            failpoint("worker.notified")

    def refill(self, *, wait: bool) -> bool:
        """Read all waiting messages; with `wait`, block for one if there is no task.

        It reads all of them because a later task releases slots for the next batch, and may begin a new generation.

        Returns:
            False at the end of the stream.
        """
        while True:
            try:
                received = self._channel.receive(wait=wait and not self._queue)
            except BlockingIOError:
                return True
            if received is None:
                return False
            self._take_in(received)

    def _take_in(self, received: Received) -> None:
        message = messages.unpack(received.data)
        for descriptor in received.descriptors:
            os.close(descriptor)
        if isinstance(message, Task):
            message.rebuild_keys()
            for slot in message.released:
                self._slots.release(slot)
            for slot in message.retired:
                self._slots.retire(slot)
            self._queue.append(message)
            failpoint("worker.received")
        elif isinstance(message, messages.NewPlan):
            self._plans.append(message)
        elif isinstance(message, messages.Hung):
            self._builder.hung[message.epoch, message.index] = message
        else:
            raise ProtocolError(f"a worker was sent {type(message).__name__}")

    def _answer(self, task: Task) -> Batch | messages.Failure | messages.NoBatch:
        try:
            while self._plans and self._plans[0].generation <= task.generation:
                plan = self._plans.popleft()
                self._builder.samples.use_plan(plan.settings, plan.resume, plan.turn)
            batch = self._builder.build(self._slots, task)
            self._report(self._builder.failures, task)
            if (state := self._builder.samples.state) is not None:
                self._channel.send(messages.State(state).pack())
            return batch
        except StreamEnd:
            return messages.NoBatch(task.generation, task.sequence)
        except BuildError as failed:
            self._report(failed.failures, task)
            error, definitions = failed.__cause__ or failed, self._builder.definitions
            failure = describe_failure(error, failed.stage, definitions, index=failed.index, note=failed.note)
            failure.generation, failure.sequence = task.generation, task.sequence
            return failure

    def _report(self, failures: Sequence[messages.SampleFailed], task: Task) -> None:
        """Send the samples that failed. The trainer gets them before the batch."""
        for failed in failures:
            failed.failure.generation, failed.failure.sequence = task.generation, task.sequence
            self._channel.send(failed.pack())


# The payload's content and the dataset --------------------------------------------------------------------------------


Service = tuple[BatchBuilder, messages.BuildReport]
"""What a worker serves with, and what describes its dataset."""

_LARGEST_BLOCK_NBYTES = 2**25 - 2**16
"""The largest block that glibc's malloc learns from. When it is freed, glibc begins to keep freed blocks of up to this
size, and up to twice as much free memory at the end of the heap. A program that has run for a while is in this state.
In a new interpreter, glibc maps each large array anew, and unmaps it: each page of a sample costs a page fault. glibc
learns nothing if the user has set its limits (MALLOC_*, GLIBC_TUNABLES). Nor does another allocator."""


class DatasetBuilder:
    """The payload and the dataset built from it: EMPTY ─read─► READ ─build─► BUILT ─drop─► READ."""

    @classmethod
    def of(cls, payload: Payload) -> DatasetBuilder:
        """Return the builder for a payload, in a new interpreter, which is like multiprocessing's children from now on.

        It has the trainer's `sys.argv` and key.
        """
        environment = payload.environment()
        sys.argv[:] = environment.argv
        spawn.prepare(environment.preparation)
        return cls(payload, environment)

    def __init__(self, content: Payload | tuple[WorkerSpec, Definitions], environment: Environment) -> None:
        """Read nothing yet. `environment`: the trainer's settings.

        `content`: a payload, or what is in one. It stays, because the content's arrays may be views of its memory.
        """
        self._content = content
        self._environment = environment
        self._spec: WorkerSpec | None = None
        self._dataset: Any = None
        self._num_samples = 0
        self._draws = False
        """Whether samples are known to draw from the global random generators."""
        self._kept: list[Segment] = []
        self.definitions = Definitions()
        self.is_shared = False
        """Whether workers share the template's dataset. The template sets it."""
        self.slow_fork = 0
        """See `SampleCheck`. The template reaps it."""

    @property
    def is_read(self) -> bool:
        """Whether `read` was called."""
        return self._spec is not None

    @property
    def spec(self) -> WorkerSpec:
        """The options for workers; available after `read`."""
        assert self._spec is not None, "the payload wasn't read"
        return self._spec

    def read(self) -> None:
        """Import the modules, which all workers then share, and read the payload: it rebuilds a dataset's instance."""
        sys.setrecursionlimit(max(sys.getrecursionlimit(), self._environment.recursion_limit))
        with importing():
            for name in self._environment.modules:
                with suppress(Exception):  # if something needs the module, importing it again raises a clear error
                    import_module(name)
            try:
                content = self._content
                self._spec, self.definitions = content.read() if isinstance(content, Payload) else content
            except RecursionError as error:
                _explain(error)
                raise
        set_default_dtype(self._environment.torch_dtype)
        set_num_threads(1)  # torch's threads would outlive the constructor, and the process couldn't be forked

    def build(self) -> None:
        """Build the dataset and get its length."""
        self._dataset = self.spec.options.make_dataset()
        self._num_samples = length_of(self._dataset, self.spec.options.torch)

    def drop(self) -> None:
        """Drop the dataset."""
        self._dataset = None

    def report(self) -> messages.BuildReport:
        """Return the report about the dataset, with the checksums of some samples.

        If workers will share the dataset, the samples are fetched in a fork: a sample may open files, which all forks
        of this process would then share.
        """
        look = check_samples_in_fork if self.is_shared else check_samples
        may_hang = self.spec.options.on_error is not OnError.RAISE  # which nothing would end here
        is_checked = self.spec.options.validate and (self.is_shared or not may_hang)
        dataset, num_samples = self._dataset, self._num_samples
        if isinstance(dataset, Mixture):
            dataset = dataset.rows
            num_samples = len(dataset)
        chosen = chosen_indices(num_samples) if is_checked else []
        if not chosen:
            return self.report_length()
        sample_check = look(dataset, chosen, self.definitions)
        self._draws, self.slow_fork = sample_check.draws, sample_check.slow_fork
        return report(self._num_samples, sample_check.checksums)

    def report_length(self) -> messages.BuildReport:
        """Return a report with the dataset's length, without checksums."""
        return report(self._num_samples)

    def run_worker(self, worker: int, channel: Channel) -> None:
        """Serve the channel as a worker, until the trainer closes it or dies. Builds the dataset if there is none.

        Raises `SystemExit` if the user's code does. The worker must end, and the trainer must see that.
        """
        service = self.start_service(worker, channel, ProcessUsage)
        if service is None:
            return
        builder, reported = service
        counters, slots = builder.samples.counters, AnnouncedSlots(channel)
        with suppress(BrokenPipeError, ConnectionResetError):  # the trainer is gone
            descriptor = counters.share()
            try:
                channel.send(messages.Ready(counters.length_address(), reported).pack(), [descriptor])
            finally:
                os.close(descriptor)
            for segment in self._kept:  # the trainer has them already, as the first slots
                slots.release(slots.adopt(segment))
            TaskLoop(channel, builder, slots).serve()
        failpoint("worker.stop")

    def start_service(self, worker: int, channel: TaskChannel, usage: type[Usage]) -> Service | None:
        """Build the dataset if this process has none. Return what serves it, and the report; None if that failed.

        The trainer was told of a failure then, unless it is gone. `usage` measures what builds batches.
        """
        with suppress(MemoryError):  # of a limit
            np.empty(_LARGEST_BLOCK_NBYTES, np.uint8)  # freed at once
        stage = messages.FailureStage.BUILD
        try:
            if self._dataset is None:
                self.build()
            stage = messages.FailureStage.SET_UP
            set_num_threads(self._environment.torch_threads)
            torch_worker = self._set_up(worker, channel)
        except BrokenPipeError:  # the trainer is gone
            return None
        except Exception as error:
            with suppress(BrokenPipeError):  # the trainer doesn't want to know
                channel.send(describe_failure(error, stage, self.definitions).pack())
            return None
        reported = self.report_length() if self.is_shared else self.report()
        spec = replace(self.spec, draws=self._draws)
        builder = BatchBuilder(
            self._dataset, self._num_samples, spec, self.definitions, worker=torch_worker, usage=usage()
        )
        return builder, reported

    def start_fresh(self, worker: int, channel: TaskChannel, usage: type[Usage]) -> Service | None:
        """Read the payload, too, in a process that has no template. Otherwise, it is `start_service`."""
        failpoint("worker.boot", worker)
        try:
            self.read()
        except Exception as error:
            channel.send(describe_failure(error, messages.FailureStage.BUILD, self.definitions).pack())
            return None
        return self.start_service(worker, channel, usage)

    def _set_up(self, worker: int, channel: TaskChannel) -> TorchWorker | None:
        """Seed the generators. In torch mode, learn the worker's id from the trainer, and run `worker_init_fn`.

        Raises `BrokenPipeError` if the trainer is gone, or what `worker_init_fn` raised.
        """
        options, plan = self.spec.options, self.spec.plan
        if options.torch is None:
            seed_for_worker(plan.order.seed, plan.rank, worker, options.rng)
            return None
        received = channel.receive()
        if received is None:
            raise BrokenPipeError
        identity = messages.unpack(received.data)
        if identity.num_kept:
            self._kept = options.torch.kept[identity.worker_id]
        options.torch.kept.clear()  # the others' parts
        torch_worker = TorchWorker(
            replace(options.torch, num_workers=identity.num_workers), options.rng, identity.worker_id, self._dataset
        )
        torch_worker.begin(plan.order.seed)
        return torch_worker


def _explain(error: RecursionError) -> None:
    """Have the error name the class whose `__getattr__` calls itself: pickle makes an object before its attributes."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "__getattr__"]
    if frames and frames[-1].f_code.co_argcount > 1:
        half_built, name = (frames[-1].f_locals.get(variable) for variable in frames[-1].f_code.co_varnames[:2])
        error.args = (
            f"a {type_name(half_built)} can't be unpickled: pickle looks for methods before the object has its "
            f"attributes, and __getattr__ asks for self.{name}, which calls __getattr__ again. Begin __getattr__ with "
            f"`if name == {name!r}: raise AttributeError(name)`. Or have workers forked, which pickles nothing: "
            f"multiprocessing_context='fork' in DataLoader, start_method='fork' in SwiftLoader",
        )
