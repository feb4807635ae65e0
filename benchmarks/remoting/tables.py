"""What is measured of remote workers, and the tables of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from common.report import Result, format_number, format_table

from remoting.cases import Case
from remoting.cluster import HERE, THERE

LOCAL = "local"
SAME_NODE = "ray, same node"
OTHER_NODE = "ray, other node"
PLACES = {LOCAL: None, SAME_NODE: HERE, OTHER_NODE: THERE}
"""Systems, and the node of their workers. None: worker processes."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What was measured in a turn. All but the rate is per batch, in milliseconds."""

    rate: float
    """Batches per second."""
    build_ms: float
    """Median: fetch, collate, encode."""
    way_ms: float
    """Median: from when the worker had built a batch until the trainer could read it."""
    view_ms: float
    """Median: decoding, in the trainer."""
    worker_cpu_ms: float
    """CPU time of the workers' processes, with building."""
    trainer_cpu_ms: float
    """CPU time of the trainer's process, over all its threads."""
    here_cpu_ms: float
    """CPU time of the raylet on the trainer's node."""
    there_cpu_ms: float
    """CPU time of the other node's raylet."""


@dataclass(slots=True)
class Row:
    """A system in a case, and its turns."""

    case: Case
    system: str
    num_workers: int
    turns: list[Turn] = field(default_factory=list)

    def median(self, name: str) -> float:
        """Return the median of a field over the turns."""
        return statistics.median(getattr(turn, name) for turn in self.turns)

    def results(self) -> list[Result]:
        """Return all samples: a result for each field of the turns."""
        case = f"{self.case.name}, {self.num_workers} workers"
        samples = {one.name: [getattr(turn, one.name) for turn in self.turns] for one in fields(Turn)}
        return [Result(case, self.system, name, values) for name, values in samples.items()]


_SPANS = ("build_ms", "way_ms", "view_ms")
_CPU_TIMES = ("worker_cpu_ms", "trainer_cpu_ms", "here_cpu_ms", "there_cpu_ms")


def format_bytes(nbytes: int) -> str:
    return f"{nbytes // 10**6} MB" if nbytes >= 10**6 else f"{nbytes // 1000} kB"


def rate_table(rows: Sequence[Row]) -> str:
    """Return batches/s, and the ratio to local workers in the same case."""
    local = {(row.case.name, row.num_workers): row.median("rate") for row in rows if row.system == LOCAL}
    cells = []
    for row in rows:
        rates = [turn.rate for turn in row.turns]
        figures = [format_number(figure) for figure in (row.median("rate"), min(rates), max(rates))]
        ratio = row.median("rate") / local[row.case.name, row.num_workers]
        cells.append([row.case.name, row.system, str(row.num_workers), *figures, format_number(ratio)])
    return format_table(["case", "system", "workers", "batches/s", "min", "max", "local = 1"], cells)


def way_table(rows: Sequence[Row]) -> str:
    """Return where a batch's time goes, and the CPU time that it takes."""
    cells = []
    for row in rows:
        spans_ms = [row.median(name) for name in _SPANS]
        share = 1 - spans_ms[0] / sum(spans_ms)
        times = [format_number(row.median(name)) for name in _CPU_TIMES]
        spans = [format_number(span_ms) for span_ms in spans_ms]
        cells.append([row.case.name, row.system, str(row.num_workers), *spans, f"{share:.0%}", *times])
    headers = ["ms per batch", "system", "workers", "build", "way", "view", "way and view"]
    return format_table([*headers, "CPU: workers", "trainer", "raylet here", "raylet there"], cells)


def phase_table(phases: Sequence[Result]) -> str:
    """Return Ray's part of the way."""
    return format_table(["Ray's part", "system", "median", "min", "max", "unit"], [one.as_cells() for one in phases])
