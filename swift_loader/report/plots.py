"""Draws a report as one picture. Needs matplotlib, an optional extra, and leaves pyplot and its settings alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from swift_loader.metrics.observations import Observations
from swift_loader.report.panels import draw_build_times, draw_life, draw_throughput, draw_waits, draw_workers
from swift_loader.report.report import Report
from swift_loader.report.series import Series
from swift_loader.report.verdict import Bound, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "plot"]

_INCHES = (11.0, 9.4)
_DPI = 130


def plot(source: Report | Observations, path: str | os.PathLike[str]) -> None:
    """Write the picture of a report or of observations. The file's suffix chooses the format: png, svg, pdf, ….

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        ValueError: There is no batch to draw, or matplotlib doesn't know the format.
    """
    draw(source).savefig(path, dpi=_DPI, facecolor="white")


def draw(source: Report | Observations) -> Figure:
    """Return the picture as a figure of matplotlib, which belongs to no window."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a plot needs matplotlib: pip install 'swift_loader[plot]'", name="matplotlib"
        ) from error
    observations = source.observations if isinstance(source, Report) else source
    if observations is None or not len(observations.batches):
        raise ValueError("there is no batch to draw: plot a loader that measures, once a loop has got a batch of it")
    figure = Figure(figsize=_INCHES, facecolor="white")
    FigureCanvasAgg(figure)
    above = figure.add_gridspec(1, 2, left=0.125, right=0.86, top=0.865, bottom=0.63, wspace=0.62)
    draw_life(figure.add_subplot(above[0]), observations)
    draw_build_times(figure.add_subplot(above[1]), observations)
    below = figure.add_gridspec(
        3, 1, height_ratios=(1.1, 0.8, 1.8), left=0.085, right=0.925, top=0.505, bottom=0.06, hspace=0.4
    )
    series = Series.of(observations)
    throughput = figure.add_subplot(below[0])
    waits, workers = (figure.add_subplot(below[row], sharex=throughput) for row in (1, 2))
    draw_throughput(throughput, series)
    draw_waits(waits, series)
    draw_workers(workers, series)
    for axes in (throughput, waits):
        axes.tick_params(labelbottom=False)
    workers.set_xlim(0, float(series.edges_s[-1]))
    figure.text(0.02, 0.965, _headline(observations), fontsize=14, color="#2c333b", weight="bold")
    figure.text(0.02, 0.937, _subtitle(observations, series), fontsize=9, color="#5b6470")
    return figure


def _headline(observations: Observations) -> str:
    verdict = Verdict.of(observations)
    share = f"the loop waits for data {verdict.wait_share * 100:.0f} % of the time"
    if verdict.bound is Bound.STARTING:
        return "Too few batches for a verdict"
    return f"{verdict.bound.value.capitalize()}: {share}"


def _subtitle(observations: Observations, series: Series) -> str:
    setup, shown = observations.setup, len(observations.batches)
    workers = f"{setup.num_workers} {setup.worker_type} worker{'' if setup.num_workers == 1 else 's'}"
    which = f"the last {shown:,} of {observations.num_delivered:,} batches, in {series.edges_s[-1]:.3g} s"
    return f"{workers}, batch size {setup.batch_size}, {setup.num_cores:g} cores · {which}"
