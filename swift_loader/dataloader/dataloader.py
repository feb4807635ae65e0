"""DataLoader, the drop-in class."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, MapDataPipe, Sampler

from swift_loader.checks import check_integer, check_optional_integer, check_progress, check_skips
from swift_loader.dataloader import options
from swift_loader.dataloader.draws import Draws, before_first, take_order
from swift_loader.dataloader.inline import InlineWorkers
from swift_loader.dataloader.iterator import LoaderIterator, ShownLoaderIterator
from swift_loader.dataloader.shards import copies_of
from swift_loader.dataloader.sources import AnyWorkers, LoaderSource, SamplerSource, StreamSource
from swift_loader.dataloader.state import LoaderPosition, WorkerSnapshot, batching_of, check_resumes, needs_its_workers
from swift_loader.dataloader.workers import LoaderWorkers, Mover, start_workers, warm_root
from swift_loader.engine.observer import Observer
from swift_loader.errors import ForkHangs, warn
from swift_loader.integrations import ask_framework
from swift_loader.metrics.observations import WINDOW, flat_metrics
from swift_loader.options import MAX_WORKERS, AutoWorkers, DeliveryOptions, RayExecutor
from swift_loader.ranks.agreement import RankVotes
from swift_loader.ranks.ranks import find_ranks
from swift_loader.report.report import DATALOADER, Report, facts_of, html_table, plain_length
from swift_loader.report.trace import write_trace
from swift_loader.report.tuning import Autotuner
from swift_loader.runtime import Closing, run_finalizer
from swift_loader.samplers.base import chain_of
from swift_loader.sampling.mixture import Mixture
from swift_loader.scheduler.sample_errors import SampleErrors, SampleFailure
from swift_loader.transport.segments import SegmentPool
from swift_loader.worker.torch_worker import StreamShard, epoch_of

_Batch_co = TypeVar("_Batch_co", covariant=True)

_TORCH_OPTIONS = frozenset(inspect.signature(TorchDataLoader.__init__).parameters)
"""The options that the installed torch knows."""

_OWN = frozenset(
    (
        "_workers",
        "_pool",
        "_why_no_fork",
        "_latest",
        "_iterator",
        "_iterators",
        "_errors",
        "_votes",
        "_observer",
        "_changing",
        "_wanted",
        "_mover",
    )
)
"""What belongs to the epochs of one loader, and isn't copied."""


