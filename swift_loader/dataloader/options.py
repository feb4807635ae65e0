"""What the options of a DataLoader mean, and which of them go together.

A loader has its options as attributes, as torch's has, and a program may change them between two epochs. So all of this
reads a loader as it is now.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import random
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from swift_loader.batch.tree import search
from swift_loader.checks import check_choice, check_flag, checked
from swift_loader.device.accelerator import accelerator, device_of, pinning_accelerator
from swift_loader.device.pinning import pinning
from swift_loader.integrations import FRAMEWORKS
from swift_loader.options import AUTO, AutoWorkers, DeliveryOptions, WorkerType, check_executor
from swift_loader.ranks.ranks import find_ranks
from swift_loader.worker.mapped import tasks_ahead
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import StartMethod
from swift_loader.worker.stream import is_huggingface
from swift_loader.worker.torch_worker import StreamShard, is_stateful

DEFAULT_PREFETCH = 2
"""torch's default, with which this loader chooses how many batches are in flight."""

# Workers --------------------------------------------------------------------------------------------------------------


_SAME = ("worker_type", "timeout", "stall_warning", "worker_restarts", "executor", "max_nb_batch_on_device")
"""Options that both loaders have, with one meaning."""


def delivery_of(loader: DataLoader[Any]) -> DeliveryOptions:
    """Return how batches come to the loop, and from what kind of workers. The checks are SwiftLoader's.

    Raises `TypeError` or `ValueError` if an option is wrong or contradicts another one.
    """
    prefetch: int | None = loader.prefetch_factor
    translated = {
        "worker_per_consumer": loader.num_workers,
        "data_queue_size": None if prefetch in (None, DEFAULT_PREFETCH) else max(1, prefetch * loader.num_workers),
        "in_order": bool(loader.in_order),
    }
    same = {name: getattr(loader, name) for name in _SAME}
    delivery = checked(DeliveryOptions, {**same, **translated})  # the loop's thread pins
    size = loader.batch_size or (
        1 if loader.batch_sampler is None else getattr(loader.batch_sampler, "batch_size", None)
    )
    delivery = replace(delivery, num_ahead=tasks_ahead(loader.dataset, size))
    if delivery.uses_threads:
        _check_threads(loader)
    return delivery


def start_method_of(loader: DataLoader[Any]) -> StartMethod:
    """Return how to start worker processes: as `multiprocessing_context` says.

    None: what torch takes then, the program's default, which is a fork on Linux before Python 3.14.
    """
    context = loader.multiprocessing_context
    if context is None:  # the first of all is the system's default; asking for it would fix it
        asked = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    else:
        asked = context.get_start_method()
    if asked == "fork" and getattr(loader, "_why_no_fork", None):
        return StartMethod.TEMPLATE
    return {"fork": StartMethod.FORK, "spawn": StartMethod.SPAWN}.get(asked, StartMethod.TEMPLATE)


def num_of_actors(executor: Any, num_workers: int, others: Mapping[str, Any], worker_type: Any) -> int:
    """Return the number of workers: that of the executor, if there is one.

    `num_workers`: 0 if it wasn't given. `others`: options that say where workers come from, by name; None: not given.
    Raises `TypeError` if it is no executor, `ValueError` if another option contradicts it.
    """
    actors = check_executor("executor", executor)
    if actors is None:
        return num_workers
    if num_workers not in (0, actors.num_workers):
        raise ValueError(
            f"num_workers={num_workers} was given with an executor of {actors.num_workers}; leave num_workers out"
        )
    given = [f"{name}=" for name, value in others.items() if value is not None]
    given += [f"worker_type={worker_type!r}"] if worker_type != WorkerType.PROCESS else []
    if given:
        raise ValueError(f"{' and '.join(given)} was given with executor=, which says where workers are; leave it out")
    return actors.num_workers


def _check_threads(loader: DataLoader[Any]) -> None:
    """Check that threads can do what a loader asks of its workers.

    torch's `get_worker_info()` answers for the whole process, so in a thread it returns None, and a stream can't find
    its share. Threads share the global generators, so a stream that the loader shares out would differ, too.
    """
    instead = "worker_type='process'"
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers > 1:
        raise ValueError(
            f"num_workers={loader.num_workers} doesn't work with worker_type='thread' and an IterableDataset because "
            f"torch's get_worker_info() can't tell threads apart, and a stream that draws from the global generators "
            f"would differ from thread to thread; give num_workers=1 or {instead}"
        )
    if _has_init_of_user(loader):
        raise ValueError(
            f"worker_init_fn doesn't work with worker_type='thread' because it sets up a process, and threads share "
            f"that of the training loop; leave it out, or give {instead}"
        )
    if wanted_rng(loader) is Rng.WORKER:
        raise ValueError(
            f"rng='worker' doesn't work with worker_type='thread' because threads share the random generators; give "
            f"rng='sample' or rng=None, or {instead}"
        )


