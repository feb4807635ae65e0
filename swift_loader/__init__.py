"""swift_loader: a drop-in multiprocess DataLoader for PyTorch.

The life of a batch, and who has it when:

    order, plan   pure arithmetic: which samples, for any (seed, epoch, step, rank)         every process
    ledger        which worker builds it, and which batch is delivered next                 trainer
    task pipe     a few dozen bytes: (generation, sequence, epoch, step)                    trainer -> worker
    worker        fetches the samples, collates them straight into a slot of shared memory  worker
    board         how many tasks it has begun, to be seen also after its death              worker -> trainer
    result pipe   a few hundred bytes: where in the slot what lies                          worker -> trainer
    receiver      makes arrays and tensors that are views of the slot, no copy              trainer, own thread
    delivery      puts batches back in order                                                trainer, own thread
    device        copies the batch on a side stream, if a device was given, and keeps the   trainer, loop's thread
                  host's until the copy is over
    lease         the last view of the batch dies: the slot goes back to its worker         trainer, any thread

Workers are forked from a *template*: one fresh, single-threaded interpreter that built the dataset. Nothing is shared
between workers. A worker's death is the end of its pipe: its batches go back to the ledger, which has others build
them, and the *pool*, a thread of the trainer, forks another worker in its place, unless the *coroner* says that it
can't go on like that. The kernel ends the template with the trainer, and the workers with the template, whatever they
are doing.

All processes must have the same dataset: `engine.launch` records what it depends on (working directory, environment,
import path, hash seed) for every interpreter that builds it, and `engine.builds` compares what they report. A dataset
that can't be shared, because it holds open files, is built by each worker: `worker.template` tells how.

A run can be stopped after any batch: `state` is what is saved of it, `progress` how far the loop has got, and `plan`
how it goes on with other batches. What a sample draws at random depends on the sample alone: `worker.seeding`.

Where to look: `loader` is the API; `run` what outlives it; `placement`, `agreement` and `meeting` are about the other
ranks; `bad_samples` what is known of those that failed; `collate` is the default collate; `engine` the trainer's side
of the processes; `worker` the other side; `transport` what lies between; `device` what comes after, for this loader
and, with `DevicePrefetcher`, for any other; `vision` is timm's loader on top of all that; `integrations` what
frameworks need besides.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift_loader.bad_samples import SampleFailure
    from swift_loader.collate import default_collate
    from swift_loader.device.keys import batch_key
    from swift_loader.device.move import to_device
    from swift_loader.device.prefetcher import DevicePrefetcher
    from swift_loader.errors import (
        DatasetMismatch,
        EncodeError,
        LoaderClosed,
        NoDescriptorsLeft,
        ProtocolError,
        RemoteTraceback,
        SharedMemoryFull,
        StateMismatch,
        SwiftLoaderError,
        SwiftLoaderWarning,
        TooManyErrors,
        WorkerDied,
        WorkerError,
        WorkerStalled,
    )
    from swift_loader.loader import SwiftLoader
    from swift_loader.worker.seeding import sample_rng

__all__ = [
    "DatasetMismatch",
    "DevicePrefetcher",
    "EncodeError",
    "LoaderClosed",
    "NoDescriptorsLeft",
    "ProtocolError",
    "RemoteTraceback",
    "SampleFailure",
    "SharedMemoryFull",
    "StateMismatch",
    "SwiftLoader",
    "SwiftLoaderError",
    "SwiftLoaderWarning",
    "TooManyErrors",
    "WorkerDied",
    "WorkerError",
    "WorkerStalled",
    "batch_key",
    "default_collate",
    "sample_rng",
    "to_device",
]

__version__ = "0.2.0"

_HOMES = {
    "DevicePrefetcher": "swift_loader.device.prefetcher",
    "SampleFailure": "swift_loader.bad_samples",
    "SwiftLoader": "swift_loader.loader",
    "batch_key": "swift_loader.device.keys",
    "default_collate": "swift_loader.collate",
    "sample_rng": "swift_loader.worker.seeding",
    "to_device": "swift_loader.device.move",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: a worker imports this package, too, and needs little of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "swift_loader.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
