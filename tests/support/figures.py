"""What a process and its children use, over time: descriptors, threads, children and memory."""

from __future__ import annotations

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.helpers import HANG_S, loader_processes

_MAX_SLOPE = 1.0
"""MB per epoch."""

_NUM_SAME = 4

_NUM_ROWS = 12


@dataclass(frozen=True, slots=True)
class Measured:
    """What a process has open, and the processes of its loaders. Threads are those of Python."""

    descriptors: int
    threads: int
    children: int

    @classmethod
    def now(cls) -> Measured:
        """Return this process's."""
        process = psutil.Process()
        gc.collect()
        return cls(process.num_fds(), threading.active_count(), len(loader_processes()))

    @classmethod
    def steady(cls) -> Measured:
        """Return this process's, once it stays the same: a descriptor that a worker sends is open for a moment."""
        seen = [cls.now()]
        while len(seen) < _NUM_SAME or len(set(seen[-_NUM_SAME:])) > 1:
            time.sleep(0.005)
            seen.append(cls.now())
        return seen[-1]


@dataclass(frozen=True, slots=True)
class Row:
    """After a pass, with nothing kept."""

    workers: int
    kind: str
    """Loaders of the same kind, with the same number of workers, are expected to need as much memory."""
    measured: Measured
    trainer_mb: float
    """Without what it shares with workers."""
    family_mb: float
    """The trainer and all its children."""


@dataclass(slots=True)
class Figures:
    """Of a run of many loaders."""

    rows: list[Row] = field(default_factory=list)
    closed_mb: list[tuple[int, float]] = field(default_factory=list)
    """(number of passes, MB of the trainer) after each loader was closed."""

    def note_pass(self, workers: int, kind: str, fresh: Measured) -> None:
        """Measure after a pass; fail unless, within a moment, as much is open as when the loader had just started."""
        now = settled(fresh)
        assert now == fresh, f"after epoch {len(self.rows)}: {now}, but {fresh} when the loader was new"
        self.rows.append(Row(workers, kind, now, *memory()))

    def note_closed(self, before: Measured) -> None:
        """Measure after a loader was closed; fail unless no more is open than before there was one."""
        now = settled(before)
        assert now == before, f"after a loader was closed: {now}, but {before} before it was made"
        self.closed_mb.append((len(self.rows), memory()[0]))

    def slopes(self) -> dict[str, float]:
        """Return how memory grows in the second half, in MB per pass."""
        half = len(self.rows) // 2
        rows = list(enumerate(self.rows))[half:]
        return {
            "trainer": slope([(number, (row.workers, row.kind), row.trainer_mb) for number, row in rows]),
            "trainer and workers": slope([(number, (row.workers, row.kind), row.family_mb) for number, row in rows]),
            "trainer without a loader": slope([(number, 0, mb) for number, mb in self.closed_mb if number > half]),
        }

    def check(self) -> None:
        """Fail if memory grows."""
        for name, mb_per_pass in self.slopes().items():
            assert mb_per_pass < _MAX_SLOPE, f"{name}: {mb_per_pass:.2f} MB more after each epoch"

    def table(self) -> str:
        """Return some of the rows, and the slopes."""
        lines = [" epoch  workers  descriptors  threads  children  trainer MB  with workers MB"]
        for number in range(0, len(self.rows), max(1, len(self.rows) // _NUM_ROWS)):
            row, open_now = self.rows[number], self.rows[number].measured
            lines.append(
                f"{number:6}{row.workers:9}{open_now.descriptors:13}{open_now.threads:9}{open_now.children:10}"
                f"{row.trainer_mb:12.1f}{row.family_mb:17.1f}"
            )
        lines += [f"{mb_per_pass:8.3f} MB per epoch: {name}" for name, mb_per_pass in self.slopes().items()]
        return "\n".join(lines)


def settled(expected: Measured) -> Measured:
    """Return what is open once that is what is expected, or after a while."""
    deadline_s = time.monotonic() + HANG_S / 2
    while (now := Measured.now()) != expected and time.monotonic() < deadline_s:
        time.sleep(0.01)  # processes that were killed are being replaced
    return now


def memory() -> tuple[float, float]:
    """Return what this process, and what it and its children have in memory, in MB.

    A page that n processes share counts as 1/n in each. Pages of files don't count: how many others have mapped the
    same library is not our doing.
    """
    gc.collect()
    trainer = psutil.Process()
    own = memory_of(trainer.pid)
    family = sum(own) + sum(sum(memory_of(child.pid)) for child in trainer.children(recursive=True))
    return own[0] / 1024, family / 1024


def memory_of(pid: int) -> tuple[int, int]:
    """Return KB of ordinary and of shared memory, both proportional."""
    fields = dict.fromkeys(("Pss_Anon", "Pss_Shmem"), 0)
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it hung, and its killing took until now
        return 0, 0
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in fields:
            fields[name] = int(rest.split()[0])
    return fields["Pss_Anon"], fields["Pss_Shmem"]


def slope(points: Sequence[tuple[float, Hashable, float]]) -> float:
    """Return the common slope of (x, group, y) by least squares, each group with a level of its own; 0 if undefined."""
    groups: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    for x, group, y in points:
        groups[group].append((x, y))
    above = below = 0.0
    for members in groups.values():
        mean_x = sum(x for x, _ in members) / len(members)
        mean_y = sum(y for _, y in members) / len(members)
        above += sum((x - mean_x) * (y - mean_y) for x, y in members)
        below += sum((x - mean_x) ** 2 for x, _ in members)
    return above / below if below else 0.0
