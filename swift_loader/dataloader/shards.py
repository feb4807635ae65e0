"""What is known of each worker's dataset: where it was when the loop got the last batch from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from swift_loader.dataloader.state import LoaderPosition, WorkerSnapshot
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.work import StreamWork
from swift_loader.worker.torch_mode import Resume, Snapshot


def _nowhere(worker_id: int) -> int | None:  # noqa: ARG001 - in the place of `StreamRounds.end_of`
    """Say of no shard that it is over."""
    return None


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
        self._num_before = tuple(self._num_batches)

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
        if delivery.snapshot is not None:
            worker_id = Snapshot.unpack(delivery.snapshot).worker_id
            self._states[worker_id] = delivery.snapshot
            self._num_since[worker_id] = 0
        elif isinstance(work, StreamWork):
            worker_id = work.worker_id
            self._num_since[worker_id] += 1
        if worker_id is not None:
            self._num_batches[worker_id] += 1

    def snapshots(self, end_of: Callable[[int], int | None] = _nowhere) -> tuple[WorkerSnapshot, ...]:
        """Return what is known of each worker.

        `end_of` returns the first turn that a worker's shard of a stream has no batch for; None: not known.
        """
        return tuple(self._snapshot(number, end_of(number)) for number in range(len(self._snapshots)))

    def _snapshot(self, number: int, end: int | None) -> WorkerSnapshot:
        saved = WorkerSnapshot() if self._begins_epoch else self._snapshots[number]
        num_batches = self._num_batches[number]
        if number in self._states:
            taken = Snapshot.unpack(self._states[number])
            saved = WorkerSnapshot(taken.dataset, taken.iterator, taken.has_ended)
        is_over = saved.is_over or (end is not None and num_batches - self._num_before[number] == end)
        return replace(saved, num_since=self._num_since[number], num_batches=num_batches, is_over=is_over)


class SharedShards:
    """The workers' copies of a stream that the loader shares out.

    All read the same. So each continues with the state that any of them has had, if it isn't too late a one.
    """

    def __init__(self, num_workers: int, resume: LoaderPosition | None, *, is_persistent: bool) -> None:
        """Begin with fresh datasets, or where `resume` says."""
        self._resumed = None if resume is None or resume.draws.is_over else resume
        self._over = resume if resume is not None and resume.draws.is_over and is_persistent else None
        """The end of an epoch, from which datasets may keep something."""
        first = 0 if self._resumed is None else self._resumed.next_batch
        if first is not None:
            self.next_batches = [first + number for number in range(num_workers)]
        else:  # batches came out of order, so there are as many workers as before
            assert self._resumed is not None, "an epoch begins in order"
            self.next_batches = [one.next_batch or 0 for one in self._resumed.workers]
        """By worker: which batch it builds next."""
        self._states: dict[int, bytes] = {}
        """The last state of each worker, as it came."""

    def resume(self) -> dict[int, bytes] | None:
        """Return where each worker continues, for `Dispatcher.begin`. None: all at their beginning."""
        if self._over is not None:
            latest = self._over.latest(None)
            if not latest.has_state:
                return None
            packed = Resume(_state_of(latest, has_ended=False).pack(), begins_anew=True).pack()
            return dict.fromkeys(range(len(self.next_batches)), packed)
        if self._resumed is None:
            return None
        chosen = [self._resumed.latest(batch) for batch in self.next_batches]
        return {
            number: Resume(_state_of(one, has_ended=one.has_ended).pack()).pack()
            for number, one in enumerate(chosen)
            if one.num_batches
        }

    def note(self, delivery: Delivery) -> None:
        """Count a batch or an error that the loop gets."""
        work = delivery.work
        assert isinstance(work, StreamWork)
        self.next_batches[work.worker_id] = work.turn + len(self.next_batches)
        if delivery.snapshot is not None:
            self._states[work.worker_id] = delivery.snapshot

    def snapshots(self, end_of: Callable[[int], int | None] = _nowhere) -> tuple[WorkerSnapshot, ...]:  # noqa: ARG002
        """Return what is known of each worker."""
        saved = (WorkerSnapshot(),) if self._resumed is None else (self._resumed.latest(min(self.next_batches)),)
        states = [Snapshot.unpack(state) for state in self._states.values()]
        taken = [
            WorkerSnapshot(one.dataset, one.iterator, one.has_ended, 0, one.num_batches, one.num_to_skip)
            for one in states
        ]
        latest = max(
            (one for one in (*saved, *taken) if one.num_batches <= min(self.next_batches)),
            key=lambda one: one.num_batches,
        )
        return tuple(replace(latest, next_batch=batch) for batch in self.next_batches)


def _state_of(saved: WorkerSnapshot, *, has_ended: bool) -> Snapshot:
    return Snapshot(
        saved.num_batches, has_ended, saved.iterator_state, saved.dataset_state, num_to_skip=saved.num_to_skip
    )
