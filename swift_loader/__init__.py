"""swift_loader: a drop-in multiprocess DataLoader for PyTorch.

The path of a batch, and where each part runs:

    sampling      computes the samples of (seed, epoch, step, rank); pure arithmetic        every process
    scheduler     decides which worker builds the batch, and which batch comes next; pure   trainer, any thread
    task pipe     carries (generation, sequence, epoch, step); a few dozen bytes            trainer -> worker
    worker        fetches the samples and collates them into a slot of shared memory        worker
    counters      count the tasks begun; readable after the worker's death                  worker -> trainer
    result pipe   carries the layout of the slot; a few hundred bytes                       worker -> trainer
    inbox         waits for messages; its reader makes arrays that are views of the slot    trainer, thread that leads
    engine        hands the batches to the loop, in order                                   trainer, loop's thread
    device        copies the batch on a side stream, if a device was given; keeps the       trainer, loop's thread
                  host's batch until the copy is over
    lease         returns the slot to its worker when the last view of the batch dies       trainer, any thread

The scheduler decides, and touches nothing: events and times come in, actions go out. Executors act, and decide nothing:
processes, threads, or the calling thread. The thread that leads, the loop's or a receiver thread, carries events and
actions between them.

Workers are forked from a *template*: one fresh, single-threaded interpreter that built the dataset. Workers share
nothing with each other. A worker's death closes its pipe, which is an event. Then the scheduler gives its batches to
other workers, and has the *starter*, a thread of the trainer, fork a replacement, unless too many died. The kernel
kills the template when the trainer ends, and the workers when the template ends, whatever they are doing.

A loader's template is itself a fork, of the *root*: one fresh interpreter per training process, which has imported what
datasets need. See `executors.process.roots`.

All processes must have the same dataset. `executors.environment` records what a dataset depends on (working
directory, environment, import path, hash seed) and gives it to every interpreter that builds one.
`executors.process.reader` compares what they built. A dataset that holds open files can't be shared, so each worker
builds its own: see `worker.template`.

A run can stop after any batch. `sampling.run` counts what the loop got and has the saved form, `sampling.plan`
continues with another batch size or number of ranks. A sample's random draws depend on the sample alone: see
`worker.seeding`.

`DataLoader` in `dataloader` has torch's signature. It runs on the same scheduler and executors; a sampler or a stream
takes the plan's place.

Where to look: docs/code.md has the threads, the owners of memory, and walks through the code.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift_loader.batch.collate import BatchMemory, default_collate
    from swift_loader.cache import cached
    from swift_loader.dataloader.dataloader import DataLoader
    from swift_loader.device.move import to_device
    from swift_loader.device.prefetch import DevicePrefetcher, batch_key
    from swift_loader.errors import (
        CacheCorrupt,
        CacheMismatch,
        DatasetMismatch,
        EncodeError,
        LoaderClosed,
        NoDescriptorsLeft,
        NoProcessesLeft,
        ProtocolError,
        RankDied,
        RankMismatch,
        RankStalled,
        RemoteTraceback,
        SamplesDraw,
        SharedMemoryFull,
        SharedMemoryLost,
        StateMismatch,
        SwiftLoaderError,
        SwiftLoaderWarning,
        TooManyErrors,
        WorkerDied,
        WorkerError,
        WorkerStalled,
    )
    from swift_loader.loader import SwiftLoader
    from swift_loader.options import RayExecutor
    from swift_loader.samplers.lengths import LengthBucketBatchSampler, TokenBudgetBatchSampler
    from swift_loader.samplers.packing import PackCollate, PackedDataset
    from swift_loader.samplers.sharded import ShuffleBatchSampler, ShuffleSampler, distributed
    from swift_loader.samplers.weighted import StratifiedBatchSampler, WeightedBatchSampler
    from swift_loader.sampling.mixture import Mixture
    from swift_loader.scheduler.sample_errors import SampleFailure
    from swift_loader.shared.lists import SharedList
    from swift_loader.worker.mapped import mapped
    from swift_loader.worker.seeding import sample_rng
    from swift_loader.worker.stream import Stateful

__all__ = [
    "BatchMemory",
    "CacheCorrupt",
    "CacheMismatch",
    "DataLoader",
    "DatasetMismatch",
    "DevicePrefetcher",
    "EncodeError",
    "LengthBucketBatchSampler",
    "LoaderClosed",
    "Mixture",
    "NoDescriptorsLeft",
    "NoProcessesLeft",
    "PackCollate",
    "PackedDataset",
    "ProtocolError",
    "RankDied",
    "RankMismatch",
    "RankStalled",
    "RayExecutor",
    "RemoteTraceback",
    "SampleFailure",
    "SamplesDraw",
    "SharedList",
    "SharedMemoryFull",
    "SharedMemoryLost",
    "ShuffleBatchSampler",
    "ShuffleSampler",
    "StateMismatch",
    "Stateful",
    "StratifiedBatchSampler",
    "SwiftLoader",
    "SwiftLoaderError",
    "SwiftLoaderWarning",
    "TokenBudgetBatchSampler",
    "TooManyErrors",
    "WeightedBatchSampler",
    "WorkerDied",
    "WorkerError",
    "WorkerStalled",
    "batch_key",
    "cached",
    "default_collate",
    "distributed",
    "mapped",
    "sample_rng",
    "to_device",
]

__version__ = "0.2.0"

_HOMES = {
    "BatchMemory": "swift_loader.batch.collate",
    "DataLoader": "swift_loader.dataloader.dataloader",
    "DevicePrefetcher": "swift_loader.device.prefetch",
    "Mixture": "swift_loader.sampling.mixture",
    "LengthBucketBatchSampler": "swift_loader.samplers.lengths",
    "PackCollate": "swift_loader.samplers.packing",
    "PackedDataset": "swift_loader.samplers.packing",
    "RayExecutor": "swift_loader.options",
    "SampleFailure": "swift_loader.scheduler.sample_errors",
    "SharedList": "swift_loader.shared.lists",
    "ShuffleBatchSampler": "swift_loader.samplers.sharded",
    "ShuffleSampler": "swift_loader.samplers.sharded",
    "Stateful": "swift_loader.worker.stream",
    "StratifiedBatchSampler": "swift_loader.samplers.weighted",
    "SwiftLoader": "swift_loader.loader",
    "TokenBudgetBatchSampler": "swift_loader.samplers.lengths",
    "WeightedBatchSampler": "swift_loader.samplers.weighted",
    "batch_key": "swift_loader.device.prefetch",
    "cached": "swift_loader.cache",
    "default_collate": "swift_loader.batch.collate",
    "distributed": "swift_loader.samplers.sharded",
    "mapped": "swift_loader.worker.mapped",
    "sample_rng": "swift_loader.worker.seeding",
    "to_device": "swift_loader.device.move",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use. Workers import this package too, and need little of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    is_collecting = gc.isenabled()
    gc.disable()  # in a program with torch, one collection takes as long as this import, and finds nothing
    try:
        value = getattr(import_module(_HOMES.get(name, "swift_loader.errors")), name)
    finally:
        if is_collecting:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
