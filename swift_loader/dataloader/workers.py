"""The workers of a DataLoader: new ones for each epoch, or the same with `persistent_workers`."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from swift_loader.batch.tensor_arrays import collate_to_send
from swift_loader.batch.torch_collate import registered_functions
from swift_loader.dataloader.datapipes import init_of_workers
from swift_loader.dataloader.failures import with_torch_text
from swift_loader.dataloader.own_options import OwnOptions, start_method_of
from swift_loader.dataloader.processes import ProcessView
from swift_loader.dataloader.randomness import wanted_rng
from swift_loader.dataloader.threads import copied, needs_copies
from swift_loader.delivery.dispatcher import Dispatcher
from swift_loader.errors import EncodeError, ForkHangs, WorkerStalled, warn
from swift_loader.executors.base import Executor
from swift_loader.executors.process.fork_need import shared_file_of, why_fork_is_needed
from swift_loader.executors.processes import Starter, can_fork, make_executor, make_starter, warm_up
from swift_loader.executors.thread.executor import ThreadExecutor
from swift_loader.log import logger
from swift_loader.metrics.metrics import Metrics
from swift_loader.options import DeliveryOptions
from swift_loader.process_owner import ProcessOwner
from swift_loader.sampling.plan import PlanSettings
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.scheduler import Scheduler, SchedulerSettings
from swift_loader.scheduler.work import WorkSource
from swift_loader.transport.segments import SegmentPool
from swift_loader.worker.fetch import OnError
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import StartMethod, WorkerOptions, WorkerSpec, modules_of
from swift_loader.worker.stream_shard import StreamShard
from swift_loader.worker.torch_mode import TorchMode

_SERIALS = count()

DEFAULT_PREFETCH = 2
"""torch's default, with which this loader chooses how many batches are in flight."""


class LoaderWorkers:
    """The workers of one DataLoader, from their start to `close`. Not thread-safe, apart from `close`."""

    def __init__(
        self,
        worker_options: WorkerOptions,
        delivery: DeliveryOptions,
        base_seed: int,
        metrics: Metrics,
        *,
        persist: bool,
    ) -> None:
        """Start the workers, and wait until there is a dataset for them."""
        self.persist = persist
        """Whether they serve later epochs too."""
        assert worker_options.torch is not None
        self.shard = worker_options.torch.shard
        """This rank's part of a stream that the loader shares out."""
        self.serial = next(_SERIALS)
        """Later ones have a larger number."""
        self._delivery = delivery
        """`resize` replaces it and the limits."""
        self._limits = replace(delivery.limits, num_expected=delivery.num_workers)
        self.base_seed = base_seed
        """What the workers' generators were seeded with when they started."""
        self.failure: Delivery | None = None
        """Why they give no more batches."""
        self._timeout_s = delivery.timeout_s or 0
        self.owner = ProcessOwner()
        self.has_stalled = False
        """Whether one of them has hung, so that they don't stay for another epoch."""
        self._notices: deque[str] = deque()
        self._metrics = metrics
        """Of the loader: it has other workers in other epochs."""
        if (pool := worker_options.torch.pool) is not None:
            mode = replace(worker_options.torch, kept=pool.deal(delivery.num_workers))
            worker_options = replace(worker_options, torch=mode)
        spec = WorkerSpec(worker_options, PlanSettings.of_seed(base_seed))
        self._starter = None if delivery.uses_threads else make_starter(spec, delivery)
        """None: the workers are threads."""
        executor = _make_executor(self._starter, spec, delivery, metrics, self._notices.append)
        settings = SchedulerSettings(
            self._limits,
            delivery.max_restarts,
            delivery.stall_warning_s,
            delivery.timeout_s,
            replaces_stalled=False,  # as torch: the user said how long he waits
            num_workers=delivery.num_workers,
        )
        self._dispatcher = Dispatcher(executor, Scheduler(settings), metrics=metrics, on_restart=self._note_restart)
        self.close = weakref.finalize(self, self._dispatcher.close)
        """Ends all processes and threads. Idempotent and thread-safe."""
        self._dispatcher.start()

    @property
    def num_workers(self) -> int:
        """How many there are, or will be once those that start or leave have done so."""
        return self._delivery.num_workers

    @property
    def max_in_flight(self) -> int:
        """How many batches may be built ahead of the loop."""
        return self._limits.max_in_flight

    def resize(self, num_workers: int) -> None:
        """Have so many workers from now on. Not for a stream. Returns at once. Any thread, one at a time.

        Raises `RuntimeError` if they are threads that each have a copy of the dataset, so there can't be more.
        """
        before = self._delivery
        given = before.max_in_flight
        chosen = None if given is None else given // before.num_workers * num_workers
        delivery = replace(before, num_workers=num_workers, max_in_flight=chosen)
        # Datasets that wait for each other when they begin have done so. Those of later workers can't.
        limits = replace(delivery.limits, num_expected=min(num_workers, self._limits.num_expected))
        self._dispatcher.resize(num_workers, limits)
        self._delivery, self._limits = delivery, limits

    def _note_restart(self, notice: str) -> None:
        """Record that a process is replaced. Any thread."""
        self._notices.append(notice)
        self._metrics.note_restart()

    def begin(self, source: WorkSource, base_seed: int, resume: Mapping[int, bytes] | None) -> None:
        """Begin an epoch. What is left of an earlier one is dropped."""
        self._dispatcher.begin(source, PlanSettings.of_seed(base_seed), resume)

    def next(self) -> Delivery:
        """Return the next batch, its error, or the end of all shards. Blocks.

        An error of no batch ends the processes: its traceback will refer to the loop, so nobody may wait for that to
        be freed. It comes again at each later call.
        """
        if self.failure is not None:
            return self.failure
        delivery = self._dispatcher.next_batch()
        self._issue_warnings()
        if delivery.error is not None:
            delivery = replace(delivery, error=with_torch_text(delivery.error, self._timeout_s))
        if isinstance(delivery.error, WorkerStalled):
            self.has_stalled = True  # the loop may wait again
        elif delivery.error is not None and delivery.work is None:
            self.failure = delivery
            self.close()
        delivery.keep()
        return delivery

    def end_pass(self) -> None:
        """Record that the loop met the end of its epoch. Loop's thread."""
        self._dispatcher.end_pass()

    @property
    def is_closed(self) -> bool:
        """Whether the processes were ended."""
        return not self.close.alive

    def processes(self) -> list[ProcessView]:
        """Return the worker processes, by id. None if the workers are threads."""
        found = [] if self._starter is None else self._starter.processes()
        return [ProcessView(number, process) for number, process in enumerate(found)]

    def _issue_warnings(self) -> None:
        while self._notices:
            warn(self._notices.popleft())

    def __repr__(self) -> str:
        return f"<LoaderWorkers {self._dispatcher!r}>"


