"""Decides who shares out a stream over workers and ranks: the dataset, as with torch, or the loader."""

from __future__ import annotations

from typing import Any

import torch.utils.data
from loguru import logger
from torch.utils.data import DataLoader, IterableDataset

from swift_loader.checks import check_flag
from swift_loader.dataloader.copy_probe import CopyProbe
from swift_loader.dataloader.dealing import dealt_out
from swift_loader.dataloader.randomness import has_init_of_user
from swift_loader.dataloader.state import LoaderPosition
from swift_loader.errors import StateMismatch
from swift_loader.ranks.ranks import find_ranks
from swift_loader.worker.stream_shard import StreamShard
from swift_loader.worker.stream_state import is_huggingface

__all__ = ["Sharing", "check_stream_options", "len_of_shard"]

_WORKERS = "workers"
"""`shard_stream="workers"`: the dataset is this rank's part, and the loader shares it out to the workers."""


def check_stream_options(dataset: Any, shard_stream: Any, equal_batches: Any) -> None:
    """Check `shard_stream` and `equal_batches`.

    Raises:
        ValueError: One isn't of the choices, or isn't for such a dataset.
        TypeError: `equal_batches` isn't a bool.
    """
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


class Sharing:
    """Who shares out a loader's stream. Copies of the loader have a copy of it."""

    def __init__(self) -> None:
        self._is_copied: bool | None = None
        """Whether each worker gets the whole stream, where `shard_stream` doesn't say. None: not known."""

    def shard_of(self, loader: Any) -> StreamShard | None:
        """Return this rank's part of a stream that the loader shares out. None: the dataset does that."""
        choice = loader.shard_stream
        if not choice and not (choice is None and self._is_copied):
            return None
        if choice is not True or _is_of_one_rank(loader.dataset):
            return StreamShard()
        ranks = find_ranks(None, None)
        return StreamShard(ranks.rank, ranks.world_size, loader.equal_batches)

    def probe_of(self, loader: Any, resume: LoaderPosition | None) -> CopyProbe | None:
        """Return what finds out in an epoch that begins whether each worker gets the whole stream. None: no need."""
        if loader.shard_stream is not None or self._is_copied is not None or not _may_be_copied(loader, resume):
            return None
        name, num_workers = type(loader.dataset).__name__, loader.num_workers

        def note(is_copied: bool) -> None:
            self._is_copied = is_copied
            if is_copied:
                logger.warning(
                    f"each of {num_workers} workers gives the same samples of the {name}, so the loader shares them "
                    f"out to the workers. shard_stream=True says so in advance, shard_stream=False repeats the "
                    f"samples, as torch does"
                )

        return CopyProbe(num_workers, loader.batch_size, note)

    def resumed(self, loader: Any, position: LoaderPosition) -> LoaderPosition:
        """Return where the loader continues.

        Raises:
            StateMismatch: It can't. Nothing has changed.
        """
        before = self._is_copied
        if loader.shard_stream is None and not position.draws.is_over and position.num_yielded:
            self._is_copied = position.num_sharing == 1
        shard, dataset = self.shard_of(loader), loader.dataset
        may_deal = is_huggingface(dataset) and not has_init_of_user(loader)
        try:
            position.check_fits(
                num_workers=loader.num_workers,
                is_stream=isinstance(dataset, IterableDataset),
                num_sharing=0 if shard is None else shard.world_size,
                can_be_dealt=may_deal,
            )
        except StateMismatch:
            self._is_copied = before
            raise
        if position.is_in_stream and not position.num_sharing and position.num_workers != loader.num_workers:
            return dealt_out(position, loader.num_workers, loader.batch_size)
        return position


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


def _may_be_copied(loader: DataLoader[Any], resume: LoaderPosition | None) -> bool:
    """Return whether all workers may give the same samples when an epoch begins, so that it is worth a look.

    Not so if the user's `worker_init_fn` may have given each worker its share, or where an epoch continues as it began.
    A dataset with a state is left alone, too: the state of the loader has one for each worker, as torchdata's has.
    """
    dataset = loader.dataset
    if loader.num_workers <= 1 or has_init_of_user(loader):
        return False
    if isinstance(dataset, torch.utils.data.IterDataPipe) or hasattr(dataset, "state_dict"):
        return False
    if resume is None:
        return True
    return not (loader.persistent_workers if resume.draws.is_over else resume.num_yielded)
