"""What is known of each worker's dataset: where the loop is in it, and whether all give the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from swift_loader.batch.digests import digest_of, leaves_of
from swift_loader.dataloader.state import LoaderPosition, WorkerSnapshot
from swift_loader.device.move import Parcel
from swift_loader.errors import warn
from swift_loader.runtime import is_interrupt
from swift_loader.sampling.work import StreamRounds, StreamWork
from swift_loader.scheduler.delivery import Delivery
from swift_loader.worker.torch_worker import Snapshot


class Shards:
    """The datasets of the workers of one epoch, as far as the loop has seen their batches."""

    def __init__(
        self, loader: DataLoader[Any], resume: LoaderPosition | None, carried: dict[int, bytes] | None = None
    ) -> None:
        """Begin with fresh datasets, or where `resume` says. Without workers, there is one.

        `carried`: where persistent workers continue that got nothing since an earlier epoch was resumed, see `carry`.
        """
        num_workers = max(1, loader.num_workers)
        saved = [] if resume is None else list(resume.workers[:num_workers])
        saved += [WorkerSnapshot()] * (num_workers - len(saved))
        self.resume = carried
        """Where each worker continues, for `Engine.begin`. None: all at their beginning."""
        self._carried = carried or {}
        if resume is not None and loader.persistent_workers:
            self._carried = {number: one.resume(anew=True) for number, one in enumerate(saved) if one.has_state}
        begins = resume is None or resume.draws.begins_epoch
        if resume is not None and (loader.persistent_workers or not begins):
            self.resume = {number: one.resume(anew=begins) for number, one in enumerate(saved)}
        self.begun = [WorkerSnapshot()] * num_workers if begins else saved
        self._states: dict[int, bytes] = {}
        """The last state of each worker, as it came. Unpacked when somebody asks."""
        self._num_since = [one.num_since for one in self.begun]
        self._num_batches = [one.num_batches for one in self.begun]
        self._noted: Any = None
        """What was counted last."""

    def detach(self) -> None:
        """Be the only one that has what `note` changes."""
        self._states, self._num_since, self._num_batches = (
            dict(self._states),
            self._num_since[:],
            self._num_batches[:],
        )

    def carry(self, busy: set[int]) -> dict[int, bytes] | None:
        """Return where the workers that got nothing in this epoch begin the next one, if they stay. None: afresh.

        They are told where to continue with their first task, and a resumed epoch may have none left for them.
        """
        return {number: one for number, one in self._carried.items() if number not in busy} or None

    def note(self, got: Any) -> None:
        """Count a batch or an error that the loop has got, a `Delivery`. The same one counts once."""
        if got is self._noted:
            return
        work, worker_id, num_since = got.work, None, 0
        if got.snapshot is not None:
            worker_id = Snapshot.unpack(got.snapshot).worker_id
            self._states[worker_id] = got.snapshot
        elif isinstance(work, StreamWork):
            worker_id = work.worker_id
            num_since = self._num_since[worker_id] + 1
        if worker_id is not None:
            num_batches = self._num_batches[worker_id] + 1
            # No handler runs within this line.
            self._num_batches[worker_id], self._num_since[worker_id], self._noted = num_batches, num_since, got

    def snapshots(self, rounds: StreamRounds | None = None) -> tuple[WorkerSnapshot, ...]:
        """Return what is known of each worker. `rounds`, of a stream, know where shards end."""
        return tuple(self._snapshot(number, rounds) for number in range(len(self.begun)))

    def _snapshot(self, number: int, rounds: StreamRounds | None) -> WorkerSnapshot:
        saved = begun = self.begun[number]
        num_batches = self._num_batches[number]
        if number in self._states:
            saved = WorkerSnapshot.of(Snapshot.unpack(self._states[number]))
        end = None if rounds is None else rounds.end_of(number)
        is_over = saved.is_over or (end is not None and num_batches - begun.num_batches == end)
        return replace(saved, num_since=self._num_since[number], num_batches=num_batches, is_over=is_over)


class SharedShards:
    """The workers' copies of a stream that the loader shares out.

    All read the same. So each continues with the state that any of them has had, if it isn't too late a one.
    """

    def __init__(self, num_workers: int, resume: LoaderPosition | None, *, is_persistent: bool) -> None:
        """Begin with fresh datasets, or where `resume` says."""
        self._resumed = None if resume is None or resume.draws.begins_epoch else resume
        first = 0 if self._resumed is None else self._resumed.next_batch
        if first is not None:
            self.next_batches = [first + number for number in range(num_workers)]
        else:  # batches came out of order, so there are as many workers as before
            assert self._resumed is not None, "an epoch begins in order"
            self.next_batches = [one.next_batch or 0 for one in self._resumed.workers]
        """By worker: which batch it builds next."""
        self.resume: dict[int, bytes] | None = None
        """Where each worker continues, for `Engine.begin`. None: all at their beginning."""
        if self._resumed is not None:
            points = map(self._resumed.latest, self.next_batches)
            self.resume = {number: one.resume() for number, one in enumerate(points)}
        elif resume is not None and is_persistent and (latest := resume.latest(None)).has_state:
            # The end of an epoch, from which datasets may keep something.
            self.resume = dict.fromkeys(range(num_workers), latest.resume(anew=True))
        self._states: dict[int, bytes] = {}
        """The last state of each worker, as it came."""
        self.begun: list[WorkerSnapshot] = []
        """Where the stream begins, if there are no workers."""

    def detach(self) -> None:
        """Be the only one that has what `note` changes."""
        self.next_batches, self._states = self.next_batches[:], dict(self._states)

    def note(self, got: Any) -> None:
        """Count a batch or an error that the loop has got, a `Delivery`. Idempotent."""
        work = got.work
        assert isinstance(work, StreamWork)
        self.next_batches[work.worker_id] = work.turn + len(self.next_batches)
        if got.snapshot is not None:
            self._states[work.worker_id] = got.snapshot

    def snapshots(self, rounds: StreamRounds | None = None) -> tuple[WorkerSnapshot, ...]:  # noqa: ARG002
        """Return what is known of each worker."""
        first = min(self.next_batches)
        known = [*self.begun] or [WorkerSnapshot() if self._resumed is None else self._resumed.latest(first)]
        known += [WorkerSnapshot.of(Snapshot.unpack(state)) for state in self._states.values()]
        latest = max((one for one in known if one.num_batches <= first), key=lambda one: one.num_batches)
        return tuple(replace(latest, next_batch=batch) for batch in self.next_batches)


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

    def noted(self, take: Callable[[], Delivery]) -> Delivery:
        """Take a batch, or the end, and return it: it is looked at on the host, before it is moved."""
        delivery = take()
        self._note(delivery)
        return delivery

    def _note(self, delivery: Delivery) -> None:
        work, found = delivery.work, self._digests
        if found is None:
            return
        if delivery.error is None and isinstance(work, StreamWork) and len(found[work.worker_id]) < self._num_batches:
            batch = delivery.batch
            found[work.worker_id].append(_digest_of(batch.batch if isinstance(batch, Parcel) else batch))
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