def _make_executor(
    starter: Starter | None,
    spec: WorkerSpec,
    delivery: DeliveryOptions,
    metrics: Metrics,
    note: Callable[[str], None],
) -> Executor:
    """Return the place where batches are built. `note` gets warnings, on any thread."""
    if starter is not None:
        return make_executor(starter, metrics, _log_once, note=note)
    given = spec.options.dataset
    return ThreadExecutor(spec, delivery, metrics, copied(given) if spec.options.dataset_per_worker else given, note)


@cache
def _log_once(text: str) -> None:
    """Log what workers say when they start: for a stream they start in each epoch."""
    logger.debug(text)


def warm_root(loader: DataLoader[Any]) -> None:
    """Begin to import what worker processes will need, in the background."""
    own = OwnOptions.of(loader)
    if loader.num_workers and own.executor is None and not own.uses_threads(loader.num_workers):
        things = (type(loader.dataset), loader.collate_fn, loader.worker_init_fn)
        warm_up(start_method_of(loader), modules_of(*things))


def delivery_of(loader: DataLoader[Any]) -> DeliveryOptions:
    """Return how batches come to the loop, as the loader is now."""
    own = OwnOptions.of(loader)
    prefetch: int | None = loader.prefetch_factor
    chosen = None if prefetch in (None, DEFAULT_PREFETCH) else max(1, prefetch * loader.num_workers)
    return DeliveryOptions(
        num_workers=loader.num_workers,
        in_order=loader.in_order,
        max_in_flight=chosen,
        max_ready_per_worker=None,
        max_tasks=10,
        thread_per_worker=True,
        worker_type=own.worker_type,
        batch_decoder=None,
        timeout_s=loader.timeout or None,
        stall_warning_s=own.stall_warning_s,
        max_restarts=own.max_restarts,
        max_on_device=1,
        pin_memory=False,
        executor=own.executor,
    )


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What workers are started with."""

    worker_options: WorkerOptions
    delivery: DeliveryOptions

    @classmethod
    def of(
        cls,
        loader: DataLoader[Any],
        shard: StreamShard | None,
        pool: SegmentPool,
        *,
        rng: Rng,
        warns_of_draws: bool,
        snapshot_every: int,
    ) -> WorkerStart:
        """Return what the loader asks for as it is now.

        `pool`: memory of its earlier workers. `rng`: how worker processes seed. `warns_of_draws`: threads look whether
        the dataset draws where nothing seeds.
        """
        own = OwnOptions.of(loader)
        uses_threads, method = own.uses_threads(loader.num_workers), start_method_of(loader)
        mode = TorchMode(
            num_workers=loader.num_workers,
            worker_init_fn=init_of_workers(loader),
            is_stream=isinstance(loader.dataset, IterableDataset),
            auto_collation=loader._auto_collation,  # noqa: SLF001
            batch_size=loader.batch_size or 1,
            drop_last=loader.drop_last,
            snapshot_every=snapshot_every,
            persists=loader.persistent_workers,
            collate_functions=registered_functions(),
            shard=shard,
            pool=pool if method is StartMethod.FORK and can_fork() and not loader.persistent_workers else None,
        )
        workers = WorkerOptions(
            dataset_class=None,
            dataset_kwargs=None,
            dataset=loader.dataset,
            collate_fn=collate_to_send if loader.collate_fn is default_collate else loader.collate_fn,
            batch_encoder=None,
            rng=rng if not uses_threads else wanted_rng(loader) if warns_of_draws else Rng.NONE,
            on_error=OnError.RAISE,
            validate=False,
            start_method=method,
            dataset_per_worker=uses_threads and needs_copies(loader.dataset),
            torch=mode,
        )
        return cls(workers, delivery_of(loader))

    def spec(self, base_seed: int) -> WorkerSpec:
        """Return what is sent to the processes."""
        return WorkerSpec(self.worker_options, PlanSettings.of_seed(base_seed))

    def why_forked(self) -> str:
        """Return why the workers must be forks of this process; empty if they needn't, or can't."""
        return why_fork_is_needed(self.spec(0)) if self._may_fork else ""

    @property
    def _can_fork(self) -> bool:
        """Whether its workers are processes that may be forks of this one."""
        return self.delivery.uses_processes and self.delivery.executor is None and can_fork()

    @property
    def _may_fork(self) -> bool:
        return self._can_fork and self.worker_options.start_method is StartMethod.TEMPLATE

    def start(self, base_seed: int, metrics: Metrics, why_no_fork: str) -> LoaderWorkers:
        """Start them. `metrics` measures them.

        A dataset that can't be sent is shared by forking this process, as torch does. If that is known to hang,
        `why_no_fork` says so, and `ForkHangs` is raised.
        """
        options, reason = self.worker_options, self.why_forked()
        if self._can_fork and options.start_method is StartMethod.FORK:
            _warn_of_file(shared_file_of(options.dataset))
        assert options.torch is not None
        persist = options.torch.persists
        if not reason:
            try:
                return LoaderWorkers(options, self.delivery, base_seed, metrics, persist=persist)
            except EncodeError as error:
                if not self._may_fork:
                    raise
                reason = str(error)
        if why_no_fork:
            raise ForkHangs(f"{why_no_fork}\nNo fresh interpreter can take its place: {reason}")
        _tell_of_fork(reason)
        _warn_of_file(shared_file_of(options.dataset))
        forked = replace(options, start_method=StartMethod.FORK)
        return LoaderWorkers(forked, self.delivery, base_seed, metrics, persist=persist)


@cache
def _warn_of_file(name: str) -> None:
    """Warn that forks read from the same file. Once for the same file. Empty: there is none."""
    if name:
        warn(
            f"the dataset holds {name!r} open for reading, and forks share the position in it, so samples may be those "
            f"of other indices, as with torch. Open it in __getitem__, or give multiprocessing_context='forkserver' "
            f"and leave the file out in __getstate__"
        )


@cache
def _tell_of_fork(reason: str) -> None:
    """Log why workers are forked from this process. Once for the same reason."""
    logger.info(f"workers are forked from this process, because the dataset can't be sent to another one: {reason}")


class WorkerShelf:
    """Keeps the workers of a DataLoader with `persistent_workers` between two epochs."""

    def __init__(self) -> None:
        self._idle: LoaderWorkers | None = None
        self._is_open = True

    def take(self, shard: StreamShard | None) -> LoaderWorkers | None:
        """Return the workers that wait, if they are for this part of a stream; None if there are none."""
        idle, self._idle = self._idle, None
        if idle is None or idle.is_closed or not idle.owner.is_here():  # a fork of the process has the parent's
            return None
        if idle.shard == shard:
            return idle
        idle.close()
        return None

    def put(self, workers: LoaderWorkers) -> None:
        """Keep workers for the next epoch, or close them. Any thread."""
        idle, self._idle = self._idle, None
        usable = [one for one in (idle, workers) if one is not None and self._may_stay(one)]
        if usable:
            self._idle = max(usable, key=lambda one: one.serial)  # the latest: their datasets are the furthest
        for one in (idle, workers):
            if one is not None and one is not self._idle:
                one.close()

    def _may_stay(self, workers: LoaderWorkers) -> bool:
        can_work = workers.failure is None and not workers.has_stalled and not workers.is_closed
        return self._is_open and can_work and workers.persist

    def drop(self) -> None:
        """Close the workers that wait."""
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.close()

    def close(self) -> None:
        """Close the workers that wait, and later those that are in use now. Idempotent."""
        self._is_open = False
        self.drop()
