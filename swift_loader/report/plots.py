"""Draws a report as one picture. Needs matplotlib, an optional extra, and leaves pyplot and its settings alone."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.errors import time_text
from swift_loader.metrics.observations import NOBODY, TRAINER, WORKER, Observations, Part, are_of_one_pass, stage_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

_INCHES = (11.0, 9.4)
_DPI = 130
_COLOURS = {WORKER: "#1f6fb4", TRAINER: "#d1603d", NOBODY: "#b3bac4"}
"""Who is at a batch. Blue, orange and grey differ in brightness, too, so that everybody can tell them apart."""

_INK = "#2c333b"
_MUTED = "#5b6470"
_GRID = "#e6e8eb"
_SMALL = 8
_FONT = 9
_MAX_EPOCH_LABELS = 12
_MAX_SLOWEST = 5
_LONG_TAIL = 8.0
"""A p99 of so many p50 is shown on a logarithmic axis."""

_MAX_ROWS = 64
"""With more workers, each row stands for several of them."""

_MAX_BINS = 120
_BATCHES_PER_BIN = 4


def draw(title: str, parts: Sequence[Part], observations: Observations, path: str | PathLike[str] | BytesIO) -> None:
    """Write the picture of at least one batch. The file's suffix chooses the format: png, svg, pdf, …."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a plot needs matplotlib: pip install matplotlib", name="matplotlib") from error
    figure = Figure(figsize=_INCHES, facecolor="white")
    FigureCanvasAgg(figure)
    above = figure.add_gridspec(1, 2, left=0.125, right=0.86, top=0.865, bottom=0.63, wspace=0.62)
    _draw_life(figure.add_subplot(above[0]), parts)
    _draw_build_times(figure.add_subplot(above[1]), observations)
    below = figure.add_gridspec(
        3, 1, height_ratios=(1.1, 0.8, 1.8), left=0.085, right=0.925, top=0.505, bottom=0.06, hspace=0.4
    )
    throughput = figure.add_subplot(below[0])
    waits, workers = (figure.add_subplot(below[row], sharex=throughput) for row in (1, 2))
    edges_s = _draw_loop(throughput, waits, observations)
    _draw_workers(workers, observations, edges_s)
    for axes in (throughput, waits):
        axes.tick_params(labelbottom=False)
    workers.set_xlim(0, float(edges_s[-1]))
    setup = observations.setup
    subtitle = (
        f"{setup.num_workers} {setup.worker_type} worker{'' if setup.num_workers == 1 else 's'}, batch size "
        f"{setup.batch_size}, {setup.num_cores:g} cores · the last {len(observations.batches):,} of "
        f"{observations.num_delivered:,} batches, in {edges_s[-1]:.3g} s"
    )
    figure.text(0.02, 0.965, title[0].upper() + title[1:], fontsize=14, color=_INK, weight="bold")
    figure.text(0.02, 0.937, subtitle, fontsize=9, color=_MUTED)
    figure.savefig(path, dpi=_DPI, facecolor="white")


def _draw_life(axes: Axes, parts: Sequence[Part]) -> None:
    """Draw a batch's life: each stage begins where the one before ends at its median."""
    from matplotlib.patches import Patch

    parts = [part for part in parts if part.share > 0 or part.name == "fetch"]
    begin, right = 0.0, 0.0
    for place, part in enumerate(parts):
        p50, p99, colour = part.p50_s * 1e3, part.p99_s * 1e3, _COLOURS[part.who]
        axes.barh(place, p50, left=begin, height=0.56, color=colour, zorder=3)
        axes.plot([begin + p50, begin + p99], [place, place], color=colour, linewidth=1.4, zorder=2)
        axes.plot([begin + p99] * 2, [place - 0.17, place + 0.17], color=colour, linewidth=1.4, zorder=2)
        style: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
        for x, seconds in ((1.14, part.p50_s), (1.33, part.p99_s)):
            axes.text(x, place, time_text(seconds), fontsize=_SMALL, color=_INK, **style)
        right = max(right, begin + p99)
        begin += p50
    for x, title in ((1.14, "p50"), (1.33, "p99")):
        axes.text(x, 1.0, title, transform=axes.transAxes, ha="right", va="bottom", fontsize=_SMALL, color=_MUTED)
    axes.set_yticks(range(len(parts)), [part.name for part in parts])
    axes.set_ylim(len(parts) - 0.4, -0.6)
    axes.set_xlim(0, max(right, begin) * 1.03 or 1)
    title = "A batch's life: bar to the median, line to p99"
    _dress(axes, title, x="ms from the beginning of the batch", grid="x", pad=14)
    labels = {WORKER: "worker", TRAINER: "trainer", NOBODY: "nobody: the batch waits"}
    handles = [Patch(color=_COLOURS[who], label=label) for who, label in labels.items()]
    legend = axes.legend(handles=handles, fontsize=_SMALL, frameon=False, columnspacing=1.2, handlelength=1.4, ncols=3)
    legend.set_loc("upper left")
    legend.set_bbox_to_anchor((-0.02, -0.2), axes.transAxes)


