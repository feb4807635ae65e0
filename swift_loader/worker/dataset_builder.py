"""The payload's content and the dataset, in the processes that build it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, NamedTuple

from swift_loader.batch.tree import type_name
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.frames import unpack_frame
from swift_loader.transport.messages import BuildReport, FailureStage, Identity
from swift_loader.transport.payload import Environment
from swift_loader.worker.build import BatchBuilder
from swift_loader.worker.failure import describe_failure
from swift_loader.worker.fetch import OnError
from swift_loader.worker.fingerprint import check_samples, check_samples_in_fork, chosen_indices, report
from swift_loader.worker.import_guard import importing
from swift_loader.worker.loop import TaskChannel, run_worker
from swift_loader.worker.seeding import seed_for_worker
from swift_loader.worker.spec import WorkerSpec, length_of
from swift_loader.worker.torch_settings import set_default_dtype, set_num_threads
from swift_loader.worker.torch_worker import TorchWorker
from swift_loader.worker.usage import ProcessUsage, Usage

if TYPE_CHECKING:
    from swift_loader.transport.channel import Channel
    from swift_loader.transport.segments import Segment


class Service(NamedTuple):
    """What a worker serves with."""

    builder: BatchBuilder
    report: BuildReport
    """Describes its dataset."""
    kept: Sequence[Segment] = ()
    """Memory of an earlier worker."""


class DatasetBuilder:
    """The payload and the dataset built from it: EMPTY ─read─► READ ─build─► BUILT ─drop─► EMPTY."""

    def __init__(self, content: Callable[[], tuple[WorkerSpec, Definitions]], environment: Environment) -> None:
        """Read nothing yet. `environment`: the trainer's settings.

        `content` returns the payload's content. It stays, because the content's arrays may be views of its memory.
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
                self._spec, self.definitions = self._content()
            except RecursionError as error:
                _explain(error)
                raise
        self.set_up_torch()

    def set_up_torch(self) -> None:
        """Give torch the trainer's default dtype, and one thread until `start_service`."""
        set_default_dtype(self._environment.torch_dtype)
        set_num_threads(1)  # torch's threads would outlive the constructor, and the process couldn't be forked

    def build(self) -> None:
        """Build the dataset and get its length."""
        self._dataset = self.spec.options.make_dataset()
        self._num_samples = length_of(self._dataset, self.spec.options.torch)

    def drop(self) -> None:
        """Drop the dataset, and the payload's instance if there was one."""
        self._dataset = self._spec = None
        self.definitions = Definitions()

    def report(self) -> BuildReport:
        """Return the report about the dataset, with the checksums of some samples.

        If workers will share the dataset, the samples are fetched in a fork: a sample may open files, which all forks
        of this process would then share.
        """
        look = check_samples_in_fork if self.is_shared else check_samples
        may_hang = self.spec.options.on_error is not OnError.RAISE  # which nothing would end here
        is_checked = self.spec.options.validate and (self.is_shared or not may_hang)
        chosen = chosen_indices(self._num_samples) if is_checked else []
        if not chosen:
            return self.report_length()
        sample_check = look(self._dataset, chosen, self.definitions)
        self._draws = sample_check.draws
        return report(self._num_samples, sample_check.checksums)

    def report_length(self) -> BuildReport:
        """Return a report with the dataset's length, without checksums."""
        return report(self._num_samples)

    def run_worker(self, worker: int, channel: Channel) -> None:
        """Serve the channel as a worker. Builds the dataset first if this process has none."""
        with ProcessUsage() as usage:
            service = self.start_service(worker, channel, usage)
            if service is not None:
                run_worker(channel, *service)

    def start_service(self, worker: int, channel: TaskChannel, usage: Usage) -> Service | None:
        """Build the dataset if this process has none. Return what a worker serves with; None if that failed.

        The trainer was told of a failure then, unless it is gone. `usage` measures what builds batches.
        """
        stage = FailureStage.BUILD
        try:
            if self._dataset is None:
                self.build()
            stage = FailureStage.SET_UP
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
            self._dataset, self._num_samples, spec, self.definitions, worker=torch_worker, usage=usage
        )
        return Service(builder, reported, self._kept)

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
        identity = Identity.unpack(unpack_frame(received.data))
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
