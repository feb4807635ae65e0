"""What workers do as those of torch's DataLoader do: their settings, and how their datasets' states travel.

`TorchWorker` makes a process look to the dataset like a worker of torch's: `get_worker_info()`, the seeds, and
`default_collate`. Only worker processes do this. torch is imported by the template, so that all workers share it.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swift_loader.batch.collate import use_in_default_collate
from swift_loader.checks import can_call_without_arguments
from swift_loader.transport.segments import Segment, SegmentPool
from swift_loader.worker.process import name_child
from swift_loader.worker.seeding import Rng

# What is sent to workers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamShard:
    """One rank of those that share a stream."""

    rank: int = 0
    world_size: int = 1
    is_even: bool = False
    """Whether all ranks get the same number of samples. The last `world_size - 1` samples or fewer are left out."""


@dataclass(frozen=True, slots=True)
class TorchMode:
    """What torch's workers know about their DataLoader."""

    num_workers: int
    worker_init_fn: Callable[[int], object] | None = None
    """Called with the worker's id before its first batch."""
    is_stream: bool = False
    """Whether the dataset is an `IterableDataset`."""
    auto_collation: bool = False
    """False: `batch_size=None`, so each key or each sample of a stream is a batch of its own."""
    batch_size: int = 1
    """For a stream that is cut into batches."""
    drop_last: bool = False
    """For a stream: whether its last batch is left out if it isn't full."""
    snapshot_every: int = 0
    """A snapshot comes with the first batch of a worker, and with every n-th one after it; 0: with none."""
    persists: bool = False
    """Whether the worker serves all epochs."""
    collate_functions: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    """What the user registered in torch's `default_collate_fn_map`."""
    shard: StreamShard | None = None
    """The rank's part of a stream that the loader shares out, also over the workers. None: the dataset does it."""
    pool: SegmentPool | None = None
    """Gets the workers' memory once they have ended. None if they aren't forks of the trainer."""
    kept: dict[int, list[Segment]] = field(default_factory=dict)
    """Memory of earlier workers, by the id of the worker that gets it. Trainer and worker take it out of their copies,
    so a worker that replaces another one gets none."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a worker's dataset after a batch."""

    num_batches: int
    """How many batches the worker has built since its dataset's beginning: for a stream, those of its shard; for one
    that the loader shares out, those of all workers of the rank."""
    has_ended: bool = False
    """Whether the shard of a stream has no more batches."""
    iterator: Any = None
    """What the `state_dict` of the stream's iterator returned; None if it has none."""
    dataset: Any = None
    """What the `state_dict` of the dataset returned; None if it has none, or if it is its own iterator."""
    worker_id: int = 0
    num_to_skip: int = 0
    """How many samples other ranks get first; see `RankSamples`."""

    def pack(self) -> bytes:
        """Return the snapshot as bytes."""
        fields = (self.num_batches, self.has_ended, self.iterator, self.dataset, self.worker_id, self.num_to_skip)
        return pickle.dumps(fields)

    @classmethod
    def unpack(cls, data: bytes) -> Snapshot:
        """Return the snapshot in `data`."""
        return cls(*pickle.loads(data))


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a worker's dataset continues."""

    snapshot: bytes | None
    """A packed `Snapshot`; None: the dataset's beginning."""
    num_batches_to_skip: int = 0
    """How many batches after the snapshot aren't wanted. Only for a stream."""
    begins_anew: bool = False
    """Whether a stream begins anew once the snapshot, of its end, was restored. Only for a stream."""

    def pack(self) -> bytes:
        """Return it as bytes, for `Engine.begin`."""
        return pickle.dumps((self.snapshot, self.num_batches_to_skip, self.begins_anew))

    @classmethod
    def unpack(cls, data: bytes) -> Resume:
        """Return what is in `data`."""
        return cls(*pickle.loads(data))


# Process-wide settings of torch ---------------------------------------------------------------------------------------

# Only `set_default_dtype` imports torch; the others use it if it is imported.

# Keeps the loop's `torch.inference_mode()` away from batches: a batch may be used after that mode, in training.


def is_inference_mode() -> bool:
    """Return whether this thread is in `torch.inference_mode()`. Doesn't import torch."""
    is_enabled = getattr(sys.modules.get("torch"), "is_inference_mode_enabled", None)
    return is_enabled is not None and is_enabled()


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make tensors that autograd accepts, also inside `torch.inference_mode()`. The grad mode stays the same."""
    if not is_inference_mode():
        yield
        return
    torch: Any = sys.modules["torch"]
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def set_default_dtype(name: str) -> None:
    """Set torch's default dtype, and import torch for it; do nothing if `name` is empty."""
    if name:
        import torch

        torch.set_default_dtype(getattr(torch, name))