GENERATOR_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Kinds of generators that a program may have of its own."""

# The number of workers may change if no batch shows which worker has built it -----------------------------------------


def shows_its_worker(loader: DataLoader[Any]) -> bool:
    """Return whether the batches of an epoch depend on who builds which.

    They do if they come from a worker's own shard, state or generator. Out of order, generators give other draws in
    each run anyway.
    """
    if isinstance(loader.dataset, IterableDataset) or is_stateful(loader.dataset):
        return True
    if not loader.in_order:
        return False
    if not delivery_of(loader).uses_threads and rng_of(loader) is not Rng.SAMPLE:
        return True
    return any(search([loader.dataset, loader.collate_fn], lambda thing: issubclass(type(thing), GENERATOR_KINDS)))


def checked_num_workers(num_workers: Any) -> int:
    """Return the number of workers to begin with. Raises `TypeError` if it is no number, and not `"auto"`."""
    if isinstance(num_workers, str) and num_workers == AUTO:
        return AutoWorkers(1)
    if not isinstance(num_workers, SupportsIndex):
        raise TypeError(f"num_workers={num_workers!r} is a {type(num_workers).__name__}; give an integer, or {AUTO!r}")
    return num_workers  # type: ignore[return-value] # torch takes whatever counts as an integer


def check_auto(loader: DataLoader[Any]) -> None:
    """Check that no batch depends on when the number of workers changes, if the loader chooses it."""
    if not isinstance(loader.num_workers, AutoWorkers) or not shows_its_worker(loader):
        return
    reason = (
        "an IterableDataset gives other batches with another number of workers"
        if isinstance(loader.dataset, IterableDataset)
        else "its batches show which worker builds them: because of worker_init_fn, rng=None, or a state_dict or a "
        "generator of the dataset's own"
    )
    raise ValueError(f"num_workers={AUTO!r} doesn't work with this loader: {reason}. Give a number of workers")


# Random draws ---------------------------------------------------------------------------------------------------------


def wanted_rng(loader: DataLoader[Any]) -> Rng:
    """Return what the option `rng` says."""
    wanted: Any = getattr(loader, "rng", None)
    return check_choice("rng", "none" if wanted is None else wanted, Rng)


def rng_of(loader: DataLoader[Any]) -> Rng:
    """Return how to seed: as the option `rng` says, unless a stream or the user's `worker_init_fn` forbids it.

    A stream can't be read twice, so its draws can't be keyed by sample. A `worker_init_fn` of the user's may have
    seeded the generators, and his samples expect that.
    """
    rng = wanted_rng(loader)
    if isinstance(loader.dataset, IterableDataset):
        return Rng.NONE
    return Rng.NONE if rng is Rng.SAMPLE and _has_init_of_user(loader) else rng


def _has_init_of_user(loader: DataLoader[Any]) -> bool:
    """Return whether there is a `worker_init_fn` that may do more than those of frameworks.

    Theirs only give each worker another seed, which keyed samples have anyway.
    """
    worker_init_fn: Any = loader.worker_init_fn
    while isinstance(worker_init_fn, functools.partial):
        worker_init_fn = worker_init_fn.func
    package = str(getattr(worker_init_fn, "__module__", "")).partition(".")[0]
    return worker_init_fn is not None and package not in FRAMEWORKS


# Who shares out a stream over workers and ranks: the dataset, as with torch, or the loader ----------------------------


def check_stream_options(dataset: Any, shard_stream: Any, equal_batches: Any) -> None:
    """Check `shard_stream` and `equal_batches`: their values, and that they are for such a dataset."""
    if check_flag("equal_batches", equal_batches) and not isinstance(dataset, IterableDataset):
        raise ValueError(
            f"equal_batches=True is for an IterableDataset; give a {type(dataset).__name__} a sampler that has equal "
            f"numbers on all ranks, see swift_loader.distributed"
        )
    if shard_stream is None or shard_stream is False:
        return
    if shard_stream is not True and shard_stream != "workers":
        raise ValueError(f"shard_stream={shard_stream!r} isn't a choice; give True, False, 'workers' or None")
    if not isinstance(dataset, IterableDataset):
        raise ValueError(  # noqa: TRY004 - torch's type for arguments that don't go together
            f"shard_stream={shard_stream!r} is for an IterableDataset; the samples of a "
            f"{type(dataset).__name__} are shared out by its sampler, see swift_loader.distributed"
        )


def num_samples_of(loader: Any) -> int | None:
    """Return how many samples an epoch has, for `max_errors`; None: nobody says it, or nobody needs it.

    Raises `ValueError` if the options for samples that fail can't be kept.
    """
    if loader.on_error == "raise":
        return None
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(  # noqa: TRY004 - torch's type for arguments that don't go together
            "on_error='skip' is for a map-style dataset: an iterator that has raised can't go on. Let the __iter__ of "
            f"the {type(loader.dataset).__name__} leave out what it can't read"
        )
    number, batches = None, loader.batch_sampler
    with suppress(TypeError, NotImplementedError, AttributeError):  # a sampler needs no length
        is_own = loader.batch_size is None and batches is not None
        number = len(batches) * batches.batch_size if is_own else len(loader.sampler)
    if number is None and isinstance(loader.max_errors, float):
        raise ValueError(
            f"max_errors={loader.max_errors} is a fraction of the epoch's samples, whose number the sampler doesn't "
            f"say: it has no length, or a batch sampler no batch_size. Give an integer"
        )
    return number


def shard_of(loader: Any) -> StreamShard | None:
    """Return this rank's part of a stream that the loader shares out. None: the dataset does that."""
    choice = loader.shard_stream
    if not choice:
        return None
    if choice is not True or _is_of_one_rank(loader.dataset):  # with "workers", it is known to be
        return StreamShard()
    ranks = find_ranks(None, None)
    return StreamShard(ranks.rank, ranks.world_size, loader.equal_batches)