def _draw_build_times(axes: Axes, observations: Observations) -> None:
    """Draw how long workers take for a batch, and name the samples that took longest."""
    times = stage_times(observations.batches)["build"] / 1e6
    p50, p99 = np.quantile(times, (0.5, 0.99))
    low, high = float(times.min()), float(times.max())
    is_long = low > 0 and p99 > _LONG_TAIL * p50
    margin = max((high - low) * 0.02, high * 0.01, 1e-6)
    num_bins = int(np.clip(2 * np.sqrt(len(times)), 8, 60))
    edges = np.linspace(low - margin, high + margin, num_bins)
    if is_long:
        edges = np.geomspace(low * 0.9, high * 1.1, num_bins)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    axes.hist(times, bins=edges.tolist(), color=_COLOURS[WORKER], zorder=2)
    for name, value, side in (("p50", p50, "right"), ("p99", p99, "left")):
        axes.axvline(value, color=_INK, linewidth=1, linestyle="--", zorder=3)
        where = axes.get_xaxis_transform()
        axes.text(value, 1.0, f" {name} ", transform=where, ha=side, va="bottom", fontsize=_SMALL, color=_INK)
    if observations.slowest:
        lines = [f"{sample.index}: {time_text(sample.seconds)}" for sample in observations.slowest[:_MAX_SLOWEST]]
        style: dict[str, Any] = {"transform": axes.transAxes, "va": "top", "fontsize": _SMALL, "linespacing": 1.5}
        axes.text(1.04, 1.0, "slowest, by index", color=_MUTED, **style)
        axes.text(1.04, 0.93, "\n".join(lines), color=_INK, **style)
    scale = " (log scale)" if is_long else ""
    _dress(axes, "Time to build a batch", x=f"ms for fetch, collate and encode{scale}", y="batches", pad=14)


