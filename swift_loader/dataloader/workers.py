"""The workers of a DataLoader: new ones for each epoch, or the same with `persistent_workers`."""

from __future__ import annotations

import copy
import re
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from swift_loader.batch.collate import collate_to_send, registered_functions
from swift_loader.dataloader.options import delivery_of, pinning_of, rng_of, start_method_of, wanted_rng
from swift_loader.dataloader.state import DrawsState
from swift_loader.device.move import Target, find_target
from swift_loader.device.prefetch import PrefetchQueue
from swift_loader.device.streams import CopiesInFlight, Transfer
from swift_loader.engine.engine import Engine
from swift_loader.errors import EncodeError, ForkHangs, WorkerDied, WorkerStalled
from swift_loader.executors.base import Executor
from swift_loader.executors.executor import WorkerExecutor
from swift_loader.executors.process.reader import OnArrival
from swift_loader.executors.processes import has_own_processes, make_fleet, warm_up
from swift_loader.executors.threads import ThreadExecutor
from swift_loader.log import logger
from swift_loader.metrics.metrics import Metrics
from swift_loader.options import DeliveryOptions
from swift_loader.ranks.ranks import expected_ranks
from swift_loader.runtime import ProcessOwner
from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.sampling.plan import PlanSettings
from swift_loader.sampling.work import IndexWork, WorkSource
from swift_loader.scheduler.delivery import Delivery
from swift_loader.transport.segments import SegmentPool
from swift_loader.worker.fetch import OnError
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import StartMethod, WorkerOptions, WorkerSpec, modules_of
from swift_loader.worker.torch_worker import StreamShard, TorchMode


class Mover:
    """Moves the batches of a loader's epochs to its device, ahead of the loop. Does nothing if there is no device."""

    def __init__(self, where: tuple[Any, Any, Any], depth: int, metrics: Metrics) -> None:
        """Check `where`: device, `to_device` and `dtype`. But don't ask for the device: the program may fork later.

        `depth`: how many batches may be on the device ahead of the loop.
        """
        device, *how = where
        self._where = where
        self.depth = 0 if device is None else depth
        if device is not None:
            with suppress(RuntimeError):  # else it is unknown, as `find_target` says
                torch.device(device)
                device = "cpu"
        find_target(device, *how, pin_memory=False)
        self.metrics = metrics
        self._idle: list[CopiesInFlight] = []
        """Those of epochs that were left. Later ones use their streams, and so the memory that these have there."""
        self._owner = ProcessOwner()

    @cached_property
    def target(self) -> Target | None:
        """Where batches go. Known when the first epoch begins."""
        return find_target(*self._where, pin_memory=False)

    def ahead(self, epoch: Any, take: Callable[[], Delivery], is_ready: Callable[[], bool]) -> Callable[[], Delivery]:
        """Return what returns a `LoaderSource`'s next batch, on the device, the error in its place, or the end.

        A batch is taken ahead of the loop only if it `is_ready`. Once nobody refers to the function any more, the
        batches ahead are dropped, after their copies are over.
        """
        if (target := self.target) is None:
            return take
        source = _EpochSource(self.metrics, target, epoch.draws.begun, epoch.num_yielded, take, is_ready)
        copies = self._idle.pop() if self._idle else CopiesInFlight(target.make_stream(), self.depth)
        queue = PrefetchQueue(source, copies, self.depth, in_background=target.moves_in_background)
        queue.goes_on = True
        weakref.finalize(queue, self._end_copies, copies)
        return queue.take

    def _end_copies(self, copies: CopiesInFlight) -> None:
        if self._owner.is_here():  # a fork of the trainer has no running copies
            with suppress(Exception):  # a device error: its next user gets it too
                copies.wait()
                self._idle.append(copies)


@dataclass
class _EpochSource:
    """The batches of an epoch on the host. It doesn't refer to the epoch, which refers to it."""

    metrics: Metrics
    target: Target
    begun: DrawsState
    num_pulled: int
    next: Callable[[], Delivery]
    is_ready: Callable[[], bool]

    def take(self) -> Delivery:
        """Return the next batch, the error in its place, or the end."""
        delivery = self.next()
        self.num_pulled += delivery.error is None
        return delivery

    def move(self, delivery: Delivery, transfer: Transfer) -> Any:
        """Return a batch on the device."""
        began_ns = time.perf_counter_ns()
        try:
            moved = self.target.move(delivery.batch, transfer)
        except StopIteration as stop:
            raise RuntimeError("to_device raised StopIteration, which would end the epoch early") from stop
        self.metrics.note_copy(delivery.number, time.perf_counter_ns() - began_ns)
        return moved

    def key_of(self, delivery: Delivery) -> int:
        """Return the key of the batch that was taken last. A resume draws the same, and counts a stream's batches."""
        batch = delivery.work.step if isinstance(delivery.work, IndexWork) else self.num_pulled - 1
        place = self.begun.epoch, batch, expected_ranks(None).rank
        return derive_key(self.begun.base_seed, Purpose.DEVICE.value, *place)


