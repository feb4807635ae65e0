"""Where each worker's dataset continues if another process takes the worker's place. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from swift_loader.scheduler.work import StreamWork, Work
from swift_loader.worker.torch_mode import Resume

_BEGINNING = (None, 0)


class ResumePoints:
    """The last snapshot of each worker in the current generation, or what the generation began with.

    Whoever listens to workers notes snapshots; whoever holds the dispatch lock begins generations and looks points up.
    """

    def __init__(self) -> None:
        self._current: tuple[int, dict[int, tuple[bytes | None, int]]] = (0, {})
        """The generation, and by worker id: a packed `Resume`, and the turn of the first batch after it. Replaced as a
        whole: several threads read it."""

    def begin(self, generation: int, resume: Mapping[int, bytes] | None) -> None:
        """Forget the points so far. `resume` has those at which the new generation begins, by worker id."""
        self._current = generation, {worker_id: (point, 0) for worker_id, point in (resume or {}).items()}

    def note(self, worker_id: int, generation: int, snapshot: bytes, work: Work) -> None:
        """Note a snapshot that was taken after this work. One of an earlier generation is ignored."""
        current, points = self._current
        if current == generation:
            turn = work.turn + 1 if isinstance(work, StreamWork) else 0
            points[worker_id] = Resume(snapshot).pack(), turn

    def of(self, worker_id: int) -> tuple[bytes | None, int]:
        """Return the point of a worker: a packed `Resume`, and the turn of the first batch after it."""
        return self._current[1].get(worker_id, _BEGINNING)

    def __repr__(self) -> str:
        generation, points = self._current
        return f"<ResumePoints of generation {generation}: {len(points)} workers>"
