"""A loader that measures nothing: its figures are those of a simulated run."""

from __future__ import annotations

from swift_loader.metrics.observations import Observations
from swift_loader.report.report import Report
from swift_loader.report.stages import flat_metrics
from tests.support.simulated import observed


class MeasuredLoader:
    """Has the methods that monitoring asks a loader for."""

    def __init__(self, observations: Observations | None = None) -> None:
        self.observations = observed(num_batches=100) if observations is None else observations

    def metrics(self, prefix: str = "swift_loader/") -> dict[str, float]:
        return flat_metrics(self.observations, prefix)

    def report(self) -> Report:
        return Report(self.observations)
