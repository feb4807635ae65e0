"""A loader's metrics in the words of monitoring systems: base units, and one name for all quantiles of a stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

__all__ = ["FIGURES", "Figure", "HasMetrics", "HasReport", "Kind"]


class HasMetrics(Protocol):
    """A `SwiftLoader` or a `swift_loader.DataLoader`."""

    def metrics(self, prefix: str = ...) -> dict[str, float]:
        """Return figures for dashboards."""
        ...


class HasReport(HasMetrics, Protocol):
    """The same, where a report is asked for, too."""

    def report(self) -> Any:
        """Return what was measured."""
        ...


class Kind(str, Enum):
    """What becomes of a figure with time."""

    GAUGE = "gauge"
    """It goes up and down."""
    TOTAL = "total"
    """It only grows, since the loader started."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that a monitoring system gets, made of one or more metrics."""

    name: tuple[str, ...]
    """Its words, without the unit."""
    unit: str
    """`"seconds"`, `"ratio"`, or what is counted."""
    help: str
    kind: Kind
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of the loader's metrics, each with the values of `labels`."""
    labels: tuple[str, ...] = ()
    scale: float = 1.0
    """What a metric is multiplied by."""

    @property
    def is_rate(self) -> bool:
        """Whether the unit is something per second."""
        return self.unit.endswith("/s")


_STAGES = ("fetch", "collate", "encode", "transport", "decode", "wait")
_QUANTILES = {"p50": "0.5", "p99": "0.99"}

FIGURES = (
    Figure(("batch", "rate"), "batches/s", "Batches that the loop gets per second.", Kind.GAUGE, {"batches_per_s": ()}),
    Figure(("sample", "rate"), "samples/s", "Samples that it gets per second.", Kind.GAUGE, {"samples_per_s": ()}),
    Figure(("wait",), "ratio", "Share of time in which the loop waits for a batch.", Kind.GAUGE, {"wait_share": ()}),
    Figure(
        ("ready",), "batches", "Batches that are ready when the loop asks, on average.", Kind.GAUGE, {"ready_mean": ()}
    ),
    Figure(("current",), "workers", "Workers now.", Kind.GAUGE, {"num_workers": ()}),
    Figure(
        ("stage", "duration"),
        "seconds",
        "How long a batch takes in a stage; wait: how long the loop waits for it.",
        Kind.GAUGE,
        {f"{stage}_ms_{name}": (stage, share) for stage in _STAGES for name, share in _QUANTILES.items()},
        ("stage", "quantile"),
        1e-3,
    ),
    Figure(("delivered",), "batches", "Batches that the loop got.", Kind.TOTAL, {"batches_total": ()}),
    Figure(("delivered",), "samples", "Samples that the loop got.", Kind.TOTAL, {"samples_total": ()}),
    Figure(("waited",), "seconds", "How long the loop waited.", Kind.TOTAL, {"waited_s_total": ()}),
    Figure(
        ("run",),
        "seconds",
        "How long the loop ran; between two passes doesn't count.",
        Kind.TOTAL,
        {"elapsed_s_total": ()},
    ),
    Figure(("worker",), "restarts", "Workers that were replaced.", Kind.TOTAL, {"restarts_total": ()}),
)