def start_workers(
    loader: Any, shard: StreamShard | None, pool: SegmentPool, base_seed: int, *, is_first: bool
) -> LoaderWorkers:
    """Start workers as a `swift_loader.DataLoader` is now.

    Raises `EncodeError` if the dataset can't be sent to processes that aren't forks, `ForkHangs` if forks hang, too.
    `pool`: memory of its earlier workers. `is_first`: in their first epoch, threads look whether the dataset
    draws where nothing seeds.
    """
    delivery, method = delivery_of(loader), start_method_of(loader)
    uses_threads = delivery.uses_threads
    mode = TorchMode(
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        is_stream=isinstance(loader.dataset, IterableDataset),
        auto_collation=loader._auto_collation,  # noqa: SLF001
        batch_size=loader.batch_size or 1,
        drop_last=loader.drop_last,
        snapshot_every=getattr(loader, "snapshot_every_n_steps", None) or 0,
        persists=loader.persistent_workers,
        collate_functions=registered_functions(),
        shard=shard,
        pool=pool if method is StartMethod.FORK and has_own_processes() and not loader.persistent_workers else None,
    )
    if loader.dataset is None or isinstance(loader.dataset, type):
        what = "None" if loader.dataset is None else f"the class {loader.dataset.__name__}"
        raise TypeError(f"dataset is {what}; give an instance of a dataset")
    collate_fn = collate_to_send if loader.collate_fn is default_collate else loader.collate_fn
    rng = rng_of(loader) if not uses_threads else wanted_rng(loader) if is_first else Rng.NONE
    options = WorkerOptions(
        dataset=loader.dataset,
        collate_fn=collate_fn,
        rng=rng,
        on_error=OnError(loader.on_error),
        start_method=method,
        torch=mode,
    )
    if uses_threads and needs_copies(loader.dataset):
        options = replace(options, dataset_per_worker=True)
    try:
        return LoaderWorkers(options, delivery, base_seed, loader._mover, pinning_of(loader, receives=True))  # noqa: SLF001
    except EncodeError as error:
        if not (why := loader._why_no_fork):  # noqa: SLF001
            raise
        reason = str(error).partition(". Open files")[0]  # then comes how to fork
        raise ForkHangs(f"{why}\nNo fresh interpreter can take its place: {reason}") from error


def warm_root(loader: DataLoader[Any]) -> None:
    """Begin to import what worker processes will need, in the background."""
    delivery = delivery_of(loader)
    if delivery.uses_processes and delivery.executor is None:
        things = (type(loader.dataset), loader.collate_fn, loader.worker_init_fn)
        warm_up(start_method_of(loader), modules_of(*things))


def needs_copies(dataset: Any) -> bool:
    """Return whether each thread needs a dataset of its own, as each process has one.

    It does if iterating changes the dataset: a stream may be its own iterator, and a state tells what one worker did.
    """
    return isinstance(dataset, IterableDataset) or hasattr(dataset, "state_dict")


