"""Decides who shares out a stream over workers and ranks: the dataset, as with torch, or the loader."""

from __future__ import annotations

import os
from typing import Any

import torch.utils.data
from torch.utils.data import DataLoader, IterableDataset

from swift_loader.batch.digests import digest_of, leaves_of
from swift_loader.checks import check_flag
from swift_loader.dataloader.state import LoaderPosition
from swift_loader.errors import warn
from swift_loader.interrupts import is_interrupt
from swift_loader.ranks.ranks import find_ranks
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.work import StreamWork
from swift_loader.worker.stream_shard import StreamShard
from swift_loader.worker.stream_state import is_huggingface

_WORKERS = "workers"
"""`shard_stream="workers"`: the dataset is this rank's part, and the loader shares it out to the workers."""


_MIN_SAMPLES = 16
"""How many samples of each worker are compared. Few of them may be equal by chance, like labels."""


def check_stream_options(dataset: Any, shard_stream: Any, equal_batches: Any) -> None:
    """Check `shard_stream` and `equal_batches`: their values, and that they are for such a dataset."""
    if check_flag("equal_batches", equal_batches) and not isinstance(dataset, IterableDataset):
        raise ValueError(
            f"equal_batches=True is for an IterableDataset; give a {type(dataset).__name__} a sampler that has equal "
            f"numbers on all ranks, see swift_loader.distributed"
        )
    if shard_stream is None or shard_stream is False:
        return
    if shard_stream is not True and shard_stream != _WORKERS:
        raise ValueError(f"shard_stream={shard_stream!r} isn't a choice; give True, False, {_WORKERS!r} or None")
    if not isinstance(dataset, IterableDataset):
        raise ValueError(  # noqa: TRY004 - torch's type for arguments that don't go together
            f"shard_stream={shard_stream!r} is for an IterableDataset; the samples of a "
            f"{type(dataset).__name__} are shared out by its sampler, see swift_loader.distributed"
        )
    if isinstance(dataset, torch.utils.data.IterDataPipe):
        raise ValueError(  # noqa: TRY004
            f"shard_stream={shard_stream!r} isn't for a DataPipe, which shares itself out at its sharding_filter(); "
            f"leave shard_stream out"
        )


def shard_of(loader: Any) -> StreamShard | None:
    """Return this rank's part of a stream that the loader shares out. None: the dataset does that."""
    choice = loader.shard_stream
    if not choice:
        return None
    if choice is not True or _is_of_one_rank(loader.dataset):
        return StreamShard()
    ranks = find_ranks(None, None)
    return StreamShard(ranks.rank, ranks.world_size, loader.equal_batches)


def check_resumes(loader: Any, position: LoaderPosition) -> None:
    """Check that the loader can continue at a position. Raises `StateMismatch` if it can't."""
    shard = shard_of(loader)
    position.check_fits(
        num_workers=loader.num_workers,
        is_stream=isinstance(loader.dataset, IterableDataset),
        num_sharing=0 if shard is None else shard.world_size,
    )


class Copies:
    """Finds out whether all workers give the same samples of a stream: torch repeats them, too, and few want that."""

    def __init__(self, name: str, num_workers: int, batch_size: int | None) -> None:
        """`name` is the dataset's, for the warning."""
        self._name = name
        self._num_batches = -(-_MIN_SAMPLES // (batch_size or 1))
        self._digests: list[list[bytes]] | None = [[] for _ in range(num_workers)]
        """Of the first batches, by worker. None: the verdict is known."""
        self._warning = ""

    def note(self, delivery: Delivery) -> None:
        """Take in a batch, or the end."""
        work, found = delivery.work, self._digests
        if found is None:
            return
        if delivery.error is None and isinstance(work, StreamWork) and len(found[work.worker_id]) < self._num_batches:
            found[work.worker_id].append(_digest_of(delivery.batch))
        is_known = delivery.is_end or all(len(one) == self._num_batches for one in found)
        are_equal = all(one[: len(found[0])] == found[0][: len(one)] for one in found)
        if is_known and are_equal and found[0] and all(len(one) == len(found[0]) for one in found):
            self._warning = (
                f"each of {len(found)} workers gives the same samples of the {self._name}, so they come {len(found)} "
                f"times, as with torch. shard_stream=True shares them out; shard_stream=False says that you want this"
            )
        if is_known or not are_equal or delivery.error is not None:
            self._digests = None

    def warn(self) -> None:
        """Issue the warning, once. A filter may make it an error, so the loop mustn't hold a batch."""
        warning, self._warning = self._warning, ""
        if warning:
            warn(warning)


def _digest_of(batch: Any) -> bytes:
    try:
        return b"".join(digest_of(leaf) for _, leaf in leaves_of(batch))
    except Exception as error:  # what can't be pickled is like nothing else
        if is_interrupt(error):
            raise
        return os.urandom(16)


def copies_of(loader: DataLoader[Any]) -> Copies | None:
    """Return what looks whether all workers give the same. None if the user has said who shares the stream out."""
    dataset: Any = loader.dataset
    if getattr(loader, "shard_stream", None) is not None or loader.num_workers <= 1:
        return None
    return Copies(type(dataset).__name__, loader.num_workers, loader.batch_size)


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
