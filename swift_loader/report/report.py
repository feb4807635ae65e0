"""The report of a loader: what was measured, what it means, and what would help."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib import import_module
from os import PathLike
from typing import Any

from swift_loader.metrics.observations import Observations
from swift_loader.report.advice import SWIFT_LOADER, Advice, advise
from swift_loader.report.breakdown import Breakdown
from swift_loader.report.verdict import Verdict

__all__ = ["Report"]


@dataclass(frozen=True, eq=False, repr=False)
class Report(Mapping[str, Any]):
    """What was measured of a loader, up to now. Immutable. Empty, and false, if nothing is measured.

    As a mapping, it has the counts and the times of each stage: `report["batches_delivered"]`. What takes time to
    compute is computed when it is asked for, once.
    """

    observations: Observations | None = None
    counts: Mapping[str, Any] = field(default_factory=dict)
    option: str = SWIFT_LOADER
    """What the loader calls its number of workers."""
    tuning: tuple[str, ...] = ()
    """What the loader did about its number of workers, and why, if it chooses that itself."""

    def __getitem__(self, name: str) -> Any:
        return self.counts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.counts)

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def verdict(self) -> Verdict:
        """Whether the loop waits for data.

        Raises:
            ValueError: Nothing is measured.
        """
        return Verdict.of(self._measured())

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where a batch's time goes.

        Raises:
            ValueError: Nothing is measured.
        """
        return Breakdown.of(self._measured())

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What would make the loop faster: at most one thing. Empty if nothing would bring 5 %."""
        return () if self.observations is None else advise(self.observations, self.option)

    def __getattr__(self, name: str) -> Any:
        gone = "; Report predicts no speeds any more: report.advice has the number of workers that may help"
        raise AttributeError(f"a Report has no attribute {name!r}{gone if name == 'predict' else ''}")

    def _measured(self) -> Observations:
        if self.observations is None:
            raise ValueError("nothing is measured: give benchmark=True, and start the loader")
        return self.observations

    def plot(self, path: str | PathLike[str]) -> None:
        """Write pictures of the report to a file."""
        import_module("swift_loader.report.plots").plot(self, path)  # draws with an optional library

    def to_dict(self) -> dict[str, Any]:
        """Return all of it but the single batches, as plain JSON types."""
        if self.observations is None:
            return dict(self.counts)
        return {
            **self.counts,
            "verdict": {"bound": self.verdict.bound.value, "wait_share": self.verdict.wait_share},
            "setup": asdict(self.observations.setup),
            "breakdown": asdict(self.breakdown),
            "slowest": [asdict(sample) for sample in self.observations.slowest],
            "tuning": list(self.tuning),
            "advice": [asdict(advice) for advice in self.advice],
        }

    def to_json(self) -> str:
        """Return `to_dict()` as a JSON text."""
        return json.dumps(_plain(self.to_dict()), indent=2)

    def __repr__(self) -> str:
        from swift_loader.report.text import describe

        return describe(self)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
