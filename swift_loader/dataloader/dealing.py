"""Deals out what is left of a stream of the `datasets` package to another number of workers. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swift_loader.dataloader.state import LoaderPosition, WorkerSnapshot
from swift_loader.worker.stream_parts import part_of, parts_in, state_of_parts

__all__ = ["dealt_out"]


def dealt_out(position: LoaderPosition, num_workers: int, batch_size: int | None) -> LoaderPosition:
    """Return a position from which so many workers continue. They lose and repeat no sample.

    Args:
        position: In the middle of an epoch.
        num_workers: How many there are now.
        batch_size: Samples per batch, as in the run that was saved. None: each is a batch of its own.
    """
    left: list[dict[str, Any]] = []
    for worker_id, one in enumerate(position.workers):
        if not (one.has_ended or one.is_over):
            left += _parts(position, worker_id, one, batch_size or 1)
    hands = max(1, num_workers)
    snapshots = [WorkerSnapshot(iterator_state=state_of_parts(left[number::hands])) for number in range(hands)]
    return replace(position, num_workers=num_workers, workers=tuple(snapshots), last_worker=-1)


def _parts(position: LoaderPosition, worker_id: int, saved: WorkerSnapshot, batch_size: int) -> list[dict[str, Any]]:
    dealt = parts_in(saved.iterator_state)
    if dealt is not None:  # dealt out before; its state comes with each batch
        return dealt
    num_workers = position.num_workers
    num_batches = saved.num_batches if num_workers else position.num_yielded
    num_since = saved.num_since if saved.has_state else num_batches
    if num_since == num_batches:  # a state is that of the end of the epoch before
        return [part_of(worker_id, num_workers, None, num_batches * batch_size)]
    return [part_of(worker_id, num_workers, saved.dataset_state, num_since * batch_size)]
