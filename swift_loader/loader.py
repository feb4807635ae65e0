"""SwiftLoader: the API of the README. Runs in the trainer; imports torch only if a device is given."""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.agreement import agree_on_length, agree_on_run, report_failure
from swift_loader.bad_samples import BadSamples, SampleFailure, delivered_batch
from swift_loader.config import check_collate, check_epoch, check_rank, make_options
from swift_loader.device.destination import find_destination
from swift_loader.engine.pool import WorkerPool
from swift_loader.errors import LoaderClosed
from swift_loader.iterator import EpochIterator, OpenEpoch, Turns
from swift_loader.notices import warn
from swift_loader.placement import expected_placement, find_placement
from swift_loader.plan import BatchPlan, Plan, PlanSettings
from swift_loader.run import Run
from swift_loader.sampler import EpochSampler
from swift_loader.session import Session
from swift_loader.unknown_options import refuse_unknown
from swift_loader.worker.generators import preserved_generators
from swift_loader.worker.seeding import Rng
from swift_loader.worker.setup import length_of
from swift_loader.worker.torch_settings import limited_threads

if TYPE_CHECKING:
    from types import TracebackType

    import torch

__all__ = ["SwiftLoader"]


class LoaderState(Enum):
    """NEW ─start or first next─► STARTED ─► CLOSED."""

    NEW = "not started"
    STARTED = "started"
    CLOSED = "closed"


