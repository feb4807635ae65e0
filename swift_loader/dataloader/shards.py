"""What is known of each worker's dataset: where it was when the loop got the last batch from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from swift_loader.dataloader.state import LoaderPosition, WorkerSnapshot
from swift_loader.delivery.delivery import Delivery
from swift_loader.scheduler.work import StreamWork
from swift_loader.worker.torch_mode import Resume, Snapshot

__all__ = ["Shards"]


class Shards:
    """The datasets of the workers of one epoch, as far as the loop has seen their batches."""

    def __init__(self, loader: DataLoader[Any], resume: LoaderPosition | None) -> None:
        """Begin with fresh datasets, or where `resume` says."""
        saved = () if resume is None else resume.workers[: loader.num_workers]
        missing = loader.num_workers - len(saved)
        self._is_resumed = resume is not None
        self._is_persistent = loader.persistent_workers
        self._begins_epoch = resume is None or resume.draws.is_over
        self._snapshots = [*saved, *(WorkerSnapshot() for _ in range(missing))]
        self._states: dict[int, bytes] = {}
        """The last state of each worker, as it came. Unpacked when somebody asks."""
        begun = [WorkerSnapshot() if self._begins_epoch else one for one in self._snapshots]
        self._num_since = [one.num_since for one in begun]
        self._num_batches = [one.num_batches for one in begun]

    def resume(self) -> dict[int, bytes] | None:
        """Return where each worker continues, for `Dispatcher.begin`. None: all at their beginning."""
        if not self._is_resumed or (self._begins_epoch and not self._is_persistent):
            return None
        return {number: self._resume_of(one).pack() for number, one in enumerate(self._snapshots)}

    def _resume_of(self, saved: WorkerSnapshot) -> Resume:
        if not saved.has_state:
            return Resume(None, 0 if self._begins_epoch else saved.num_batches)
        num_batches = saved.num_batches - saved.num_since
        snapshot = Snapshot(
            num_batches, saved.has_ended and not self._begins_epoch, saved.iterator_state, saved.dataset_state
        )
        return Resume(snapshot.pack(), 0 if self._begins_epoch else saved.num_since, begins_anew=self._begins_epoch)

    def note(self, delivery: Delivery) -> None:
        """Count a batch or an error that the loop gets."""
        work, worker_id = delivery.work, None
        if delivery.state is not None:
            worker_id = Snapshot.unpack(delivery.state).worker_id
            self._states[worker_id] = delivery.state
            self._num_since[worker_id] = 0
        elif isinstance(work, StreamWork):
            worker_id = work.worker_id
            self._num_since[worker_id] += 1
        if worker_id is not None:
            self._num_batches[worker_id] += 1

    def snapshots(self) -> tuple[WorkerSnapshot, ...]:
        """Return what is known of each worker."""
        return tuple(self._snapshot(number) for number in range(len(self._snapshots)))

    def _snapshot(self, number: int) -> WorkerSnapshot:
        saved = WorkerSnapshot() if self._begins_epoch else self._snapshots[number]
        if number in self._states:
            taken = Snapshot.unpack(self._states[number])
            saved = WorkerSnapshot(taken.dataset, taken.iterator, taken.has_ended)
        return replace(saved, num_since=self._num_since[number], num_batches=self._num_batches[number])
