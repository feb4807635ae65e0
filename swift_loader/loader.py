"""SwiftLoader, the public loader. Runs in the trainer and imports torch only if a device is given."""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from swift_loader.checks import check_callable, check_flag, check_optional_integer
from swift_loader.device.move import find_target
from swift_loader.engine.session import Session
from swift_loader.integrations import ask_framework
from swift_loader.lifecycle import EpochIterator, EpochSampler, Lifecycle, LoaderState, ShownEpoch
from swift_loader.metrics.observations import WINDOW, flat_metrics
from swift_loader.options import Options, refuse_unknown
from swift_loader.ranks.ranks import RankChoice
from swift_loader.report.report import Report, facts_of, html_table
from swift_loader.report.trace import write_trace
from swift_loader.runtime import Closing
from swift_loader.sampling.run import Run
from swift_loader.scheduler.sample_errors import SampleFailure

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self

    from swift_loader.options import RayExecutor


class SwiftLoader(Closing):
    """Loads batches of a map-style dataset with worker processes, or threads.

    Each `for` loop over the loader is one epoch:

        with SwiftLoader(Dataset, {"root": "data"}, batch_size=32, worker_per_consumer=4) as loader:
            for epoch in range(10):
                for batch in loader:
                    train(batch)

    Workers start with `start()`, or with the first iteration. They keep working from epoch to epoch until `close()`.
    The `with` statement calls `close()`.

    By default, batches arrive exactly once and in a fixed order. Their content depends on the dataset, the seed, the
    epoch and the position, not on the number of workers. If a worker dies, another one rebuilds its batches.

    `state_dict()` works after any batch. `load_state_dict()` resumes there, with any number of workers or ranks and any
    batch size. `start(device=...)` delivers tensors on a device. With several GPUs, make the same loader in each
    process; each gets its own part of the dataset.

    [Options](options.md) has the parameters in groups. `start` takes the device and the rank.
    """

    def __init__(
        self,
        dataset_class: Callable[..., Any] | None = None,
        dataset_kwargs: Mapping[str, Any] | None = None,
        batch_size: int = 1,
        nb_consumer: int | None = None,
        worker_per_consumer: int | Literal["auto"] | None = None,
        shuffle: bool = True,
        *,
        dataset: Any = None,
        worker_type: Literal["process", "thread"] = "process",
        executor: RayExecutor | None = None,
        seed: int | None = None,
        drop_last: bool = False,
        uneven: Literal["pad", "drop", "exact"] = "pad",
        in_order: bool = True,
        timeout: float | None = None,
        stall_warning: float | None = 60.0,
        worker_restarts: int = 3,
        data_queue_size: int | None = None,
        message_queue_size: int = 10,
        max_buffer_size: int | None = None,
        nearby_shuffle: int | None = None,
        rng: Literal["sample", "worker"] | None = "sample",
        on_error: Literal["raise", "skip", "replace"] = "raise",
        max_errors: float | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        batch_encoder: Callable[[Any], bytes] | None = None,
        batch_decoder: Callable[[bytes], Any] | None = None,
        logger: str | Mapping[str, Any] | None = None,
        benchmark: bool = True,
        benchmark_file: str | os.PathLike[str] | None = None,
        progress: bool = False,
        validate: bool = True,
        multithread: bool = True,
        max_nb_batch_on_device: int = 1,
        pin_memory: bool = False,
        start_method: Literal["template", "spawn", "fork"] = "template",
        dataset_per_worker: bool = False,
        shared: bool = False,
        **unknown: NoReturn,
    ) -> None:
        """Check the options. This starts no process.

        Args:
            dataset_class: A class or function that returns a map-style [dataset](datasets.md#datasets). It runs in
                another process, or in this one if there are no worker processes.
            dataset_kwargs: Keyword arguments of `dataset_class`.
            batch_size: Samples per batch of one consumer, at least 1.
            nb_consumer: How many consumers share the dataset, at least 1. A consumer, or rank, is one training process,
                usually one per GPU. Default: the world size of torch.distributed, else that of the launcher (torchrun,
                mpirun, srun), else 1. See [several GPUs](several-gpus.md#how-the-loader-finds-its-rank).
            worker_per_consumer: Workers per consumer, 0 to 4096. Default: 1, or 0 with an `executor`. 0 without an
                `executor` builds batches in the calling thread, for debugging. `"auto"`: the loader [chooses the
                number](options.md#how-many-workers) while the loop runs.
            shuffle: True visits the samples in a new order in each epoch. False keeps the dataset's order.
            dataset: A dataset instance, instead of `dataset_class` and `dataset_kwargs`.
            worker_type: `"process"`: each worker is a process. `"thread"`: each worker is a
                [thread](how-it-works.md#threads-as-workers) of this process, for free-threaded Python and for datasets
                that release the GIL. Threads share the dataset, which must be thread-safe. A thread that hangs can't be
                replaced.
            executor: A `RayExecutor` adds workers that are [Ray](ray.md) actors, on any node of a cluster. None: all
                workers are on this machine.
            seed: Integer of at least 0 that determines all randomness. Default: the seed of torch's generator, as
                `torch.manual_seed` or `seed_everything` set it, or as torch drew it for this process. So all loaders
                without `seed` share one seed until torch is seeded again. If torch isn't imported, the seed comes from
                the clock. With torch.distributed, all ranks use that of rank 0. `seed_numer` is an old name for it.
            drop_last: True leaves out the last batch if it is smaller than the others.
            uneven: What happens to samples that can't be [split evenly](several-gpus.md#equal-steps) over consumers.
                `"pad"` repeats some samples, and `num_padding` says how many. `"drop"` leaves some out. `"exact"` gives
                consumers different numbers of samples.
            in_order: True delivers batches in a fixed order. False delivers them as soon as they are ready, within an
                epoch. Then `state_dict` works only between epochs.
            timeout: Seconds that a worker may spend on a batch that the loop waits for. After that, the worker is
                killed and replaced, up to `worker_restarts` times in a row. One more raises `WorkerStalled`. None or
                0: no limit. See [a worker hangs](failures.md#a-worker-hangs).
            stall_warning: Seconds that a worker may spend on a batch that the loop waits for, before a warning shows
                its Python stack. None or 0: no warning.
            worker_restarts: How many times in a row, with no batch in between, a dead worker is replaced. The
                replacement builds the lost batches again. One more death raises `WorkerDied`: with 0, the first.
                See [a worker dies](failures.md#a-worker-dies).
            data_queue_size: Batches in flight per consumer: being built, or waiting for the loop. Default: `max(10, 3 *
                worker_per_consumer)`, or `max(10, 2 * worker_per_consumer)` with `in_order=False`. If batch times vary
                much, give 4 to 6 batches per worker. If it is less than the number of workers, some are idle, and
                `start()` warns. `repr(loader)` says how much [memory](how-it-works.md#memory) these batches take.
            message_queue_size: At least 1. It has no effect: nearly always, a worker has one task that it builds and
                one that waits; at most 64.
            max_buffer_size: Finished batches of one worker that may wait for the loop, at least 1. A worker with so
                many gets no new task. Default: `max(2, data_queue_size // worker_per_consumer + 1)`.
            nearby_shuffle: How many samples are shuffled together. Such a window consists of short runs of neighbours
                from all over the dataset. Batches are mixed as in a uniform shuffle, but neighbours are read while they
                are in the page cache. Default: `350 * max(batch_size, 32)`, in runs of 8. A smaller window reads more
                locally and mixes less. 0 shuffles the whole dataset uniformly. See [order](randomness.md#order).
            rng: How `random`, `numpy.random` and torch's default generator are
                [seeded](randomness.md#random-draws-in-samples). `"sample"`: for each sample, by (seed, epoch, dataset
                index). `"worker"`: once per worker, so draws differ from run to run. None: not at all. Worker threads
                share these generators. So with `worker_type="thread"`, only `sample_rng()` is seeded, and a dataset
                that draws from the generators gets a warning.
            on_error: What happens if the `__getitem__` of a sample [fails](failures.md#a-sample-fails): it raises, or
                `timeout` ends and it has run for more than half of that time. `"raise"` raises its error. `"skip"`
                leaves it out of its batch. `"replace"` takes another sample, chosen by (seed, epoch, index): no
                excluded row, and of a `Mixture`, one of the same source.
            max_errors: How many samples of this rank may fail in an epoch: an integer, or a float between 0 and 1 as a
                fraction of the rank's samples. One more raises `TooManyErrors`. The count starts with the epoch, or
                with a resumed run. None: no limit.
            collate_fn: Function that turns a list of samples into a [batch](datasets.md#batches). Default:
                `swift_loader.default_collate`. If it has a parameter `memory: BatchMemory`, with this annotation, it
                gets the memory in which batches are sent. Arrays that it allocates there aren't copied again.
            batch_encoder: Function that turns a batch into bytes, in the worker. Default: the built-in codec. Give
                `batch_decoder`, too.
            batch_decoder: Function that turns these bytes into a batch, in the trainer.
            logger: Prefix of the log file `PREFIX_rankN.log` of rank N. Or a dict with the keys `path` (the prefix),
                `stdout` (bool) and `level` (such as `"DEBUG"`). None: no log. Your own loguru sinks aren't touched.
            benchmark: True measures how long each stage of a batch takes. See [report](report.md).
            benchmark_file: File to which `close()` writes these times, as JSON. Rank N > 0 writes `times_rankN.json`
                instead of `times.json`. None: they go to the log, if there is one.
            progress: True shows a bar of each epoch on rank 0: batches, speed, time left, and the share of the time in
                which the loop waited for data. It needs tqdm.
            validate: True makes `start()` wait for the first batch, and compares a few samples of [each build of the
                dataset](datasets.md#one-dataset-in-all-processes). If the loop begins with that batch, it isn't built
                again.
            multithread: True receives from each worker on a thread of its own, on at most 16 threads in all. False uses
                one thread for all workers.
            max_nb_batch_on_device: How many batches are copied to the device ahead of the loop, at least 1. It has no
                effect without a device.
            pin_memory: True copies batches into page-locked memory, for a [loop that moves
                them](device.md#a-loop-that-moves-batches-itself) to a GPU. Numeric arrays become tensors. Without an
                accelerator they become tensors, too, but nothing is page-locked. `start(device=...)` doesn't need it:
                it reads batches from page-locked memory anyway.
            start_method: `"template"` forks all workers from one fresh interpreter. `"spawn"` starts a fresh
                interpreter for each worker. `"fork"` forks the training process once, at `start()`, and the workers
                from that fork. It is for [datasets and functions that can't be
                serialised](datasets.md#datasets-that-cant-be-serialised). On [macOS and
                Windows](how-it-works.md#platforms), torch's DataLoader starts the workers, as `"spawn"` or `"fork"`.
            dataset_per_worker: True makes each worker build its own dataset. False shares [one
                dataset](datasets.md#one-dataset-in-all-processes), unless building it opens files or starts threads.
            shared: True replaces the dataset's [long lists](datasets.md#long-lists) by `SharedList`s, also those of
                datasets in it. A dataset instance is changed at once, in place.
            unknown: Any other keyword raises `TypeError`.

        Raises:
            TypeError: An option is unknown or has the wrong type. For an unknown one, the message names the closest
                option.
            ValueError: A value is out of its range. The message says what is allowed.
            EncodeError: With `shared`, a long list of the dataset can't be shared. The message names it.
        """
        given = dict(locals())
        others = given.pop("unknown")
        if "seed_numer" in others:
            given["seed"] = others.pop("seed_numer")
            if seed is not None:
                raise TypeError("seed and seed_numer are both given; they are one option, so give seed only")
        refuse_unknown(others, [*given, "seed_numer"][1:])  # the first is `self`
        self._set_up(Options.of(given))

    def _set_up(self, options: Options, run: Run | None = None, dataset: Any = None) -> None:
        run = Run(options.order_settings(), options.sampling.fixed) if run is None else run
        self._lifecycle = Lifecycle(options, run, dataset)

    @property
    def _options(self) -> Options:
        return self._lifecycle.options

    @property
    def _session(self) -> Session | None:
        return self._lifecycle.session

    # Life -------------------------------------------------------------------------------------------------------------

    def start(
        self,
        consumer_index: int | None = None,
        device: torch.device | str | int | None = None,
        to_device: Callable[..., Any] | None = None,
        dtype: torch.dtype | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        data_dims: Sequence[str] | None = None,
        share_batches: bool = True,
    ) -> None:
        """Start the workers of one consumer. They begin to build batches at once.

        The first iteration calls it without arguments, so it is optional. It blocks until the dataset is built and,
        with `validate`, the first batch has arrived. With more than four workers, it returns while the rest are being
        started. Their errors come out of `next`.

        Args:
            consumer_index: The rank of this process, from 0 to `nb_consumer - 1`. Default: the rank in
                torch.distributed, else that of the launcher. See [several
                GPUs](several-gpus.md#how-the-loader-finds-its-rank).
            device: Where batches go: anything that `torch.device` takes. Numeric arrays become tensors, also with
                `"cpu"`. A GPU gets up to `max_nb_batch_on_device` batches ahead of the loop, copied on a stream of
                their own. None: batches stay as `collate_fn` made them.
            to_device: Function `to_device(batch, device)` that moves a batch, and may [augment
                it](device.md#augment-on-the-gpu). It is called once per batch, beside the loop's work. Default:
                `swift_loader.to_device`.
            dtype: A `torch.dtype`. Floating-point tensors are converted to it on the device. None: they keep theirs.
                With `to_device`, it is a `TypeError`.
            rank: Another name of `consumer_index`. With `world_size`, several ranks of torch.distributed may have the
                same number. They [get the same data](several-gpus.md#ranks-that-need-the-same-data), and all of them
                must start their loaders.
            world_size: Another name of `nb_consumer`.
            mesh: A `DeviceMesh` of torch.distributed, instead of `rank` and `world_size`. Ranks that differ in a
                dimension such as "dp" or "fsdp" get different data. Ranks that differ only in others, such as "tp",
                "cp" or "pp", get the same data.
            data_dims: Names of the mesh's dimensions whose ranks get different data. Default: those with a known name.
                A dimension with an unknown name is a `ValueError`.
            share_batches: True loads once for all ranks that need the same data. One of them has workers, and
                broadcasts each batch, so all must take the same batches in step. False: each rank loads for itself. It
                only matters with `mesh`, or with `rank` and `world_size`.

        Raises:
            RuntimeError: The loader runs already; or there are several consumers and nothing says which one this is; or
                there is no such device.
            TypeError: An argument has the wrong type, or `to_device` or `dtype` was given without `device`; or two
                arguments exclude each other.
            ValueError: The ranks have different options or datasets, or `consumer_index` is out of range, or the mesh
                doesn't tell which data this rank gets.
            StateMismatch: The loaded state is of a dataset with another length.
            LoaderClosed: The loader was closed.
            WorkerDied: A process ended while it started.
            Exception: Whatever building the dataset or the first batch raised.
        """
        choice = RankChoice(
            check_optional_integer("consumer_index", consumer_index, 0),
            check_optional_integer("rank", rank, 0),
            check_optional_integer("world_size", world_size, 1),
            mesh,
            data_dims,
            check_flag("share_batches", share_batches),
        )
        self._lifecycle.check_open()
        target = find_target(device, to_device, dtype, pin_memory=self._options.delivery.pin_memory)
        self._lifecycle.start(choice, target)

    def prepare(self) -> None:
        """Begin to build the dataset in another process, and return at once.

        Call it early, for example before you build the model: a fresh interpreter takes seconds to import torch.
        `start()` uses the result, unless working directory, environment or import path have changed. Without worker
        processes, or once the loader has started, `prepare` does nothing. See [datasets](datasets.md#start-faster).

        Raises:
            LoaderClosed: The loader was closed.
            EncodeError: The dataset or a function can't be sent to another process.
        """
        self._lifecycle.prepare()

    def resize(self, worker_per_consumer: int) -> None:
        """Change the number of workers, while the loop runs or before `start()`. It returns at once, on any thread.

        The loop gets the same batches in the same order. New workers take part as soon as they are ready. If there are
        too many workers, some finish their batches and end. `data_queue_size` and `max_buffer_size` follow, unless you
        gave them. With `worker_per_consumer="auto"`, the loader changes the number no more. See [another
        number](options.md#another-number-of-workers).

        Args:
            worker_per_consumer: Workers per consumer from now on, 1 to 4096. Each rank has its own number.

        Raises:
            LoaderClosed: The loader was closed.
            RuntimeError: There are no workers (`worker_per_consumer=0`); or another thread is just starting the loader;
                or worker threads can't be added, because each has a copy of a dataset instance.
            TypeError: It isn't an integer.
            ValueError: It is out of its range.
        """
        self._lifecycle.resize(worker_per_consumer)

    def close(self) -> None:
        """Stop all processes and threads and free all resources, within 5 s.

        Any thread may call it, more than once. Batches that you keep stay valid. An iterator in use raises
        `LoaderClosed` at its next batch. The loader is over: so does each later iteration.
        """
        try:
            self._lifecycle.close()
        finally:
            self._lifecycle.sample_errors.warn()

    def with_collate_fn(self, collate_fn: Callable[..., Any] | None) -> Self:
        """Close this loader and return a new one with another `collate_fn`, of the same class.

        The new loader hasn't started. Its first pass is the next pass of this loader; after a `break`, that is the next
        epoch. Batches that the old function made ahead of the loop are dropped. An iterator in use raises
        `RuntimeError` at its next batch.
        """
        workers = replace(self._options.workers, collate_fn=check_callable("collate_fn", collate_fn))
        successor = type(self).__new__(type(self))
        vars(successor).update(vars(self))  # what a subclass has
        options, dataset = replace(self._options, workers=workers), self._lifecycle.dataset
        successor._set_up(options, self._lifecycle.run, dataset)  # noqa: SLF001 - of this class
        self._lifecycle.supersede()
        self.close()
        return successor

    # Iteration --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> EpochIterator:
        """Return an iterator over the next epoch. Its first `next` starts it and ends any other iterator."""
        return (ShownEpoch if self._options.report.progress else EpochIterator)(self._lifecycle)

    def __len__(self) -> int:
        """Return the number of batches of the current epoch, or of the next one between epochs.

        It includes those already delivered. All epochs have the same length, except one that was begun with another
        `batch_size` or `nb_consumer`. There, what was delivered before counts in batches of the present size. Before
        `start()`, this may build the dataset.
        """
        return self._lifecycle.num_batches()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the [next pass](resume.md#which-epoch-comes-next). The epoch determines the order.

        The pass after it gets the next epoch. The epoch of a loaded state resumes at the saved position. Any other
        epoch starts from its first batch. Setting the current epoch changes nothing in the current pass. The next pass
        repeats that epoch if the current one isn't finished.

        Args:
            epoch: An integer of at least 0.
        """
        self._lifecycle.set_epoch(epoch)

    def skip(self, steps: int | Iterable[int], epoch: int | None = None) -> None:
        """[Leave out](resume.md#leave-out-a-bad-batch) steps of an epoch. The loop doesn't get them; they aren't built.

        Call it with the same steps on all ranks, before the loop gets there. All other batches stay as they are, and
        `len()` gets smaller. The state has the skipped samples, so a resumed run skips them, too, also with another
        batch size or number of ranks. In the middle of a pass, the batches that were prefetched are built again.
        Before `start()`, this may build the dataset.

        Args:
            steps: One step or several. Step 0 is the epoch's first batch, also if the epoch was resumed. Skipped steps
                count, too.
            epoch: The epoch. Default: the current one, or between epochs the next one.

        Raises:
            LoaderClosed: The loader was closed.
            TypeError: A step isn't an integer.
            ValueError: The epoch has no such step; or the loop is beyond it; or a part of the epoch was delivered or
                skipped with another batch size or number of ranks, so its batches begin elsewhere. Then nothing is
                skipped.
            RuntimeError: With `in_order=False`, in the middle of this epoch.
        """
        self._lifecycle.skip(steps, epoch)

    def exclude(self, rows: int | Iterable[int] | Callable[[NDArray[np.int64]], Any]) -> None:
        """[Leave out](resume.md#leave-out-rows) rows of the dataset from the loop's position on: no batch has them.

        They are missing from what is left of the running epoch, and from all later epochs. The remaining samples close
        up, and `len()` gets smaller. What was delivered before stays what it was, so [replay](replay.md) still finds
        it. The state has the rows, as ranges, and where they were excluded. So a resumed run leaves them out, too, also
        with another batch size or number of ranks. Another call adds to them.

        Call it with the same rows on all ranks, after the same step. In the middle of a pass, the batches that were
        prefetched are built again. Before `start()`, this may build the dataset. Each process needs about 80 bytes per
        row.

        Args:
            rows: A dataset index, several of them, or a function. It gets indices, `(n,) int64`, and returns which of
                them to leave out, `(n,) bool`. It is called in this process until it has seen each index once.

        Raises:
            LoaderClosed: The loader was closed.
            TypeError: The rows aren't integers, or the function doesn't return a bool for each index.
            ValueError: A row isn't in the dataset, or nothing would be left of it. Then nothing is excluded.
            RuntimeError: With `in_order=False`, in the middle of an epoch.
        """
        self._lifecycle.exclude(rows)

    def reweight(self, weights: Mapping[str, float]) -> None:
        """Change the [weights of a mixture](mixtures.md#change-the-weights) from the loop's position on.

        The state has the change, so a resumed run keeps it as long as the program's `Mixture` says the same as before.
        Changes that were scheduled for later are dropped. Call it with the same weights on all ranks, after the same
        step. In the middle of a pass, the batches that were prefetched are built again.

        Args:
            weights: As for `Mixture`, by the name of each source.

        Raises:
            LoaderClosed: The loader was closed.
            TypeError: The dataset isn't a `Mixture`.
            ValueError: The weights don't name the sources, or one is negative, or all are 0.
            RuntimeError: With `in_order=False`, in the middle of an epoch.
        """
        self._lifecycle.reweight(weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's position, for a [resume](resume.md): a dict of integers, and what is left out.

        It is the same on every rank, and its size doesn't depend on the dataset. It counts the batches that the loop
        got, not prefetched ones. Call it at any time: before `start()`, between two batches, after `break`, at the end
        of an epoch, after `close()`. It starts nothing.

        Raises:
            RuntimeError: With `in_order=False`, in the middle of an epoch: no position says what was delivered.
        """
        return self._lifecycle.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state_dict()` was called, with the next pass. An empty dict changes nothing.

        `worker_per_consumer`, `nb_consumer` and `batch_size` may differ from those of the saved run. The loader
        delivers the rest of the same permutation, then the following epochs of the same seed. The seed and the window
        of `nearby_shuffle` come from the state; another value that you gave explicitly raises `StateMismatch`. An
        iterator in use raises `RuntimeError` at its next batch. Call it on the loop's thread.

        Raises:
            LoaderClosed: The loader was closed.
            TypeError: The state isn't a dict.
            StateMismatch: The state is of another dataset or order. The message names the field and both values.
        """
        self._lifecycle.load_state_dict(state)

    # What it is -------------------------------------------------------------------------------------------------------

    @property
    def dataset(self) -> Any:
        """The dataset instance that was given; else one that is built in this process on first use."""
        return self._lifecycle.built_dataset()

    @property
    def batch_size(self) -> int:
        """Samples per batch and consumer."""
        return self._options.sampling.batch_size

    @property
    def worker_per_consumer(self) -> int:
        """Workers of this consumer, see `resize`."""
        return self._options.delivery.num_workers

    @property
    def collate_fn(self) -> Callable[..., Any] | None:
        """The function that turns a list of samples into a batch. None means `default_collate`."""
        return self._options.workers.collate_fn

    @property
    def has_started(self) -> bool:
        """Whether `start()` has succeeded; stays True after `close()`."""
        return self._session is not None

    @property
    def num_padding(self) -> int:
        """How many samples at the end of the last delivered batch are repeats, with `uneven="pad"`.

        `loss[:len(loss) - loader.num_padding]` counts every sample once.
        """
        last = self._lifecycle.last_batch()
        return 0 if last is None else last.num_padding

    @property
    def batch_indices(self) -> NDArray[np.int64]:
        """The dataset indices of the last delivered batch, `(n,) int64`. Empty before the first batch.

        Samples that `on_error="skip"` left out are missing. `on_error="replace"` shows the replacements.
        """
        last = self._lifecycle.last_batch()
        return np.empty(0, np.int64) if last is None else last.indices

    @property
    def failures(self) -> list[SampleFailure]:
        """The last 1,000 samples that failed, oldest first, with `on_error="skip"` or `"replace"`.

        A failure counts once the loop gets its batch, or once `max_errors` stops the loop at that batch. Failures in
        prefetched batches don't count yet.
        """
        return self._lifecycle.sample_errors.kept

    @property
    def sampler(self) -> EpochSampler:
        """The sampler that frameworks expect, with `set_epoch`. Each access makes one. It keeps the loader alive."""
        torch_data = sys.modules.get("torch.utils.data")
        if not self._options.sampling.shuffle and torch_data is not None:  # Lightning asks whether it is one of torch's
            return _sequential(torch_data.SequentialSampler)(self._lifecycle)  # type: ignore[no-any-return]
        ask_framework("before_shuffled_sampler", self)
        return EpochSampler(self._lifecycle)

    @property
    def batch_sampler(self) -> None:
        """None: there is no batch sampler. Lightning reads this attribute."""

    def report(self) -> Report:
        """Return a [report](report.md) of what was measured so far: why the loop is slow, and what would help.

        `print` it, or ask it: `report.verdict`, `report.breakdown`, `report.advice`. As a mapping, it has
        counts and the times of each stage. It is empty with `benchmark=False`, and before `start()`.
        """
        return self._session.observer.report(self._session) if self._session is not None else Report()

    def metrics(self, prefix: str = "swift_loader/") -> dict[str, float]:
        """Return figures for dashboards: of the last 512 batches, and counts since the loader started.

        A call takes about 0.1 ms, so you can call it at every step. The [keys](dashboards.md#metrics) are always the
        same. All values are 0 before `start()`. Any thread may call it.

        Args:
            prefix: What each key begins with. Give each of several loaders its own.
        """
        session = self._session
        return flat_metrics(None if session is None else session.observer.recent(session, WINDOW), prefix)

    def trace(self, path: str | os.PathLike[str], *, profile: str | os.PathLike[str] | None = None) -> None:
        """Write the last 4,096 batches as a [trace](dashboards.md#a-trace), which Perfetto and chrome://tracing show.

        The file is in Chrome's trace event format, with a row for the loop, the receiver and each worker.

        Args:
            path: The file. If it ends in `.gz`, it is compressed.
            profile: A trace that `torch.profiler` exported in this process. It goes into the same file.

        Raises:
            RuntimeError: The loader hasn't started.
        """
        session = self._session
        if session is None:
            raise RuntimeError("there is nothing to trace before the loader starts; call trace after a few batches")
        observations = session.observer.observations(session)
        write_trace(observations, path, profile=profile, plans=session.past_plans)

    def __repr__(self) -> str:
        return f"<SwiftLoader: {', '.join(facts_of(self).values())}>"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, facts_of(self).items())

    def _facts(self) -> dict[str, str]:
        workers, session = self._options.workers, self._session
        dataset = workers.dataset_class or workers.dataset
        nbytes = 0 if session is None else session.engine.largest_batch_nbytes
        return self._options.delivery.describe(dataset, *self._lifecycle.describe(), nbytes=nbytes)

    def __getstate__(self) -> dict[str, Any]:
        state = self._lifecycle.state
        if state is not LoaderState.NEW:
            raise TypeError(f"a loader can only be pickled before start(), and this one is {state.value}")
        try:
            options = pickle.dumps(self._options)
        except Exception:  # a lambda or a local class: pickle raises several types for them
            import dill

            options = dill.dumps(self._options, recurse=True)
        return {"options": options, "run": self._lifecycle.run}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up(pickle.loads(state["options"]), state["run"])


@functools.cache
def _sequential(base: type) -> Any:
    """Return the class of the sampler of a loader that doesn't shuffle: one of torch's, too."""
    return type("SequentialEpochSampler", (EpochSampler, base), {})
