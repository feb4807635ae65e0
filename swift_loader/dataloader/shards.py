"""What is known of each worker's dataset: where the loop is in it, and whether all give the same."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from swift_loader.batch.digests import digest_of, leaves_of
from swift_loader.dataloader.state import LoaderPosition, WorkerSnapshot
from swift_loader.errors import warn
from swift_loader.interrupts import is_interrupt
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.work import StreamRounds, StreamWork
from swift_loader.worker.torch_worker import Resume, Snapshot


class Shards:
    """The datasets of the workers of one epoch, as far as the loop has seen their batches."""

    def __init__(
        self, loader: DataLoader[Any], resume: LoaderPosition | None, carried: dict[int, bytes] | None = None
    ) -> None:
        """Begin with fresh datasets, or where `resume` says.

        `carried`: where persistent workers continue that got nothing since an earlier epoch was resumed, see `carry`.
        """
        self._carried = carried
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
            return self._carried
        return {
            number: self._resume_of(one, begins_anew=self._begins_epoch).pack()
            for number, one in enumerate(self._snapshots)
        }

    def _resume_of(self, saved: WorkerSnapshot, *, begins_anew: bool) -> Resume:
        if not saved.has_state:
            return Resume(None, 0 if begins_anew else saved.num_batches)
        num_batches = saved.num_batches - saved.num_since
        snapshot = Snapshot(num_batches, saved.has_ended and not begins_anew, saved.iterator_state, saved.dataset_state)
        return Resume(snapshot.pack(), 0 if begins_anew else saved.num_since, begins_anew=begins_anew)

    def carry(self, busy: set[int]) -> dict[int, bytes] | None:
        """Return where the workers that got nothing in this epoch begin the next one, if they stay. None: afresh.

        They are told where to continue with their first task, and a resumed epoch may have none left for them.
        """
        if not self._is_resumed or not self._is_persistent:
            return {number: one for number, one in (self._carried or {}).items() if number not in busy} or None
        idle = {number: one for number, one in enumerate(self._snapshots) if number not in busy and one.has_state}
        return {number: self._resume_of(one, begins_anew=True).pack() for number, one in idle.items()} or None

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

    def snapshots(self, rounds: StreamRounds | None = None) -> tuple[WorkerSnapshot, ...]:
        """Return what is known of each worker. `rounds`, of a stream, know where shards end."""
        ends = [None if rounds is None else rounds.end_of(number) for number in range(len(self._snapshots))]
        return tuple(self._snapshot(number, end) for number, end in enumerate(ends))

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
        return {
            number: Resume(_state_of(one, has_ended=one.has_ended).pack()).pack()
            for number, one in enumerate(map(self._resumed.latest, self.next_batches))
            if one.num_batches or one.has_state
        }

    def note(self, delivery: Delivery) -> None:
        """Count a batch or an error that the loop gets."""
        work = delivery.work
        assert isinstance(work, StreamWork)
        self.next_batches[work.worker_id] = work.turn + len(self.next_batches)
        if delivery.snapshot is not None:
            self._states[work.worker_id] = delivery.snapshot

    def snapshots(self, rounds: StreamRounds | None = None) -> tuple[WorkerSnapshot, ...]:  # noqa: ARG002
        """Return what is known of each worker."""
        saved = (WorkerSnapshot(),) if self._resumed is None else (self._resumed.latest(min(self.next_batches)),)
        taken = [WorkerSnapshot.of_shared(Snapshot.unpack(state)) for state in self._states.values()]
        latest = max(
            (one for one in (*saved, *taken) if one.num_batches <= min(self.next_batches)),
            key=lambda one: one.num_batches,
        )
        return tuple(replace(latest, next_batch=batch) for batch in self.next_batches)


def _state_of(saved: WorkerSnapshot, *, has_ended: bool) -> Snapshot:
    return Snapshot(
        saved.num_batches, has_ended, saved.iterator_state, saved.dataset_state, num_to_skip=saved.num_to_skip
    )


_MIN_SAMPLES = 16
"""How many samples of each worker are compared. Few of them may be equal by chance, like labels."""


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
    if getattr(loader, "shard_stream", None) is not None or loader.num_workers <= 1:
        return None
    return Copies(type(loader.dataset).__name__, loader.num_workers, loader.batch_size)