def _draw_loop(throughput: Axes, waits: Axes, observations: Observations) -> Floats:
    """Draw how many batches the loop got in each second, and in how much of its time it waited. Return the time's bins.

    Times are in seconds since the loop asked for the first batch.
    """
    batches = observations.batches
    zero = int(batches["asked_ns"][0])
    asked, delivered = (batches["asked_ns"] - zero) * 1e-9, (batches["delivered_ns"] - zero) * 1e-9
    delivered = np.maximum.accumulate(delivered)
    num_bins = int(np.clip(len(batches) // _BATCHES_PER_BIN, 1, _MAX_BINS))
    edges_s = np.linspace(0, max(float(delivered[-1]), 1e-9), num_bins + 1)
    counts = np.diff(np.searchsorted(delivered, edges_s[1:-1], side="right"), prepend=0, append=len(delivered))
    rates, shares = counts / edges_s[1], _covered(asked, delivered, edges_s) / edges_s[1]
    begins = np.flatnonzero(~are_of_one_pass(batches)) + 1
    throughput.stairs(rates, edges_s, baseline=None, color=_COLOURS[WORKER], linewidth=1.6, zorder=3)
    throughput.set_ylim(0, max(float(rates.max()) * 1.18, 1e-9))
    remark = " (dotted: a new epoch)" if begins.size else ""
    _dress(throughput, f"Throughput of the loop{remark}", y="batches/s")
    waits.stairs(shares * 100, edges_s, fill=True, color=_COLOURS[TRAINER], alpha=0.85, zorder=3)
    waits.set_ylim(0, 100)
    waits.set_yticks([0, 50, 100])
    _dress(waits, "Share of time in which the loop waits for a batch", y="% of time")
    for begin_s, epoch in zip(asked[begins], batches["epoch"][begins], strict=True):
        for axes in (throughput, waits):
            axes.axvline(begin_s, color=_MUTED, linewidth=0.8, linestyle=":", zorder=2)
        if begins.size <= _MAX_EPOCH_LABELS:
            where = throughput.get_xaxis_transform()
            throughput.text(begin_s, 0.96, f" epoch {epoch}", transform=where, va="top", fontsize=_SMALL, color=_MUTED)
    return edges_s


def _draw_workers(axes: Axes, observations: Observations, edges_s: Floats) -> None:
    """Draw when each worker was at a batch: a row each. White: batches of that time aren't delivered yet."""
    occupancy, workers_per_row = _occupancy(observations, edges_s)
    num_rows = len(occupancy)
    mesh = axes.pcolormesh(edges_s, np.arange(num_rows + 1) - 0.5, occupancy * 100, cmap="cividis", vmin=0, vmax=100)
    rows = range(0, num_rows, max(1, -(-num_rows // 8)))
    axes.set_yticks(list(rows), [str(row * workers_per_row) for row in rows])
    axes.set_ylim(num_rows - 0.5, -0.5)
    label = "worker" if workers_per_row == 1 else f"first of {workers_per_row} workers"
    _dress(axes, "Workers: share of time at a batch", x="seconds", y=label, grid="")
    inset = axes.inset_axes((1.012, 0, 0.012, 1))
    bar = axes.figure.colorbar(mesh, cax=inset)
    bar.set_ticks([0, 50, 100], labels=["idle", "50 %", "busy"])
    bar.ax.tick_params(length=0, labelsize=_SMALL, colors=_INK)
    bar.outline.set_visible(False)


def _occupancy(observations: Observations, edges: Floats) -> tuple[Floats, int]:
    """Return the share of each bin in which a worker was at a batch, `(rows, bins)`, and the workers of a row.

    NaN after the last batch was built: others may have been built since that the loop hasn't got.
    """
    zero = int(observations.batches["asked_ns"][0])
    batches = observations.batches[observations.batches["began_ns"] > 0]
    last = int(batches["worker_id"].max()) if len(batches) else 0
    num_workers = max(1, observations.setup.num_workers, last + 1)
    workers_per_row = -(-num_workers // _MAX_ROWS)
    occupancy = np.zeros((-(-num_workers // workers_per_row), len(edges) - 1))
    end = 0.0
    for worker in range(num_workers):
        own = np.sort(batches[batches["worker_id"] == worker], order="began_ns")
        if not len(own):
            continue
        began = (own["began_ns"] - zero) * 1e-9
        ended = began + stage_times(own)["build"] * 1e-9
        occupancy[worker // workers_per_row] += _covered(began, ended, edges)
        end = max(end, float(ended[-1]))
    sizes = np.minimum(workers_per_row, num_workers - workers_per_row * np.arange(len(occupancy)))
    occupancy[:, edges[:-1] >= end] = np.nan
    return np.clip(occupancy / (edges[1] * sizes[:, None]), 0, 1), workers_per_row


def _covered(begins: Floats, ends: Floats, edges: Floats) -> Floats:
    """Return how much of each bin is covered by these intervals, which follow one another."""
    ends = np.maximum(begins, ends)
    begins = np.maximum(begins, np.concatenate([begins[:1], np.maximum.accumulate(ends)[:-1]]))
    ends = np.maximum(begins, ends)
    times = np.column_stack([begins, ends]).ravel()
    sums = np.repeat(np.concatenate([[0.0], np.cumsum(ends - begins)]), 2)[1:-1]
    covered: Floats = np.diff(np.interp(edges, times, sums))
    return covered


def _dress(axes: Axes, title: str, *, x: str = "", y: str = "", grid: str = "y", pad: float = 5) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_INK, pad=pad)
    axes.set_xlabel(x, fontsize=_FONT, color=_INK)
    axes.set_ylabel(y, fontsize=_FONT, color=_INK)
    axes.tick_params(which="both", length=0, labelsize=_FONT, colors=_INK)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis="x" if grid == "x" else "y", color=_GRID, linewidth=0.8)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