def set_num_threads(number: int) -> None:
    """Set the number of threads that torch uses, if torch is imported."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != number:
        torch.set_num_threads(number)


@contextmanager
def limited_threads(number: int) -> Iterator[None]:
    """Set the number of torch's threads temporarily: the last bit of sums and convolutions depends on it."""
    torch: Any = sys.modules.get("torch")
    before = number if torch is None else torch.get_num_threads()
    try:
        set_num_threads(number)
        yield
    finally:
        if before != number:
            torch.set_num_threads(before)


def is_stateful(thing: Any) -> bool:
    """Return whether an object is `Stateful`, also by `__getattr__`, which `isinstance` doesn't see everywhere.

    Not if its `state_dict` needs arguments, which only a loader of its own package knows, or is that of every
    `torch.nn.Module`: its weights.
    """
    torch: Any = sys.modules.get("torch")
    is_of_weights = torch is not None and getattr(type(thing), "state_dict", None) is torch.nn.Module.state_dict
    can_load = hasattr(thing, "load_state_dict") and not is_of_weights
    return can_load and can_call_without_arguments(getattr(thing, "state_dict", None))


def epoch_of(thing: Any) -> int | None:
    """Return the epoch of a sampler or dataset. None if `set_epoch` doesn't set one.

    A shuffled order depends on it. After a restart, Fabric and Accelerate count epochs from 0 again, and a Lightning
    Trainer calls `set_epoch` after `iter`, so a state keeps the epochs of what it describes.
    """
    epoch = getattr(thing, "epoch", None) if hasattr(thing, "set_epoch") else None
    return epoch if isinstance(epoch, int) else None


# A worker, as the dataset sees it -------------------------------------------------------------------------------------


class TorchWorker:
    """This process, as the dataset sees it."""

    def __init__(self, mode: TorchMode, rng: Rng, worker_id: int, dataset: Any) -> None:
        self.worker_id = worker_id
        self._mode = mode
        self._rng = rng
        self._dataset = dataset
        self._info: Any = None
        self._base_seed: int | None = None
        """What the generators were seeded with."""

    def begin(self, base_seed: int) -> None:
        """Seed the generators, let torch's functions do as in its workers, and call `worker_init_fn`."""
        self.reseed(base_seed)
        self._announce(base_seed)
        self._base_seed = base_seed
        name_child(f"DataLoader worker {self.worker_id}")
        use_in_default_collate(self._mode.collate_functions)
        if self._mode.worker_init_fn is not None:
            self._mode.worker_init_fn(self.worker_id)

    def use_seed(self, base_seed: int) -> None:
        """Begin a generation with this seed. Generators that `worker_init_fn` may have seeded aren't seeded again,
        unless they were to be seeded by the loader.
        """
        if base_seed == self._base_seed:  # of persistent workers it is that of all epochs, and epochs must differ
            return
        self._base_seed = base_seed
        self._announce(base_seed)
        if self._rng is not Rng.NONE or self._mode.worker_init_fn is None:
            self.reseed(base_seed)

    def reseed(self, base_seed: int) -> None:
        """Seed `random`, torch's default generator and the legacy `numpy.random` as torch's workers do."""
        worker_id = self.worker_id if self._mode.shard is None else 0  # a shared stream is the same in all workers
        random.seed(base_seed + worker_id)
        _seed_torch(base_seed + worker_id)
        # The two halves of the seed: NumPy's seeds have 32 bits.
        words = [worker_id, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]
        np.random.seed(np.random.SeedSequence(words).generate_state(4))  # noqa: NPY002 - the generator that users have

    def _announce(self, base_seed: int) -> None:
        """Let torch's `get_worker_info()` answer with this seed from now on."""
        from torch.utils.data._utils import worker

        self._info = worker.WorkerInfo(
            id=self.worker_id,
            num_workers=self._mode.num_workers,
            seed=base_seed + self.worker_id,
            dataset=self._dataset,
        )
        worker._worker_info = self._info  # noqa: SLF001 - torch has no other way to set it

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let `get_worker_info()` answer None, as in the main process, so that no stream is shared out twice."""
        from torch.utils.data._utils import worker

        worker._worker_info = None  # noqa: SLF001
        try:
            yield
        finally:
            worker._worker_info = self._info  # noqa: SLF001


def _seed_torch(seed: int) -> None:
    """Do what `torch.manual_seed` does. For accelerators that aren't there, it reads the source of each frame: 3 ms."""
    import torch

    builds = (getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu"))
    own = torch._C._get_privateuse1_backend_name()  # noqa: SLF001 - torch has no other way to ask
    if any(builds) or torch.backends.mps.is_built() or hasattr(torch, own):
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@dataclass(frozen=True, slots=True)
class TorchThread:
    """A worker thread. It has no generators of its own, and `get_worker_info()` can't tell it from other threads."""

    worker_id: int

    def use_seed(self, base_seed: int) -> None:
        """Do nothing. `sample_rng()` is keyed by the seed in any case."""


TorchIdentity = TorchWorker | TorchThread
