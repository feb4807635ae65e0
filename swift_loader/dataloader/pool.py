"""WorkerPool: worker processes that several DataLoaders share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from loguru import logger

from swift_loader.checks import check_integer
from swift_loader.dataloader.changes import fingerprint
from swift_loader.dataloader.randomness import rng_of
from swift_loader.dataloader.workers import LoaderWorkers, Marks, WorkerStart
from swift_loader.errors import EncodeError, LoaderClosed
from swift_loader.executors.processes import can_fork, make_pool, make_seats
from swift_loader.options import MAX_WORKERS, DeliveryOptions, WorkerType

if TYPE_CHECKING:
    from swift_loader.executors.pool.pool import ProcessPool
    from swift_loader.executors.pool.template import PoolDataset
    from swift_loader.executors.processes import Starter
    from swift_loader.worker.spec import WorkerOptions, WorkerSpec

__all__ = ["WorkerPool", "check_pool", "usable"]


class WorkerPool:
    """Worker processes that several DataLoaders share.

        pool = WorkerPool(num_workers=4)
        train = DataLoader(train_set, batch_size=32, shuffle=True, workers=pool)
        valid = DataLoader(valid_set, batch_size=64, workers=pool)

    Each loader gives the batches that it would give with `num_workers=4`, also if the loops over them are nested. The
    processes start with the first loop. They end with `close`, or when nobody refers to the pool or a loader of it.
    """

    def __init__(self, num_workers: int) -> None:
        """Start nothing yet.

        Args:
            num_workers: How many processes, at least 1.

        Raises:
            ValueError: It is out of its range.
            TypeError: It isn't an integer.
        """
        self._num_workers = check_integer("num_workers", num_workers, 1, MAX_WORKERS)
        self._loaders: WeakSet[Any] = WeakSet()
        self._late: WeakSet[Any] = WeakSet()
        """Those that were made after the processes had started, and whose datasets they don't share."""
        self._users: WeakSet[LoaderWorkers] = WeakSet()
        self._processes: ProcessPool | None = None
        """None before the first loop, and in a fork of the process that had it."""
        self._prepared: list[_Prepared] = []
        self._is_closed = False
        self._lock = threading.RLock()
        """Held while a loader begins. Not while it waits for its workers."""

    @property
    def num_workers(self) -> int:
        """How many processes it has once it has started."""
        return self._num_workers

    def close(self) -> None:
        """End all processes. A loop over a loader of this pool gets `LoaderClosed`. Idempotent."""
        self._is_closed = True
        self._end()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # For DataLoader ---------------------------------------------------------------------------------------------------

    def add(self, loader: Any) -> None:
        """Have the processes share the dataset of this loader, once they start. It isn't kept alive."""
        self._loaders.add(loader)
        if self._processes is not None:
            self._late.add(loader)

    def check_open(self) -> None:
        """Raise if the pool was closed.

        Raises:
            LoaderClosed: It was.
        """
        if self._is_closed:
            raise LoaderClosed("the WorkerPool was closed; make a new one, and loaders with it")

    def make_starter(self, spec: WorkerSpec, delivery: DeliveryOptions) -> Starter:
        """Return what gets a loader its workers: a seat on each process.

        Raises:
            EncodeError: The dataset or a function can't be sent.
            LoaderClosed: The pool was closed.
        """
        with self._lock:
            self.check_open()
            self._forget()
            dataset = self._take_prepared(spec.options)
            if dataset is None and self._should_start_over(spec.options):
                self._end()
            processes = self._made()
            dataset = dataset or processes.add(spec)
            self._prepare(processes, spec.options)
            return make_seats(processes, spec, delivery, dataset)

    def note(self, workers: LoaderWorkers) -> None:
        """Close these workers with the pool."""
        self._users.add(workers)

    def _forget(self) -> None:
        """Forget the processes of a parent of this process, and the datasets of loaders that are gone."""
        processes = self._processes
        if processes is None or not processes.owner.is_here():
            self._processes, self._prepared = None, []
            return
        for one in [one for one in self._prepared if one.loader() is None]:
            self._prepared.remove(one)
            processes.drop(one.dataset)

    def _made(self) -> ProcessPool:
        """Return the processes of the pool. They may not have started yet."""
        if self._processes is None:
            self._processes, self._prepared = make_pool(self._num_workers), []
            self._late.clear()
            weakref.finalize(self, self._processes.close)
        return self._processes

    def _should_start_over(self, options: WorkerOptions) -> bool:
        """Return whether new processes would share the dataset of a late loader, and no loader needs the old ones."""
        is_late = any(loader.dataset is options.dataset and Marks.of(loader).may_stay for loader in list(self._late))
        return is_late and all(workers.is_spare or not workers.close.alive for workers in list(self._users))

    def _end(self) -> None:
        """End all processes."""
        for workers in list(self._users):
            workers.close()
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()

    def _take_prepared(self, options: WorkerOptions) -> PoolDataset | None:
        """Return the dataset of these options, if it is as it was when the processes started."""
        found = next((one for one in self._prepared if one.is_of(options)), None)
        if found is None:
            return None
        self._prepared.remove(found)
        return found.dataset

    def _prepare(self, processes: ProcessPool, started: WorkerOptions) -> None:
        """Give the processes the datasets of the other loaders, if they haven't started yet, so that they share them.

        Workers of those that aren't as good as new after an epoch read their datasets themselves, for each epoch.
        """
        if processes.has_started:
            return
        others = [(loader, _start_of(loader)) for loader in list(self._loaders)]
        others = [(loader, start) for loader, start in others if start.marks.may_stay]
        itself = next((loader for loader, start in others if _are_equal(start.worker_options, started)), None)
        for loader, start in others:
            if loader is not itself and not start.why_forked():
                try:
                    dataset = processes.add(start.spec(0))
                except EncodeError:  # its workers will be forks of this process
                    continue
                options = start.worker_options
                self._prepared.append(
                    _Prepared(weakref.ref(loader), (options.rng, options.torch), _fingerprint(options), dataset)
                )

    # Copies -----------------------------------------------------------------------------------------------------------

    def __copy__(self) -> WorkerPool:
        return self

    def __deepcopy__(self, memo: Any) -> WorkerPool:
        return self  # a copy of a loader uses the same processes

    def __reduce__(self) -> Any:
        return WorkerPool, (self._num_workers,)

    def __repr__(self) -> str:
        return f"WorkerPool(num_workers={self._num_workers})"


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The dataset of a loader that hasn't begun an epoch yet. Keeps neither of them alive."""

    loader: weakref.ref[Any]
    how: tuple[Any, ...]
    """How batches are made of it."""
    fingerprint: int
    """Of the dataset and `collate_fn`."""
    dataset: PoolDataset
    """What the processes have."""

    def is_of(self, options: WorkerOptions) -> bool:
        """Return whether workers with these options would have the same."""
        loader = self.loader()
        return (
            loader is not None
            and loader.dataset is options.dataset
            and self.how == (options.rng, options.torch)
            and self.fingerprint == _fingerprint(options)
        )


