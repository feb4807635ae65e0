"""The LOST batches, by the worker that must build them again. Pure, not thread-safe.

Many batches may be lost at once, with a node. As long as no worker has room for the first one that any worker may
build, none has room for the others. So only the first one of each kind is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Any

from swift_loader.scheduler.batches import Batch
from swift_loader.scheduler.work import PlannedWork, Work


class LostBatches:
    """Knows which of them comes next."""

    def __init__(self) -> None:
        self._by_worker_id: dict[int | None, list[int]] = {}
        """Heaps of sequences, none of them empty. None: any worker may build them."""

    def add(self, batch: Batch[Any]) -> None:
        """Record that a batch was lost."""
        heappush(self._by_worker_id.setdefault(_worker_id(batch.work), []), batch.sequence)

    def firsts(self) -> list[int]:
        """Return the first sequence of each kind, in order. O(worker ids)."""
        return sorted(sequences[0] for sequences in self._by_worker_id.values())

    def remove(self, batch: Batch[Any]) -> None:
        """Remove a batch, which is one of the `firsts`."""
        worker_id = _worker_id(batch.work)
        sequences = self._by_worker_id[worker_id]
        first = heappop(sequences)
        assert first == batch.sequence, "only the first one can be removed"
        if not sequences:
            del self._by_worker_id[worker_id]

    def restart(self, batches: Iterable[Batch[Any]]) -> None:
        """Forget all, and add these."""
        self.clear()
        for batch in batches:
            self.add(batch)

    def clear(self) -> None:
        """Forget all."""
        self._by_worker_id.clear()

    def __len__(self) -> int:
        return sum(map(len, self._by_worker_id.values()))

    def __bool__(self) -> bool:
        return bool(self._by_worker_id)

    def __repr__(self) -> str:
        return f"<LostBatches {len(self)}>"


def _worker_id(work: Work) -> int | None:
    return None if isinstance(work, PlannedWork) else work.worker_id
