"""What was measured, and the model's costs that follow from it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from common.report import Result

from remoting.cases import Case
from remoting.model import Costs, CostsBySize, Line, fit_line
from remoting.turns import LOCAL, OTHER_NODE, Turn
from swift_loader.executors.ray.memory import MAX_INLINE_BYTES

__all__ = ["Row", "costs_of"]


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

    def least(self, name: str) -> float:
        """Return the least value of a field over the turns."""
        return float(min(getattr(turn, name) for turn in self.turns))

    def results(self) -> list[Result]:
        """Return all samples: a result for each field of the turns."""
        case = f"{self.case.name}, {self.num_workers} workers"
        samples = {one.name: [getattr(turn, one.name) for turn in self.turns] for one in fields(Turn)}
        return [Result(case, self.system, name, values) for name, values in samples.items()]


def costs_of(rows: Sequence[Row], link_bytes_per_s: float) -> CostsBySize:
    """Return the costs of local workers, and of remote ones on the other node.

    They are from the rows with the fewest workers, and from cases whose samples cost little, if there are any. Waiting
    for a core counts as no cost: all figures are CPU times, but for building, whose least median is taken.
    """
    fewest = min(row.num_workers for row in rows)
    chosen = [row for row in rows if row.num_workers == fewest]
    chosen = [row for row in chosen if not row.case.cpu_s] or chosen
    small = [row for row in chosen if row.case.nbytes <= MAX_INLINE_BYTES]
    large = [row for row in chosen if row.case.nbytes > MAX_INLINE_BYTES]
    costs = [_fit(some or chosen, link_bytes_per_s) for some in (small, large)]
    return CostsBySize(*costs, MAX_INLINE_BYTES)


def _fit(rows: Sequence[Row], link_bytes_per_s: float) -> Costs:
    def line(system: str, name: str) -> Line:
        return fit_line({row.case.nbytes: row.median(name) / 1e3 for row in rows if row.system == system})

    def worker_line(system: str) -> Line:
        found = [row for row in rows if row.system == system]
        return fit_line({row.case.nbytes: (row.median("worker_cpu_ms") - row.least("build_ms")) / 1e3 for row in found})

    return Costs(
        local_worker=worker_line(LOCAL),
        local_trainer=line(LOCAL, "trainer_cpu_ms"),
        remote_worker=worker_line(OTHER_NODE),
        remote_trainer=line(OTHER_NODE, "trainer_cpu_ms"),
        remote_raylet=line(OTHER_NODE, "here_cpu_ms"),
        trainer_thread=line(OTHER_NODE, "trainer_thread_ms"),
        raylet_thread=line(OTHER_NODE, "here_thread_ms"),
        link_bytes_per_s=link_bytes_per_s,
    )