class SwiftLoader:
    """Batches of a map-style dataset, built by worker processes.

    Iterate over it once per epoch. Workers start with `start()`, or with the first iteration, and keep working across
    the ends of epochs until `close()`; as a context manager, the loader closes itself.
    """

    def __init__(
        self,
        dataset_class: Callable[..., Any] | None = None,
        dataset_kwargs: Mapping[str, Any] | None = None,
        batch_size: int = 1,
        nb_consumer: int | None = None,
        worker_per_consumer: int = 1,
        shuffle: bool = True,
        *,
        dataset: Any = None,
        seed: int | None = None,
        drop_last: bool = False,
        uneven: str = "pad",
        in_order: bool = True,
        timeout: float | None = None,
        stall_warning: float | None = 60.0,
        worker_restarts: int = 3,
        data_queue_size: int | None = None,
        message_queue_size: int = 10,
        max_buffer_size: int | None = None,
        nearby_shuffle: int | None = None,
        rng: str | None = "sample",
        on_error: str = "raise",
        max_errors: float | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        batch_encoder: Callable[[Any], bytes] | None = None,
        batch_decoder: Callable[[bytes], Any] | None = None,
        logger: str | Mapping[str, Any] | None = None,
        benchmark: bool = True,
        benchmark_file: str | os.PathLike[str] | None = None,
        validate: bool = True,
        multithread: bool = True,
        max_nb_batch_on_device: int = 1,
        pin_memory: bool = False,
        start_method: str = "template",
        dataset_per_worker: bool = False,
        **unknown: Any,
    ) -> None:
        """Check the options; starts nothing.

        Args:
            dataset_class: Class or function that returns a map-style dataset; called in the template process.
            dataset_kwargs: Its keyword arguments.
            batch_size: Samples per batch and consumer.
            nb_consumer: Consumers (GPUs, ranks) the dataset is split over. By default as many as torch.distributed has
                processes, else as the launcher has (torchrun, mpirun, srun), else 1.
            worker_per_consumer: Worker processes per consumer; 0 builds batches in the calling thread, for debugging.
            shuffle: Whether each epoch visits the samples in another order.
            dataset: An instance, instead of `dataset_class`.
            seed: Base of all randomness. By default that of torch's generator if torch is imported: what the program
                gave to `torch.manual_seed` or `seed_everything`, else what torch has drawn for this process. So loaders
                made without `seed` have the same one, until torch is seeded again. Without torch, from the clock. Ranks
                take rank 0's if torch.distributed is up. The old spelling `seed_numer` is accepted.
            drop_last: Leave out the last batch if it would be smaller than the others.
            uneven: What becomes of samples that can't be split evenly over consumers: `"pad"` repeats some, `"drop"`
                leaves some out, `"exact"` lets consumers differ.
            in_order: False: within an epoch, deliver batches as they get ready.
            timeout: Seconds that a worker may take for a batch that the loop waits for: then it is killed and replaced,
                within `worker_restarts`, and past that `WorkerStalled` is raised. None or 0: no limit.
            stall_warning: Seconds of the same after which there is a warning, with the worker's Python stack; None or
                0: never.
            worker_restarts: How many times in a row, with no batch in between, a worker that died is replaced by
                another one, which builds what was lost; past that `WorkerDied` is raised. 0: at the first death.
            data_queue_size: Batches in flight per consumer: to be built, being built, or waiting for the loop. They
                take at most so many times the memory of a batch; `repr` says how much that is. By default
                `max(10, 3 * worker_per_consumer)`, or `max(10, 2 * worker_per_consumer)` with `in_order=False`. With
                fewer than there are workers, some are always idle, and `start()` warns.
            message_queue_size: Tasks that may wait in a worker's pipe.
            max_buffer_size: Decoded batches waiting per worker; a worker with so many gets no further task. By default
                `max(2, data_queue_size // worker_per_consumer + 1)`.
            nearby_shuffle: Samples that are shuffled together, in runs of neighbours from all over the dataset; 0
                shuffles over everything. By default `350 * max(batch_size, 32)`, in runs of 8: batches are mixed like
                those of a uniform shuffle, and what is read once is still in the page cache when its neighbours are
                wanted. A smaller window is more local and mixes less.
            rng: `"sample"` seeds `random`, `numpy.random` and torch's default generator by (seed, epoch, dataset index)
                before each sample; `"worker"` once per worker: which one builds a batch differs from run to run; None
                leaves them alone.
            on_error: What becomes of a sample whose `__getitem__` raises: `"raise"` raises its error; `"skip"` leaves
                it out of its batch; `"replace"` puts another one in its place, chosen by (seed, epoch, index) alone.
            max_errors: How many samples may fail in an epoch of this rank before `TooManyErrors` is raised: an integer
                counts samples, a float between 0 and 1 is a fraction of the rank's samples; None is no limit. Counted
                from the epoch's beginning, or from where a resumed run goes on.
            collate_fn: Makes a batch of a list of samples; by default `swift_loader.default_collate`. If it has a
                parameter `memory`, it gets the `BatchMemory` that batches are sent in, and what it makes there isn't
                copied any more.
            batch_encoder: Makes bytes of a batch, in the worker.
            batch_decoder: Makes a batch of these bytes, in the trainer.
            logger: Prefix of a log file, or a dict with `path`, `stdout` and `level`.
            benchmark: Take the times of the stages; see `report`.
            benchmark_file: Where these go on `close()`, as JSON; by default to the log, if there is one.
            validate: Have a worker build the first batch of the first epoch before `start()` returns. With
                `on_error="raise"` it isn't built again if the loop begins with it.
            multithread: Listen to each worker on a thread of its own; False: one thread for all.
            max_nb_batch_on_device: Batches on the device ahead of the loop.
            pin_memory: Without a device, copy batches into memory that torch has page-locked, for a loop that moves
                them by itself. Numeric arrays become tensors, also where there is no CUDA device and nothing is
                page-locked. With a device, batches are read from page-locked memory in any case.
            start_method: `"template"` forks workers from a fresh interpreter; `"spawn"` starts an interpreter for each.
            dataset_per_worker: Have each worker build its own dataset instead of sharing the template's.
            unknown: Refused.

        Raises:
            TypeError: An unknown option, or a value of the wrong type.
            ValueError: A value out of its range.
        """
        if "seed_numer" in unknown:
            old_seed = unknown.pop("seed_numer")
            if seed is not None:
                raise TypeError("seed and seed_numer, its old spelling, were both given; give one")
            seed = old_seed
        refuse_unknown(unknown, "SwiftLoader", SwiftLoader.__init__, "seed_numer")
        self._options = make_options(
            dataset_class=dataset_class,
            dataset_kwargs=dataset_kwargs,
            dataset=dataset,
            batch_size=batch_size,
            nb_consumer=nb_consumer,
            worker_per_consumer=worker_per_consumer,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            uneven=uneven,
            in_order=in_order,
            data_queue_size=data_queue_size,
            message_queue_size=message_queue_size,
            max_buffer_size=max_buffer_size,
            nearby_shuffle=nearby_shuffle,
            rng=rng,
            on_error=on_error,
            max_errors=max_errors,
            collate_fn=collate_fn,
            batch_encoder=batch_encoder,
            batch_decoder=batch_decoder,
            logger=logger,
            benchmark=benchmark,
            benchmark_file=benchmark_file,
            validate=validate,
            multithread=multithread,
            max_nb_batch_on_device=max_nb_batch_on_device,
            pin_memory=pin_memory,
            timeout=timeout,
            stall_warning=stall_warning,
            worker_restarts=worker_restarts,
            start_method=start_method,
            dataset_per_worker=dataset_per_worker,
        )
        self._reset()

    def _reset(self) -> None:
        self._state = LoaderState.NEW
        self._session: Session | None = None
        self._close: weakref.finalize[Any, Any] | None = None
        self._pool: WorkerPool | None = None
        """Until `start()` takes it over."""
        self._current: weakref.ref[EpochIterator] | None = None
        self.turns = Turns()
        """Of the threads that ask for batches. Used by the iterators."""
        self._run = Run(self._options.order_settings(), self._options.chosen)
        self._last_step: int | None = None
        self._last_failures: tuple[SampleFailure, ...] = ()
        self._bad_samples = BadSamples(self._options.max_errors)
        self._dataset: Any = self._options.source.instance

    # Life -------------------------------------------------------------------------------------------------------------

    def start(
        self,
        consumer_index: int | None = None,
        device: torch.device | str | int | None = None,
        to_device: Callable[..., Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Start the workers of one consumer; they begin to build batches at once.

        Blocks until the dataset stands and, with `validate`, a trial batch has arrived.

        Args:
            consumer_index: Which part of the dataset is this process's: its rank, below `nb_consumer`. By default what
                torch.distributed says, else the launcher's environment.
            device: Where batches are to be moved, all numeric arrays as tensors, also with `"cpu"`; None leaves batches
                as the collate made them. On a GPU, batches arrive `max_nb_batch_on_device` ahead of the loop, copied on
                a stream of their own from memory that is page-locked once.
            to_device: `to_device(batch, device)` moves a batch instead of the default, once; what it does on the
                current stream runs beside the loop's work. Random numbers it draws can be keyed by `batch_key()`.
            dtype: What floating-point tensors are converted to on the device.

        Raises:
            RuntimeError: It is running already; or there are several consumers, and nobody says which one this is.
            ValueError: The ranks were given different options or datasets.
            StateMismatch: The dataset isn't as long as that of the loaded state.
            LoaderClosed: It was closed.
            WorkerDied: A process ended while starting.
            Exception: What building the dataset or the trial batch raised.
        """
        if self._state is LoaderState.CLOSED:
            raise LoaderClosed("the loader was closed; make a new one to go on")
        if self._state is LoaderState.STARTED:
            raise RuntimeError("the loader runs already; call start() once, before the first iteration, or not at all")
        placement = find_placement(check_rank(consumer_index), self._options.world_size)
        destination = find_destination(device, to_device, dtype, pin_memory=self._options.pin_memory)
        is_made_here = self._options.made_in_pid == os.getpid()
        agree_on_run(self._run, placement, self._options.facts(), is_made_here=is_made_here)
        plan = self._options.plan_settings(self._run.order, placement)
        try:
            if self._options.in_flight.warning:
                warn(self._options.in_flight.warning)
            dataset = self.dataset if not self._options.num_workers else None
            session = Session(self._options, plan, destination, dataset=dataset, pool=self._take_pool(plan))
            self._close = weakref.finalize(self, session.close)  # another thread may close it while it starts
            if self._closed_meanwhile():
                raise LoaderClosed("the loader was closed while it started")
            session.start()
        except BaseException as error:
            if self._close is not None:
                self._close()
            report_failure(placement, error)
            raise
        try:
            agree_on_length(placement, session.engine.num_samples)
            self._run.note_length(session.engine.num_samples)  # raises on all ranks, or on none
        except BaseException:
            session.close()
            raise
        self._session = session
        if self._closed_meanwhile():
            self.close()
            raise LoaderClosed("the loader was closed while it started")
        self._state = LoaderState.STARTED
        session.aim(self._run.progress.next_begin(session.engine.num_samples))

    def prepare(self) -> None:
        """Begin to import and build the dataset, in another process, and return at once.

        Call it as early as the dataset is known: what follows (building the model, say) then hides the time that a
        fresh interpreter takes to import torch. `start()` goes on from there, unless working directory, environment or
        import path have changed since. Does nothing with 0 workers, or if the loader has started.

        Raises:
            LoaderClosed: It was closed.
            EncodeError: The dataset, or a callable, can't be sent to another process.
        """
        if self._state is LoaderState.CLOSED:
            raise LoaderClosed("the loader was closed; make a new one to go on")
        if self._state is LoaderState.NEW and self._pool is None and self._options.num_workers:
            pool = self._make_pool()
            try:
                pool.begin()
            except BaseException:
                self._drop_pool()
                raise

    def _closed_meanwhile(self) -> bool:
        return self._state is LoaderState.CLOSED

    def close(self) -> None:
        """Stop everything and give everything back, within 5 s. Idempotent; batches the user has stay valid."""
        self._state = LoaderState.CLOSED
        if self._close is not None:
            self._close()
        try:
            if self._session is not None:
                self._session.tell()
        finally:
            self.warn_of_failures()

    def with_collate_fn(self, collate_fn: Callable[..., Any] | None) -> SwiftLoader:
        """Close this loader, and return one with another `collate_fn`, which hasn't started.

        Its first pass is the one that would have been the next of this one: after a `break`, that is the next epoch.
        What was prefetched with the old function is dropped, and an iterator in use can't go on.
        """
        successor = SwiftLoader.__new__(SwiftLoader)
        successor._options = replace(self._options, collate_fn=check_collate(collate_fn))  # noqa: SLF001 - of this class
        successor._reset()  # noqa: SLF001
        successor._run, successor._dataset = self._run, self._dataset  # noqa: SLF001
        self._supersede()
        self.close()
        return successor

    def __enter__(self) -> SwiftLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Iteration --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> EpochIterator:
        """Return an iterator over the next epoch; it begins, and any other one ends, with its first `next`."""
        return EpochIterator(self)

    def __len__(self) -> int:
        """Batches of the epoch that the loop is in, or else of the next one; those already delivered included.

        All epochs have equally many, but for one that was begun with another `batch_size` or `nb_consumer`: it counts
        what was delivered before in batches of the present size. Before `start()` this may have to build the dataset.
        """
        plan, epoch = self._next_plan()
        return plan.num_batches(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, 0 or more, that the next pass is: it decides the order. The pass after it is the next.

        The epoch of a loaded state goes on where that was saved; any other begins with its first batch. Choosing the
        epoch that the loop is in changes nothing before the next pass, which repeats it if this one wasn't finished.
        """
        self._run.progress.choose_epoch(check_epoch(epoch))

    def state_dict(self) -> dict[str, int]:
        """Return where the loop is, as plain integers: the same on every rank, and as small for any dataset.

        Counts what the loop was given, not what is prefetched. Starts nothing, and can be called before `start()`,
        between two batches, after `break`, at the end of an epoch, and after `close()`.

        Raises:
            RuntimeError: In the middle of an epoch with `in_order=False`: there, no position tells what was delivered.
        """
        progress = self._run.progress
        if not self._options.limits.in_order and progress.is_in_midst:
            raise RuntimeError(
                "with in_order=False, batches are delivered as they get ready, and no position in the epoch tells "
                "which ones are left; save at the end of an epoch, or use in_order=True"
            )
        return self._run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader's `state_dict()` was taken, with the next pass.

        `worker_per_consumer`, `nb_consumer` and `batch_size` may be others than they were: what follows are the rest of
        the same permutation, and then the epochs of the same seed. An iterator in use can't go on. To be called by the
        loop's thread.

        Raises:
            LoaderClosed: It was closed.
            TypeError: It isn't a dict.
            StateMismatch: It belongs to another dataset or order; names the field, the saved and the present value.
        """
        if self._state is LoaderState.CLOSED:
            raise LoaderClosed("the loader was closed; make a new one to go on")
        self._run.load_state_dict(state)
        self._last_step = None
        self._supersede()
        if self._session is not None:
            self._session.follow(self._run.order)
            self._session.aim(self._run.progress.next_begin(self._session.engine.num_samples))

    def open_epoch(self, iterator: EpochIterator) -> OpenEpoch:
        """Begin the next epoch for an iterator. Called by the iterator."""
        if self._state is LoaderState.CLOSED:
            raise LoaderClosed("the loader was closed; make a new one to go on")
        if self._session is None:
            self.start()
        assert self._session is not None
        self._supersede()
        self._current = weakref.ref(iterator)
        begin = self._run.progress.next_begin(self._session.engine.num_samples)
        opened = self._session.open_epoch(begin)
        plan = self._session.plan
        self._run.progress.begin(begin, plan, opened.first_step)
        self._bad_samples.begin(begin.epoch, plan.num_samples(begin.epoch))
        self._last_step = None
        return opened

    def note_failures(self, failures: tuple[SampleFailure, ...]) -> None:
        """Take note of the samples that the next batch does without. Called by the iterator.

        Raises:
            TooManyErrors: They are more than `max_errors` allows.
        """
        self._bad_samples.note(failures)

    def warn_of_failures(self) -> None:
        """Warn of the samples that failed in the pass so far, once. Called by the iterator, and on `close()`."""
        self._bad_samples.warn()

    def note_delivery(self, step: int | None, num_steps: int, failures: tuple[SampleFailure, ...]) -> None:
        """Take note of what the loop has got. Called by the iterator."""
        self._last_step, self._last_failures = step, failures
        self._run.progress.advance(num_steps)

    def note_end(self) -> None:
        """Take note that the loop has seen the end of the epoch. Called by the iterator."""
        self._run.progress.end()
        assert self._session is not None
        self._session.tell()

    def _supersede(self) -> None:
        previous = self._current() if self._current is not None else None
        if previous is not None:
            previous.supersede()

    # What it is -------------------------------------------------------------------------------------------------------

    @property
    def dataset(self) -> Any:
        """The dataset: the instance that was given, else one built here on first use, beside the workers'."""
        if self._dataset is None:
            rng = self._options.rng
            with nullcontext() if rng is Rng.NONE else preserved_generators(), limited_threads(1):
                self._dataset = self._options.source.make(rng)
        return self._dataset

    @property
    def batch_size(self) -> int:
        """Samples per batch and consumer."""
        return self._options.batch_size

    @property
    def collate_fn(self) -> Callable[..., Any] | None:
        """What makes a batch of a list of samples; None is `default_collate`."""
        return self._options.collate_fn

    @property
    def has_started(self) -> bool:
        """Whether there are workers, or were before `close()`."""
        return self._session is not None

    @property
    def num_padding(self) -> int:
        """How many samples at the end of the batch delivered last are repeats, with `uneven="pad"`.

        `loss[:len(loss) - loader.num_padding]` counts every sample once.
        """
        last = self._last_batch()
        return 0 if last is None else last.num_padding

    @property
    def batch_indices(self) -> NDArray[np.int64]:
        """The dataset indices of the batch delivered last, `(n,)`; empty before the first.

        Without those that were left out by `on_error="skip"`, and with the replacements of `on_error="replace"`.
        """
        last = self._last_batch()
        return np.empty(0, np.int64) if last is None else last.indices

    @property
    def failures(self) -> list[SampleFailure]:
        """The samples that failed so far, with `on_error="skip"` or `"replace"`: the last 1,000, oldest first.

        Those of the batches that the loop was given, and of one that was refused because of `max_errors`; not those of
        batches that were prefetched.
        """
        return self._bad_samples.kept

    def _last_batch(self) -> BatchPlan | None:
        if self._last_step is None:
            return None
        return delivered_batch(self._run.progress.batch(self._last_step), self._last_failures)

    @property
    def sampler(self) -> EpochSampler:
        """What frameworks look for: its `set_epoch` is the loader's. A new object each time, which keeps the loader."""
        return EpochSampler(self.set_epoch, self._next_plan)

    @property
    def batch_sampler(self) -> None:
        """None: there is no sampler of batches. Lightning asks."""

    def report(self) -> dict[str, Any]:
        """Return the times of the stages so far, as plain JSON types; empty with `benchmark=False`."""
        return self._session.metrics.report() if self._session is not None else {}

    def __repr__(self) -> str:
        options, session = self._options, self._session
        name = self._state.value if session is None else f"{self._state.value}, {session!r}"
        batch_nbytes = 0 if session is None else session.engine.largest_batch_nbytes
        queue = f", data_queue_size={options.in_flight.describe(batch_nbytes)}" if options.num_workers else ""
        return (
            f"<SwiftLoader {name}; batch_size={options.batch_size}, nb_consumer={options.world_size}, "
            f"worker_per_consumer={options.num_workers}{queue}, shuffle={options.shuffle}, {self._run.progress!r}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._state is not LoaderState.NEW:
            raise TypeError(f"a loader that is {self._state.value} can't be pickled; pickle it before start()")
        try:
            options = pickle.dumps(self._options)
        except Exception:  # a lambda, a local class: pickle says so in many ways
            import dill

            options = dill.dumps(self._options, recurse=True)
        return {"options": options, "run": self._run}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._options = pickle.loads(state["options"])
        self._reset()
        self._run = state["run"]

    # ------------------------------------------------------------------------------------------------------------------

    def _next_plan(self) -> tuple[Plan, int]:
        """Return the plan and the epoch that the loop is in, or else of the next pass."""
        num_samples, progress = self._measure(), self._run.progress
        settings = self._plan_settings() if self._session is None else self._session.plan.settings
        if progress.is_in_pass:
            return Plan.of(num_samples, settings), progress.position.epoch
        begin = progress.next_begin(num_samples)
        return Plan.of(num_samples, settings.going_on_at(begin)[0]), begin.epoch

    def _measure(self) -> int:
        """Return the dataset's length; before the engine runs, starts a process that builds it, if need be."""
        if self._run.num_samples is not None:
            return self._run.num_samples
        if self._dataset is not None or not self._options.num_workers:
            num_samples = length_of(self.dataset)
        else:
            num_samples = self._measure_in_pool()
        self._run.note_length(num_samples)
        return num_samples

    def _measure_in_pool(self) -> int:
        """Return the length of the dataset in a template, which is kept: `start()` makes the workers from it."""
        pool = self._pool if self._pool is not None and self._pool.is_ours else self._make_pool()
        try:
            return pool.start_template()
        except BaseException:
            self._drop_pool()
            raise

    def _make_pool(self) -> WorkerPool:
        self._pool = pool = WorkerPool(
            self._options.worker_setup(self._plan_settings()), self._options.process_settings()
        )
        self._close = weakref.finalize(self, pool.close)
        return pool

    def _drop_pool(self) -> None:
        self._pool = None
        if self._close is not None:
            self._close()

    def _take_pool(self, plan: PlanSettings) -> WorkerPool | None:
        """Return the pool that was started to count the samples, if it can be used with this plan."""
        pool, self._pool = self._pool, None
        if pool is None or not pool.is_ours or self._close is None:
            return None
        is_other_plan = self._options.rng is Rng.WORKER and pool.setup.plan != plan  # workers are seeded by it
        if is_other_plan or not pool.is_current():
            self._close()
            return None
        self._close.detach()
        return pool

    def _plan_settings(self) -> PlanSettings:
        """Return the plan of this rank, as far as is known before `start()`."""
        return self._options.plan_settings(self._run.order, expected_placement(self._options.world_size))
