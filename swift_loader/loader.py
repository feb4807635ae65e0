"""SwiftLoader: the API of the README. Runs in the trainer; imports torch only if a device is given."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from swift_loader.config import check_rank, make_options, unknown_option
from swift_loader.device.move import to_device as move_to_device
from swift_loader.engine.processes import ProcessEngine
from swift_loader.errors import LoaderClosed
from swift_loader.iterator import EpochIterator, OpenEpoch
from swift_loader.metrics import Metrics
from swift_loader.plan import Plan
from swift_loader.session import Session
from swift_loader.worker.setup import length_of

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
        nb_consumer: int = 1,
        worker_per_consumer: int = 1,
        shuffle: bool = True,
        *,
        dataset: Any = None,
        seed: int | None = None,
        drop_last: bool = False,
        uneven: str = "pad",
        in_order: bool = True,
        timeout: float | None = None,
        data_queue_size: int = 10,
        message_queue_size: int = 10,
        max_buffer_size: int | None = None,
        nearby_shuffle: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        batch_encoder: Callable[[Any], bytes] | None = None,
        batch_decoder: Callable[[bytes], Any] | None = None,
        logger: str | Mapping[str, Any] | None = None,
        benchmark: bool = True,
        benchmark_file: str | os.PathLike[str] | None = None,
        validate: bool = True,
        multithread: bool = True,
        max_nb_batch_on_device: int = 1,
        start_method: str = "template",
        dataset_per_worker: bool = False,
        **unknown: Any,
    ) -> None:
        """Check the options; starts nothing.

        Args:
            dataset_class: Class or function that returns a map-style dataset; called in the template process.
            dataset_kwargs: Its keyword arguments.
            batch_size: Samples per batch and consumer.
            nb_consumer: Consumers (GPUs, ranks) the dataset is split over.
            worker_per_consumer: Worker processes per consumer; 0 builds batches in the calling thread, for debugging.
            shuffle: Whether each epoch visits the samples in another order.
            dataset: An instance, instead of `dataset_class`.
            seed: Base of all randomness. By default from the clock; ranks agree on one if torch.distributed is up.
                The old spelling `seed_numer` is accepted.
            drop_last: Leave out the last batch if it would be smaller than the others.
            uneven: What becomes of samples that can't be split evenly over consumers: `"pad"` repeats some, `"drop"`
                leaves some out, `"exact"` lets consumers differ.
            in_order: False: within an epoch, deliver batches as they get ready.
            timeout: Seconds to wait for a batch before `WorkerStalled` is raised; None or 0 waits for ever.
            data_queue_size: Batches in flight per consumer: being built, or waiting for the loop.
            message_queue_size: Tasks that may wait in a worker's pipe.
            max_buffer_size: Decoded batches waiting per worker; a worker with so many gets no further task. By default
                `max(2, data_queue_size // worker_per_consumer)`.
            nearby_shuffle: Samples that are shuffled together, in runs of neighbours from all over the dataset; 0
                shuffles over everything. By default `5 * batch_size`.
            collate_fn: Makes a batch of a list of samples; by default `swift_loader.default_collate`.
            batch_encoder: Makes bytes of a batch, in the worker.
            batch_decoder: Makes a batch of these bytes, in the trainer.
            logger: Prefix of a log file, or a dict with `path`, `stdout` and `level`.
            benchmark: Take the times of the stages; see `report`.
            benchmark_file: Where these go on `close()`, as JSON; by default to the log, if there is one.
            validate: Have a worker build a trial batch before `start()` returns.
            multithread: Listen to each worker on a thread of its own; False: one thread for all.
            max_nb_batch_on_device: Batches on the device ahead of the loop.
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
        for name in unknown:
            unknown_option(name, [*_option_names(), "seed_numer"])
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
            collate_fn=collate_fn,
            batch_encoder=batch_encoder,
            batch_decoder=batch_decoder,
            logger=logger,
            benchmark=benchmark,
            benchmark_file=benchmark_file,
            validate=validate,
            multithread=multithread,
            max_nb_batch_on_device=max_nb_batch_on_device,
            timeout=timeout,
            start_method=start_method,
            dataset_per_worker=dataset_per_worker,
        )
        self._reset()

    def _reset(self) -> None:
        self._state = LoaderState.NEW
        self._session: Session | None = None
        self._close: Callable[[], Any] | None = None
        self._current: weakref.ref[EpochIterator] | None = None
        self._next_epoch = 0
        self._last_step: int | None = None
        self._num_samples: int | None = None
        self._dataset: Any = self._options.source.instance

    # Life -------------------------------------------------------------------------------------------------------------

    def start(
        self,
        consumer_index: int = 0,
        device: torch.device | str | int | None = None,
        to_device: Callable[..., Any] | None = None,
    ) -> None:
        """Start the workers of one consumer; they begin to build batches at once.

        Blocks until the dataset stands and, with `validate`, a trial batch of its first samples has arrived.

        Args:
            consumer_index: Which part of the dataset is this process's: its rank, below `nb_consumer`.
            device: Where batches are to be moved, all numeric arrays as tensors, also with `"cpu"`; None leaves batches
                as the collate made them.
            to_device: `to_device(batch, device)` moves a batch instead of the default.

        Raises:
            RuntimeError: It is running already.
            LoaderClosed: It was closed.
            WorkerDied: A process ended while starting.
            Exception: What building the dataset or the trial batch raised.
        """
        if self._state is LoaderState.CLOSED:
            raise LoaderClosed("the loader was closed; make a new one to go on")
        if self._state is LoaderState.STARTED:
            raise RuntimeError("the loader runs already; call start() once, before the first iteration, or not at all")
        rank = check_rank(consumer_index, self._options.world_size)
        move = _mover(device, to_device)
        dataset = self.dataset if not self._options.num_workers else None
        session = Session(self._options, rank, self._agree_on_seed(), move, dataset)
        self._session = session
        self._close = weakref.finalize(self, session.close)
        self._num_samples = session.engine.num_samples
        if self._closed_meanwhile():
            self.close()
            raise LoaderClosed("the loader was closed while it started")
        self._state = LoaderState.STARTED
        if session.plan.num_batches:
            session.engine.seek(self._next_epoch, 0)

    def _closed_meanwhile(self) -> bool:
        return self._state is LoaderState.CLOSED

    def close(self) -> None:
        """Stop everything and give everything back, within 5 s. Idempotent; batches the user has stay valid."""
        self._state = LoaderState.CLOSED
        if self._close is not None:
            self._close()

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
        """Batches per epoch. Before `start()`, those of consumer 0; may then have to build the dataset to find out."""
        if self._session is not None:
            return self._session.plan.num_batches
        return Plan.of(self._measure(), self._options.plan_settings(0, self._options.seed)).num_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, 0 or more, that the next pass is: it decides the order. The pass after it is the next."""
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            raise TypeError(f"epoch={epoch!r} is a {type(epoch).__name__}; it must be an integer")
        if epoch < 0:
            raise ValueError(f"epoch={epoch} is too small; it must be at least 0")
        self._next_epoch = epoch

    def open_epoch(self, iterator: EpochIterator) -> OpenEpoch:
        """Begin the next epoch for an iterator. Called by the iterator."""
        if self._state is LoaderState.CLOSED:
            raise LoaderClosed("the loader was closed; make a new one to go on")
        if self._session is None:
            if self._options.world_size > 1:
                raise RuntimeError(
                    f"the loader serves nb_consumer={self._options.world_size} consumers, and doesn't know which one "
                    f"this is; call loader.start(consumer_index) before iterating"
                )
            self.start()
        assert self._session is not None
        previous = self._current() if self._current is not None else None
        if previous is not None:
            previous.supersede()
        self._current = weakref.ref(iterator)
        opened = self._session.open_epoch(self._next_epoch)
        self._next_epoch += 1
        return opened

    def note_delivery(self, epoch: int, step: int) -> None:
        """Take note of what the loop has got. Called by the iterator."""
        del epoch  # only the step tells what is padded
        self._last_step = step

    # What it is -------------------------------------------------------------------------------------------------------

    @property
    def dataset(self) -> Any:
        """The dataset: the instance that was given, else one built here on first use, beside the workers'."""
        if self._dataset is None:
            self._dataset = self._options.source.make()
        return self._dataset

    @property
    def batch_size(self) -> int:
        """Samples per batch and consumer."""
        return self._options.batch_size

    @property
    def num_padding(self) -> int:
        """How many samples at the end of the batch delivered last are repeats, with `uneven="pad"`."""
        if self._session is None or self._last_step is None:
            return 0
        return self._session.plan.num_padding(self._last_step)

    def report(self) -> dict[str, Any]:
        """Return the times of the stages so far, as plain JSON types; empty with `benchmark=False`."""
        return self._session.metrics.report() if self._session is not None else {}

    def __repr__(self) -> str:
        options, session = self._options, self._session
        name = self._state.value if session is None else f"{self._state.value}, {session!r}"
        return (
            f"<SwiftLoader {name}; batch_size={options.batch_size}, nb_consumer={options.world_size}, "
            f"worker_per_consumer={options.num_workers}, shuffle={options.shuffle}, next epoch {self._next_epoch}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._state is not LoaderState.NEW:
            raise TypeError(f"a loader that is {self._state.value} can't be pickled; pickle it before start()")
        try:
            options = pickle.dumps(self._options)
        except Exception:  # a lambda, a local class: pickle says so in many ways
            import dill

            options = dill.dumps(self._options, recurse=True)
        return {"options": options, "next_epoch": self._next_epoch, "num_samples": self._num_samples}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._options = pickle.loads(state["options"])
        self._reset()
        self._next_epoch = state["next_epoch"]
        self._num_samples = state["num_samples"]

    # ------------------------------------------------------------------------------------------------------------------

    def _measure(self) -> int:
        """Return the dataset's length before the engine runs; builds it in a process that ends again, if need be."""
        if self._num_samples is None:
            if self._dataset is not None or not self._options.num_workers:
                self._num_samples = length_of(self.dataset)
            else:
                setup, settings = self._options.worker_setup(0, self._options.seed), self._options.process_settings()
                engine = ProcessEngine(setup, settings, Metrics(enabled=False), lambda _line: None)
                self._num_samples = engine.measure_dataset()
        return self._num_samples

    def _agree_on_seed(self) -> int:
        """Return the seed; rank 0's, if it came from the clock and there is a way to ask."""
        options = self._options
        if options.seed_is_given or options.world_size == 1:
            return options.seed
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            seeds = [options.seed]
            distributed.broadcast_object_list(seeds, src=0)
            return seeds[0]
        if options.made_in_pid == os.getpid():
            warnings.warn(
                f"nb_consumer={options.world_size}, but no seed was given and torch.distributed isn't initialised: if "
                f"each process makes its own loader, they will split different orders. Give seed=",
                stacklevel=3,
            )
        return options.seed


def _mover(device: Any, to_device: Callable[..., Any] | None) -> Callable[[Any], Any] | None:
    """Return what moves a batch, or None if batches stay where they are."""
    if to_device is not None and not callable(to_device):
        raise TypeError(f"to_device is a {type(to_device).__name__}, which can't be called; give a function, or None")
    if device is None:
        if to_device is not None:
            raise TypeError("to_device was given without a device; give both, or neither")
        return None
    import torch

    target = torch.device(device)
    return functools.partial(_apply, to_device or move_to_device, target)


def _apply(move: Callable[[Any, Any], Any], device: Any, batch: Any) -> Any:
    return move(batch, device)


def _option_names() -> list[str]:
    parameters = inspect.signature(SwiftLoader.__init__).parameters.values()
    return [parameter.name for parameter in parameters if parameter.name not in ("self", "unknown")]
