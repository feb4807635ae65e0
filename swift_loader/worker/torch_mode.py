"""How workers do as those of torch's DataLoader do, and where such a worker's dataset continues. Pure."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swift_loader.transport.segments import Segment, SegmentPool
from swift_loader.worker.stream_shard import StreamShard


@dataclass(frozen=True, slots=True)
class TorchMode:
    """What torch's workers know about their DataLoader."""

    num_workers: int
    worker_init_fn: Callable[[int], object] | None
    """Called with the worker's id before its first batch."""
    is_stream: bool
    """Whether the dataset is an `IterableDataset`."""
    auto_collation: bool
    """False: `batch_size=None`, so each key or each sample of a stream is a batch of its own."""
    batch_size: int
    """For a stream that is cut into batches."""
    drop_last: bool
    """For a stream: whether its last batch is left out if it isn't full."""
    snapshot_every: int
    """A snapshot comes with the first batch of a worker, and with every n-th one after it; 0: with none."""
    persists: bool = False
    """Whether the worker's generators go on from epoch to epoch. False: they are seeded for each."""
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
        """Return it as bytes, for `Dispatcher.begin`."""
        return pickle.dumps((self.snapshot, self.num_batches_to_skip, self.begins_anew))

    @classmethod
    def unpack(cls, data: bytes) -> Resume:
        """Return what is in `data`."""
        return cls(*pickle.loads(data))