def _start_of(loader: Any) -> WorkerStart:
    every = loader.snapshot_every_n_steps or 0
    return WorkerStart.of(loader, Marks.of(loader), rng=rng_of(loader), snapshot_every=every)


def _are_equal(one: WorkerOptions, other: WorkerOptions) -> bool:
    """Return whether options of DataLoaders are the same. `==` would compare the content of datasets."""
    return (
        one.dataset is other.dataset
        and one.collate_fn is other.collate_fn
        and (one.rng, one.torch) == (other.rng, other.torch)
    )


def _fingerprint(options: WorkerOptions) -> int:
    return fingerprint(options.dataset, options.collate_fn)


def check_pool(pool: WorkerPool | None, num_workers: int, starts: Mapping[str, Any], worker_type: Any) -> int:
    """Return how many workers a loader has.

    Args:
        pool: The loader's `workers`.
        num_workers: Its `num_workers`, 0 if it wasn't given.
        starts: Options that say how processes start, by name; None: not given.
        worker_type: What a worker is.

    Raises:
        TypeError: The pool isn't one.
        ValueError: Another option doesn't go with it.
    """
    if pool is None:
        return num_workers
    if not isinstance(pool, WorkerPool):
        raise TypeError(f"workers={pool!r} is a {type(pool).__name__}; give a WorkerPool, or num_workers=")
    if num_workers not in (0, pool.num_workers):
        raise ValueError(
            f"num_workers={num_workers} was given with a WorkerPool of {pool.num_workers}; leave num_workers out, or "
            f"make a pool of that size"
        )
    for name, given in starts.items():
        if given is not None:
            raise ValueError(
                f"{name} was given with a WorkerPool, which starts its processes in its own way; leave one of them out"
            )
    if worker_type != WorkerType.PROCESS:
        raise ValueError(
            f"worker_type={worker_type!r} was given with a WorkerPool, which has processes; leave one of them out"
        )
    return pool.num_workers


def usable(pool: WorkerPool | None) -> WorkerPool | None:
    """Return the pool; None where processes can't serve several loaders, as on macOS and Windows."""
    if pool is None or can_fork():
        return pool
    _tell_of_own_workers()
    return None


@cache
def _tell_of_own_workers() -> None:
    """Log once why a pool isn't used."""
    logger.info("a WorkerPool has processes on Linux only; here, each loader has workers of its own")