class DataLoader(Closing, TorchDataLoader[_Batch_co]):
    """torch's DataLoader on the workers of this package.

    Same arguments, same batches, and the same order for the same seed. Workers that die are replaced. `state_dict()`
    works after any batch.

        loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=4)
        for epoch in range(10):
            for inputs, labels in loader:
                train(inputs, labels)

    It is a `torch.utils.data.DataLoader`, so frameworks accept it. [DataLoader](dataloader.md) says what differs.
    """

    def __init__(  # noqa: PLR0917 - torch's signature
        self,
        dataset: Dataset[_Batch_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = 1,
        rng: Literal["sample", "worker"] | None = "sample",
        seed: int | None = None,
        worker_type: Literal["process", "thread"] = "process",
        worker_restarts: int = 3,
        stall_warning: float | None = 60.0,
        on_error: Literal["raise", "skip"] = "raise",
        max_errors: float | None = None,
        executor: RayExecutor | None = None,
        shard_stream: bool | Literal["workers"] | None = None,
        equal_batches: bool = False,
        progress: bool = False,
        device: torch.device | str | int | None = None,
        to_device: Callable[..., Any] | None = None,
        dtype: torch.dtype | None = None,
        max_nb_batch_on_device: int = 1,
    ) -> None:
        """Check the arguments, and start to import in the background what workers need. This starts no worker.

        The arguments up to `in_order` are torch's, with torch's meanings and defaults.

        Args:
            dataset: A map-style dataset or an `IterableDataset`.
            batch_size: Samples per batch. None: each sample is a batch of its own.
            shuffle: True visits the samples in a new order in each epoch.
            sampler: Gives the indices of the samples.
            batch_sampler: Gives a list of indices for each batch.
            num_workers: How many workers. 0 builds batches in the calling thread. `"auto"`: the loader [chooses the
                number](options.md#how-many-workers) while the loop runs.
            collate_fn: Function that turns a list of samples into a batch. Default: as
                `torch.utils.data.default_collate`.
            pin_memory: True page-locks batches if there is an accelerator. It has no effect with `device`.
            drop_last: True leaves out the last batch if it isn't full.
            timeout: Seconds that the loop waits for a batch before it gets `WorkerStalled`, as with torch. No worker is
                killed, unlike with a SwiftLoader's `timeout`. 0: no limit.
            worker_init_fn: Called in each worker process with its id, before it loads anything.
            multiprocessing_context: `"fork"`, `"spawn"`, `"forkserver"`, or a context of multiprocessing: how [workers
                start](dataloader.md#workers). Default: the program's, which is a fork on Linux before Python 3.14.
            generator: Determines the order and the workers' seeds. Default: torch's default generator.
            prefetch_factor: Batches in flight per worker. With 2, the default, the loader chooses.
            persistent_workers: True keeps the workers from epoch to epoch. Then they see no change of the dataset.
            pin_memory_device: Ignored, as in torch.
            in_order: False delivers batches as soon as they are built.
            snapshot_every_n_steps: How often each worker saves the dataset's state, in batches. None or 0: never. See
                [resume](dataloader.md#resume).
            rng: How the global generators are [seeded](dataloader.md#random-draws). `"sample"`: for each sample of a
                map-style dataset, by its place in the epoch, unless you give a `worker_init_fn`. `"worker"`: once per
                worker. None: once per worker, with torch's numbers.
            seed: Integer of at least 0. Seed and epoch determine the order of `shuffle=True` and what samples draw,
                also with `num_workers=0`, whatever else the program draws. They also seed a `generator` that you give.
                If you load a state, leave `seed` out, or give the state's.
            worker_type: `"process"`: each worker is a process. `"thread"`: each worker is a
                [thread](dataloader.md#threads) of this process. Threads share the dataset, which must be thread-safe.
                They also share the global generators, so only `sample_rng()` is seeded.
            worker_restarts: How many times in a row, with no batch in between, a dead worker is replaced. One more
                death raises `WorkerDied`. See [a worker dies](failures.md#a-worker-dies).
            stall_warning: Seconds that a worker may spend on a batch that the loop waits for, before a warning shows
                its Python stack. None or 0: no warning.
            on_error: What happens if the `__getitem__` of a sample of a map-style dataset
                [raises](failures.md#a-sample-fails). `"raise"` raises its error in place of the batch. `"skip"` leaves
                the sample out of its batch.
            max_errors: With `on_error="skip"`: how many samples may fail in an epoch: an integer, or a float between 0
                and 1 as a fraction of the epoch's samples. One more raises `TooManyErrors`. The count starts with the
                epoch, or with a resumed run. None: no limit.
            executor: A `RayExecutor` makes all workers [Ray](ray.md) actors, on any node of a cluster, as many as its
                `num_workers` says. None: workers are on this machine.
            shard_stream: Who shares out an `IterableDataset`. True: the loader, over ranks and workers. `"workers"`:
                the loader, over the workers of each rank. False: the dataset, as with torch. None: the dataset, but a
                warning says if all workers give the same samples. See [streams](dataloader.md#streams).
            equal_batches: True ends an epoch of an `IterableDataset` on all ranks after the same number of batches. See
                [streams](dataloader.md#streams).
            progress: True shows a bar of each epoch on rank 0: batches, speed, time left, and the share of the time in
                which the loop waited for data. It needs tqdm.
            device: Where batches go, [ahead of the loop](device.md): anything that `torch.device` takes. Numeric arrays
                become tensors, also with `"cpu"`. The first epoch asks for it. None: batches stay as `collate_fn` made
                them.
            to_device: Function `to_device(batch, device)` that moves a batch, and may [augment
                it](device.md#augment-on-the-gpu). It is called once per batch, beside the loop's work. Default:
                `swift_loader.to_device`.
            dtype: A `torch.dtype`. Floating-point tensors are converted to it on the device. None: they keep theirs.
                With `to_device`, it is a `TypeError`.
            max_nb_batch_on_device: How many batches are copied to the device ahead of the loop, at least 1. It has no
                effect without a device, or with `num_workers=0`.

        Raises:
            ValueError: An argument is out of its range, or two exclude each other. torch's arguments have torch's
                messages.
            TypeError: An argument has the wrong type.
        """
        if isinstance(dataset, (IterDataPipe, MapDataPipe)):
            raise TypeError(
                f"dataset is a DataPipe, a {type(dataset).__name__}, which this loader can't shuffle and share out as "
                f"torch's does; give a Dataset or an IterableDataset, or use torch.utils.data.DataLoader for it"
            )
        if isinstance(dataset, Mixture) and sampler is None and batch_sampler is None:
            raise ValueError(
                "a Mixture needs a sampler that knows its weights: give "
                "batch_sampler=ShuffleBatchSampler(mixture, batch_size), which also splits it over the ranks"
            )
        self._where = self.device, self.to_device, self.dtype = device, to_device, dtype
        """What is used. The attributes are for frameworks, and a subclass may have a `device` of its own."""
        self.max_nb_batch_on_device = max_nb_batch_on_device
        self.seed = self._order_seed = None if seed is None else check_integer("seed", seed, 0)
        if seed is not None and generator is None:
            generator = torch.Generator()
        is_auto = num_workers == "auto"
        others = {"multiprocessing_context": multiprocessing_context, "num_workers": "auto" if is_auto else None}
        num_workers = options.num_of_actors(executor, options.checked_num_workers(num_workers), others, worker_type)
        newer: dict[str, Any] = {
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "pin_memory_device": pin_memory_device,
            "in_order": in_order,
        }
        self.executor = executor  # first, because torch asks whether there are too many workers
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            **{name: value for name, value in newer.items() if name in _TORCH_OPTIONS},
        )
        if prefetch_factor is not None:
            check_integer("prefetch_factor", prefetch_factor, 1)
        check_optional_integer("snapshot_every_n_steps", snapshot_every_n_steps, 0)
        self.in_order = in_order
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self.rng = rng
        self.worker_type = worker_type
        self.worker_restarts = worker_restarts
        self.stall_warning = stall_warning
        self.shard_stream = shard_stream
        self.equal_batches = equal_batches
        self.progress = check_progress("progress", progress)
        options.check_stream_options(dataset, shard_stream, equal_batches)
        self.on_error, self.max_errors = on_error, check_skips(on_error, max_errors)
        options.num_samples_of(self)  # raises
        options.wanted_rng(self)  # raises
        options.check_auto(self)
        self._brought: torch.Generator | None = None
        """What draws the order because a loaded state has a seed, and the user gave none."""
        self._loaded: LoaderPosition | None = None
        """Where the next iterator continues."""
        self._passes_epoch = False
        """Whether the next batch is the first one of the epoch after the loaded one. A Trainer takes it so."""
        self._begin_unused()

    def _begin_unused(self) -> None:
        """Be a loader that nobody has iterated over."""
        self._workers: LoaderWorkers | None = None
        """With `persistent_workers`, those of all epochs."""
        self._pool = SegmentPool()
        """Memory of the workers of the last epoch, for those of the next one."""
        self._observer = Observer(DATALOADER)
        self._errors = SampleErrors(self.max_errors)
        self._mover = Mover(self._where, self.max_nb_batch_on_device, self._observer.metrics)
        self._why_no_fork = ""
        """What happened to a fork of the program that hung. Its place is taken by a fresh interpreter."""
        self._latest: LoaderSource | None = None
        """The epoch that `state_dict` tells of. Its workers are those of its iterator, which isn't kept here: when the
        loop leaves it, they are free for the next epoch."""
        self._iterator: LoaderIterator | None = None
        """With persistent workers the only iterator, once there is one."""
        self._iterators: list[weakref.ref[LoaderIterator]] = []
        """All that live, for `close`. Any thread adds, and removes."""
        self._votes: RankVotes | None = None
        """Made by the first epoch of which the ranks must agree on the end."""
        self._changing = threading.RLock()
        """Held while an epoch begins, and while the number of workers changes. Reentrant, as a signal handler may do
        that."""
        self._is_beginning = False
        """Whether an epoch begins."""
        self._wanted = deque[int]()
        """Numbers of workers that `resize` was asked for, and that aren't taken yet. Any thread appends."""
        warm_root(self)

    def check_worker_number_rationality(self) -> None:
        """Warn as torch does if this machine has fewer cores than workers, unless they are elsewhere."""
        if self.executor is None:
            super().check_worker_number_rationality()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has, and what is pickled: no workers, and no iterator."""
        return {name: value for name, value in self.__dict__.items() if name not in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_unused()

    # Iteration --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Any:
        """Return an iterator over one epoch. Its workers begin to build batches."""
        if not self.persistent_workers:
            return self._get_iterator()
        if self._iterator is None:  # as torch: programs set it to None to get new workers
            self._iterator = self._get_iterator()
        else:
            self._iterator._reset(self)  # noqa: SLF001 - torch's name
        return self._iterator

    def _get_iterator(self) -> LoaderIterator:
        """Return a new iterator. Subclasses override it, as PyG's: it is torch's hook."""
        return (ShownLoaderIterator if self.progress else LoaderIterator)(self)

    def __len__(self) -> int:
        """Return the number of batches of an epoch. If the loader shares out a stream, it is that of this rank."""
        whole = super().__len__()
        shard = options.shard_of(self)
        if shard is None or shard.world_size == 1:
            return whole
        dataset: Any = self.dataset
        num_samples = options.len_of_shard(len(dataset), shard)
        setattr(self, "_IterableDataset_len_called", num_samples)  # noqa: B010 - torch annotates it as None
        if self.batch_size is None:
            return num_samples
        return num_samples // self.batch_size if self.drop_last else -(-num_samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samplers and of the dataset: of those that have a `set_epoch`.

        Call it before the pass. After `load_state_dict`, the saved epoch still continues at its place. If there is no
        `set_epoch`, nothing changes: with `seed`, each pass is the next epoch. If the dataset has one, workers that
        persist are replaced by new ones in the next pass, because they have copies of it.

        Args:
            epoch: An integer of at least 0.
        """
        number, dataset = check_integer("epoch", epoch, 0), self.dataset
        for taker in [*chain_of(self.batch_sampler, self.sampler), dataset]:
            if callable(set_epoch := getattr(taker, "set_epoch", None)):
                set_epoch(number)
                self._iterator = None if taker is dataset else self._iterator

    def _begin(self) -> tuple[LoaderSource, bool]:
        """Begin an epoch. Return it, and whether the loop has left it already."""
        resume, self._loaded = self._loaded, None
        passes_epoch = resume is not None and not resume.draws.begins_epoch and self._passes_epoch
        if not self._mover.depth:
            options.warn_of_pinning(self)  # first, as with torch: it warns also if the epoch can't begin
        return self._begin_epoch(resume), passes_epoch

    def resize(self, num_workers: int) -> None:
        """Change the number of workers. It returns at once, on any thread.

        The batches of a map-style dataset stay the same. It takes effect at once, or with the next epoch if batches
        [depend on their worker](dataloader.md#workers).

        Args:
            num_workers: How many workers from now on, 1 to 4096.

        Raises:
            RuntimeError: There are no workers (`num_workers=0`).
            TypeError: It isn't an integer.
            ValueError: It is out of its range.
        """
        number = check_integer("num_workers", num_workers, 1, MAX_WORKERS)
        if not self.num_workers:
            raise RuntimeError(f"resize({number}) needs workers, but num_workers=0; give 1 or more at the beginning")
        self._resize_to(number)

    def close(self) -> None:
        """Stop all processes and threads and free all resources, within 5 s.

        Any thread may call it, more than once. Batches that you keep stay valid. An iterator in use raises
        `LoaderClosed` at its next batch. The loader isn't over: the next `iter` starts new workers for the next epoch,
        as after a `break`.
        """
        iterators = [reference() for reference in self._iterators]
        workers, self._workers, self._iterator = self._workers, None, None
        for one in iterators:
            if one is not None:
                one._close()  # noqa: SLF001 - of this package
        if workers is not None:
            workers.close()
        self._errors.warn()
        self._pool = SegmentPool()
        self._mover = Mover(self._where, self.max_nb_batch_on_device, self._observer.metrics)

    def _resize_to(self, *numbers: int) -> None:
        """Change the number of workers to this one, which is checked, and to those asked for before.

        If an epoch begins just now, that does it then. What the user chooses stays.
        """
        self._wanted += numbers
        while self._wanted and not self._is_beginning and self._changing.acquire(blocking=False):
            try:
                number = self._wanted.popleft() if self._wanted else self.num_workers  # another thread has been here
                if isinstance(number, AutoWorkers) and not isinstance(self.num_workers, AutoWorkers):
                    continue  # the user has just chosen a number
                self.num_workers = number
                if isinstance(self._latest, SamplerSource) and not options.shows_its_worker(self):
                    self._latest.resize(number)
            finally:
                self._changing.release()

    def _begin_epoch(
        self, resume: LoaderPosition | None, hangs: ForkHangs | None = None, again: SamplerSource | None = None
    ) -> LoaderSource:
        """Begin an epoch, at a position or afresh.

        `hangs`: why a fork of this process can't do it. `again`: what is at this position already.
        """
        try:
            with self._changing:
                self._is_beginning = True
                return self._epoch_at(resume, hangs, again)
        finally:
            self._is_beginning = False
            self._resize_to()

    def _epoch_at(
        self, resume: LoaderPosition | None, hangs: ForkHangs | None, again: SamplerSource | None
    ) -> LoaderSource:
        if hangs is not None and resume is not None:
            self._leave_forks(hangs)
            check_resumes(self, resume)  # somebody may have called `resize`
        if resume is not None and not resume.is_stream and needs_its_workers(self, resume):
            warn(
                f"the state has datasets of {resume.num_workers} workers in different states, so the rest of this "
                f"epoch gets as many, and num_workers={self.num_workers} counts from the next epoch on"
            )
            self._stay_with(resume.num_workers)
        number = 0
        if self._latest is not None:
            number = self._latest.number + 1
            if self.persistent_workers and self._iterator is None:
                self._latest.shut_down()
            elif self.persistent_workers:
                self._latest.close()  # also if somebody still has its iterator: there is one set of workers
        continued = None if resume is None or resume.draws.begins_epoch else resume.draws
        if continued is not None and continued.dataset_epoch not in (None, epoch_of(self.dataset)):
            self.dataset.set_epoch(continued.dataset_epoch)  # type: ignore[attr-defined]
        shard = options.shard_of(self)
        workers: AnyWorkers
        saved, carried = None if resume is None else resume.draws, None
        if self.num_workers:
            workers, draws, carried = self._begin_workers(number, resume, shard, again)
        else:
            workers = InlineWorkers(self, resume, shard, self._observer.metrics)
            draws = Draws(self, number, saved)
        source: LoaderSource
        if isinstance(self.dataset, IterableDataset):
            copies = copies_of(self) if self._latest is None else None
            source = StreamSource(self, draws, workers, resume, copies)
        else:
            source = again or SamplerSource(self, draws, resume)
            source.begin(self, workers, resume, carried)
        if self.equal_batches and (shard is None or shard.world_size == 1):  # else each rank knows where all end
            way_out = ", or give shard_stream=True, if the dataset shares itself out"
            source.votes = self._votes = self._votes or RankVotes(find_ranks(None, None), way_out)
        self._latest = source
        return source

    def _stay_with(self, num_workers: int) -> None:
        """Have so many workers for the rest of the epoch, and the present number from the next one on."""
        self._wanted.appendleft(self.num_workers)
        self.num_workers = num_workers

    def _begin_workers(
        self, epoch: int, resume: LoaderPosition | None, shard: StreamShard | None, again: SamplerSource | None
    ) -> tuple[LoaderWorkers, Draws, dict[int, bytes] | None]:
        """Return workers, the draws that they begin with, and where those begin that stay, see `Shards.carry`."""
        base_seed, carried = None, None
        workers = self._workers
        if workers is not None and workers.may_stay and workers.shard == shard and resume is None:
            base_seed = workers.base_seed
            carried = self._latest.carry() if isinstance(self._latest, SamplerSource) else None
            if not workers.fit(self):
                run_finalizer(workers.close)
        elif workers is not None:  # after a resume: their datasets have gone on since the state was saved
            run_finalizer(workers.close)
        self._workers = None
        if resume is not None and resume.num_workers and resume.draws.is_over and self.persistent_workers:
            base_seed = resume.draws.base_seed
        if not isinstance(self.num_workers, AutoWorkers):  # else the machine is asked each time
            self.check_worker_number_rationality()
        saved = None if resume is None else resume.draws
        draws = Draws(self, epoch, saved, base_seed) if again is None else again.draws
        while workers is None or not workers.close.alive:
            try:
                workers = start_workers(self, shard, self._pool, draws.begun.base_seed, is_first=self._latest is None)
            except ForkHangs as error:
                self._leave_forks(error)
        if self.persistent_workers:
            self._workers = workers
        return workers, draws, carried

    def _leave_forks(self, error: ForkHangs) -> None:
        """Have fresh interpreters do the work of forks from now on. Raises `error` if they don't either."""
        if self._why_no_fork:
            raise error
        self._why_no_fork = str(error)
        warn(f"{error}\nFrom now on, the workers of this loader are started as with 'forkserver', and nothing is lost")

    def _tune(self) -> None:
        """Change the number of workers, if the loader chooses it and another one is better. Between two batches."""
        observer, is_auto = self._observer, isinstance(self.num_workers, AutoWorkers)
        observer.autotuner = (observer.autotuner or Autotuner(int(self.num_workers))) if is_auto else None
        if (number := observer.tune(self)) is not None:
            self._resize_to(AutoWorkers(number))

    # What is measured -------------------------------------------------------------------------------------------------

    @property
    def failures(self) -> list[SampleFailure]:
        """The last 1,000 samples that failed, oldest first, with `on_error="skip"`.

        A failure counts once the loop gets its batch, or once `max_errors` stops the loop at that batch. Failures in
        prefetched batches don't count yet.
        """
        return self._errors.kept

    def report(self) -> Report:
        """Return a [report](report.md) of all epochs so far: why the loop is slow, and what would help.

        `print` it, or ask it: `report.verdict`, `report.breakdown`, `report.advice`. As a mapping, it has
        counts and the times of each stage. It is empty, and false, before the loop has got a batch. Any thread may
        call it.
        """
        return self._observer.report(self) if self._observer.metrics.elapsed_s else Report()

    def metrics(self, prefix: str = "swift_loader/") -> dict[str, float]:
        """Return figures for dashboards: of the last 512 batches, and counts since the first epoch.

        A call takes about 0.1 ms, so you can call it at every step. The [keys](dashboards.md#metrics) are always the
        same. Any thread may call it.

        Args:
            prefix: What each key begins with. Give each of several loaders its own.
        """
        return flat_metrics(self._observer.recent(self, WINDOW), prefix)

    def trace(self, path: str | PathLike[str], *, profile: str | PathLike[str] | None = None) -> None:
        """Write the last 4,096 batches as a [trace](dashboards.md#a-trace), which Perfetto and chrome://tracing show.

        The file is in Chrome's trace event format, with a row for the loop, the receiver and each worker.

        Args:
            path: The file. If it ends in `.gz`, it is compressed.
            profile: A trace that `torch.profiler` exported in this process. It goes into the same file.

        Raises:
            RuntimeError: The loop hasn't got a batch.
        """
        observations = self._observer.observations(self)
        if not observations.num_delivered:
            raise RuntimeError("there is nothing to trace before the loop gets a batch; call trace after a few batches")
        write_trace(observations, path, profile=profile)

    def _observed(self) -> tuple[DeliveryOptions, int, bool]:
        """Return what the loader is now, for its observer."""
        batch_size = self.batch_size or getattr(self.batch_sampler, "batch_size", None) or 1
        return options.delivery_of(self), batch_size, self._mover.depth > 0

    # Resuming ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is, as plain types, for a [resume](dataloader.md#resume). Call it at any time.

        It counts the batches that the loop got. `state["epoch"]` is the epoch in which a resume begins; each iteration
        over the loader is an epoch, from 0. It draws nothing and starts nothing. So before the first epoch, the order
        of that epoch is in the state only with a `seed` or a `generator`.
        """
        if self._loaded is not None:
            position = self._loaded
        elif self._latest is not None:
            position = self._latest.position()
        else:
            is_stream = isinstance(self.dataset, IterableDataset)
            workers = (WorkerSnapshot(),) * max(1, self.num_workers)
            called = self._IterableDataset_len_called
            position = LoaderPosition(
                before_first(self), is_stream, int(self.num_workers), 0, workers=workers, length_called=called
            )
        batching = {**batching_of(self), "seed": self._order_seed}
        return {**position.to_dict(), "epoch": position.draws.next_epoch, "batching": batching}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called, with the next iterator. An empty dict changes nothing.

        The rest of the epoch is that of the unbroken run. A state that was saved with `seed` sets the seed. With
        `shuffle=True` and neither `seed` nor `generator`, the order of later epochs comes from torch's global
        generator, as with torch.

        Raises:
            TypeError: The state isn't a dict.
            StateMismatch: It isn't a state of this class, or this loader can't continue there. Nothing has changed.
        """
        if isinstance(state, Mapping) and not state:
            return
        loaded = LoaderPosition.from_dict(state)
        check_resumes(self, loaded, state.get("batching"))
        take_order(self, loaded.draws, state.get("batching"))
        self._passes_epoch = bool(ask_framework("begins_an_epoch", self))
        self._loaded = loaded
        if self._latest is not None and self._latest.workers is not None:
            self._workers = None  # they are its iterator's, which may go on
        self._latest = self._iterator = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(facts_of(self).values())}>"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, facts_of(self).items())

    def _facts(self) -> dict[str, str]:
        epoch, loaded, num_batches, num_samples = self._latest, self._loaded, None, plain_length(self.dataset)
        if num_samples is not None and self.batch_size and type(self.sampler).__module__ == "torch.utils.data.sampler":
            num_batches = len(self)  # nothing of this is the user's code
        state = "not started" if epoch is None else epoch.describe()
        if loaded is not None:
            step = 0 if loaded.draws.is_over else loaded.num_yielded
            state = f"resumes in epoch {loaded.draws.next_epoch} at batch {step}"
        return options.delivery_of(self).describe(self.dataset, [num_samples, num_batches, self.batch_size], state)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """False. Accelerate asks before it makes a loader of its own out of this one: it gets our integration then."""
        return bool(ask_framework("before_prepare", self))
