from __future__ import annotations

from swift_loader.executors.process.resume import ResumePoints
from swift_loader.scheduler.work import IndexWork, StreamWork
from swift_loader.worker.torch_mode import Resume


def test_a_replacement_continues_after_the_last_snapshot_of_the_generation() -> None:
    points = ResumePoints()
    points.begin(1, {0: b"given"})
    assert [points.of(0), points.of(1)] == [(b"given", 0), (None, 0)]
    points.note(0, 1, b"first", StreamWork(0, 5, 0, 3))
    points.note(1, 1, b"other", IndexWork(0, 5, [1]))
    points.note(0, 1, b"second", StreamWork(0, 9, 0, 4))
    assert points.of(0) == (Resume(b"second").pack(), 5)
    assert points.of(1) == (Resume(b"other").pack(), 0)
    points.begin(2, None)
    points.note(0, 1, b"late", StreamWork(0, 9, 0, 6))
    assert points.of(0) == (None, 0)