class LoaderWorkers:
    """The workers of one DataLoader, from their start to `close`. Any thread may call `close` and `resize`.

    An epoch that uses them refers to them, and with `persistent_workers` the loader does. They end with the last of
    these references.
    """

    def __init__(
        self,
        worker_options: WorkerOptions,
        delivery: DeliveryOptions,
        base_seed: int,
        mover: Mover,
        pin: OnArrival | None,
    ) -> None:
        """Start the workers, and wait until there is a dataset for them.

        `mover`: of the loader, for all epochs. `pin`: page-locks each batch, if nobody moves it; None: nothing does.
        """
        metrics, self._mover = mover.metrics, mover
        mode = worker_options.torch
        assert mode is not None
        self.persist = mode.persists
        """Whether they serve later epochs too."""
        self.shard = mode.shard
        """This rank's part of a stream that the loader shares out."""
        self._delivery = delivery
        """`resize` replaces it and the limits."""
        self.limits = replace(delivery.limits, num_expected=delivery.num_workers)
        self.base_seed = base_seed
        """What the workers' generators were seeded with when they started."""
        self.failure: Delivery | None = None
        """Why they give no more batches."""
        self._owner = ProcessOwner()
        self._has_stalled = False
        """Whether one of them has hung, so that they don't stay for another epoch."""
        notices = deque[str]()
        if mode.pool is not None:
            worker_options = replace(worker_options, torch=replace(mode, kept=mode.pool.deal(delivery.num_workers)))
        spec = WorkerSpec(worker_options, PlanSettings.of_seed(base_seed))
        self.fleet = None if delivery.uses_threads else make_fleet(spec, delivery)
        """The worker processes. None if the workers are threads."""
        target, page_lock, on_arrival = mover.target, None, pin
        if target is not None:
            if self.fleet is not None and self.fleet.has_segments:
                page_lock = target.make_page_lock(notices)
            on_arrival = target.on_arrival(notices, is_locked=page_lock is not None)
        executor: Executor
        if self.fleet is not None:
            executor = WorkerExecutor(self.fleet, metrics, _log_once, notices, page_lock, on_arrival)
        else:
            given = worker_options.dataset
            dataset = _copied(given) if worker_options.dataset_per_worker else given
            executor = ThreadExecutor(spec, delivery, metrics, dataset, notices, on_arrival)
        # As torch, it kills no worker that takes too long: the user said how long he waits.
        settings = replace(delivery.scheduling, limits=self.limits, replaces_stalled=False)
        self.engine = Engine(executor, settings, metrics, notices)
        self.next = self.engine.take
        """Returns the next batch, the error in its place, see `explained`, or the end of all shards. Blocks."""
        self.is_ready = self.engine.is_ready
        """Returns whether it wouldn't block."""
        self.end_pass = self.engine.end_pass
        """Records that the loop met the end of its epoch. Loop's thread."""
        self.close = weakref.finalize(self, self.engine.close)
        """Ends all processes and threads. Idempotent and thread-safe."""
        self.engine.start()

    @property
    def num_ahead(self) -> int:
        """How many batches may be built, ready or moved ahead of the loop."""
        return self.limits.max_in_flight + self._mover.depth

    @property
    def may_stay(self) -> bool:
        """Whether they can serve another epoch. A fork of the process has the parent's workers, which it can't use."""
        can_work = self.close.alive and self.failure is None and not self._has_stalled
        return self.persist and can_work and self._owner.is_here()

    def fit(self, loader: DataLoader[Any]) -> bool:
        """Become as many as the loader has now. False: an epoch needs new ones, since each has its own dataset."""
        dataset = loader.dataset
        if self._delivery.num_workers == loader.num_workers:
            return True
        if isinstance(dataset, IterableDataset) or (self._delivery.uses_threads and needs_copies(dataset)):
            return False
        self.resize(loader.num_workers)
        return True

    def resize(self, num_workers: int) -> None:
        """Have so many workers from now on. Not for a stream. Returns at once. Any thread, one at a time.

        Raises `RuntimeError` if they are threads that each have a copy of the dataset, so there can't be more.
        """
        before = self._delivery
        given = before.max_in_flight
        chosen = None if given is None else given // before.num_workers * num_workers
        delivery = replace(before, num_workers=num_workers, max_in_flight=chosen)
        # Datasets that wait for each other when they begin have done so. Those of later workers can't.
        limits = replace(delivery.limits, num_expected=min(num_workers, self.limits.num_expected))
        self.engine.resize(num_workers, limits)
        self._delivery, self.limits = delivery, limits

    def begin(self, source: WorkSource, base_seed: int, resume: Mapping[int, bytes] | None) -> None:
        """Begin an epoch. What is left of an earlier one is dropped."""
        self.engine.begin(source, PlanSettings.of_seed(base_seed), resume)

    def explained(self, delivery: Delivery) -> Delivery:
        """Return an error that `next` gave, in torch's words.

        An error of no batch, other than a stall, ends the processes: its traceback will refer to the loop, so nobody
        may wait for that to be freed. It comes again at each later call.
        """
        if self.failure is not None:
            return replace(self.failure)
        if delivery.error is not None:
            delivery.error = _with_torch_text(delivery.error, self._delivery.timeout_s or 0)
        if isinstance(delivery.error, WorkerStalled):
            self._has_stalled = True  # the loop may wait again
        elif delivery.error is not None and delivery.work is None:
            self.failure = replace(delivery)
            self.close()
        return delivery

    def __repr__(self) -> str:
        return f"<LoaderWorkers {self.engine!r}>"


def _copied(dataset: Any) -> Any:
    try:
        return copy.deepcopy(dataset)
    except Exception as error:
        raise TypeError(
            f"the dataset, a {type(dataset).__name__}, can't be copied ({error}). With worker_type='thread', an "
            f"IterableDataset or a dataset with a state_dict is copied for each worker; give it a __deepcopy__, or "
            f"worker_type='process'"
        ) from error


@cache
def _log_once(text: str, level: str = "DEBUG") -> None:
    """Log what is said when workers start, once: they start in each epoch."""
    logger.log(level, text)


# A failure's text begins as torch's: programs and log filters look for that -------------------------------------------

_PID = re.compile(r"\bpid (\d+)")
_SIGNAL = re.compile(r"\bwas ended by (SIG\w+)")


def _with_torch_text(error: BaseException, timeout_s: float) -> BaseException:
    """Return the same error with what torch says in front, if it is about a worker that died or took too long."""
    if isinstance(error, WorkerStalled):
        text = f"DataLoader timed out after {timeout_s:g} seconds"
    elif isinstance(error, WorkerDied) and not isinstance(error, ForkHangs):
        text = _torch_text(str(error))
    else:
        return error
    told = type(error)(f"{text}: {error}")
    told.__cause__ = error.__cause__
    return told


def _torch_text(text: str) -> str:
    pid, ended_by = _PID.search(text), _SIGNAL.search(text)
    if pid is None:
        return "DataLoader worker exited unexpectedly"
    if ended_by is None:
        return f"DataLoader worker (pid(s) {pid[1]}) exited unexpectedly"
    name = signal.strsignal(signal.Signals[ended_by[1]])
    return f"DataLoader worker (pid {pid[1]}) is killed by signal: {name}"