def len_of_shard(num_samples: int, shard: StreamShard) -> int:
    """Return how many samples of a stream this rank gets."""
    if shard.is_even:
        return num_samples // shard.world_size
    return len(range(shard.rank, num_samples, shard.world_size))


def _is_of_one_rank(dataset: Any) -> bool:
    """Return whether a stream is known to be one rank's part.

    True for what `datasets.distributed.split_dataset_by_node` returns, and for the `IterableDatasetShard` that
    Accelerate and transformers make.
    """
    if is_huggingface(dataset):
        return getattr(dataset, "_distributed", None) is not None
    return hasattr(dataset, "num_processes") and hasattr(dataset, "process_index")


# Page-locked memory ---------------------------------------------------------------------------------------------------


def warn_of_pinning(loader: DataLoader[Any]) -> None:
    """Warn as torch does if `pin_memory` has no effect."""
    if not loader.pin_memory:
        return
    if loader.pin_memory_device:
        warnings.warn(
            f"pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device={loader.pin_memory_device!r}.",
            stacklevel=7,
        )
    kind = accelerator()
    if kind in (None, "mps"):
        problem = "no accelerator is found, then" if kind is None else "not supported on MPS now,"
        warnings.warn(
            f"'pin_memory' argument is set as true but {problem} device pinned memory won't be used.", stacklevel=7
        )


def pinning_of(loader: DataLoader[Any], *, receives: bool) -> Callable[..., Any] | None:
    """Return what page-locks each batch as torch does; None: nothing is to be done.

    `receives`: on any thread. Else in the loop's.
    """
    is_wanted = loader.pin_memory and not loader._mover.depth  # type: ignore[attr-defined] # noqa: SLF001
    kind = pinning_accelerator() if is_wanted else None
    if kind is None:
        return None
    from torch.utils.data._utils.pin_memory import pin_memory

    device = device_of(kind)

    def pinned(batch: Any, _memory: Any = None) -> Any:
        with pinning(device) if receives else nullcontext():
            return pin_memory(batch, kind)

    return pinned


# Other loaders --------------------------------------------------------------------------------------------------------


def converted(loader: DataLoader[Any], kind: Any, like: Any = None) -> Any:
    """Return a `kind`, a DataLoader, with the same dataset, samplers and options. `loader` hasn't been iterated over.

    Options that torch doesn't have are taken from `like`, if it has them.
    """
    options: dict[str, Any] = {}
    apart = {"self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
    for name in inspect.signature(kind.__init__).parameters.keys() - apart:
        owner = loader if hasattr(loader, name) else like
        if hasattr(owner, name):
            options[name] = getattr(owner, name)
    if not loader.num_workers:
        options["prefetch_factor"] = None  # torch refuses another one
    if loader.batch_size is None and loader.batch_sampler is not None:
        return kind(loader.dataset, batch_sampler=loader.batch_sampler, **options)
    if not isinstance(loader.dataset, IterableDataset):
        options["sampler"] = loader.sampler
    return kind(loader.dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **options)
