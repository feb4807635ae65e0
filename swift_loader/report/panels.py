"""The panels of a report's picture. Each function draws one, on axes of matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from swift_loader.metrics.observations import Observations, SlowSample
from swift_loader.report.life import Life, Seconds
from swift_loader.report.series import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "draw_build_times", "draw_life", "draw_throughput", "draw_waits", "draw_workers"]

COLOURS = {"worker": "#1f6fb4", "trainer": "#d1603d", "idle": "#b3bac4"}
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


def draw_life(axes: Axes, observations: Observations) -> None:
    """Draw a batch's life: each stage begins where the one before ends at its median."""
    life = Life.of(observations)
    stages = [(name, who, times) for name, who, times in _stages(life) if times.any() or name == "fetch"]
    begin, right = 0.0, 0.0
    tails = [np.quantile(times, (0.5, 0.99)) * 1e3 for _, _, times in stages]
    for place, ((_, who, _), (p50, p99)) in enumerate(zip(stages, tails, strict=True)):
        axes.barh(place, p50, left=begin, height=0.56, color=COLOURS[who], zorder=3)
        axes.plot([begin + p50, begin + p99], [place, place], color=COLOURS[who], linewidth=1.4, zorder=2)
        axes.plot([begin + p99] * 2, [place - 0.17, place + 0.17], color=COLOURS[who], linewidth=1.4, zorder=2)
        right = max(right, begin + p99)
        begin += p50
    _write_column(axes, 1.14, "p50 ms", [_ms(p50) for p50, _ in tails])
    _write_column(axes, 1.3, "p99 ms", [_ms(p99) for _, p99 in tails])
    axes.set_yticks(range(len(stages)), [name for name, _, _ in stages])
    axes.set_ylim(len(stages) - 0.4, -0.6)
    axes.set_xlim(0, max(right, begin) * 1.03 or 1)
    _dress(axes, "A batch's life: bar to the median, line to p99", x="ms from the beginning of the batch", grid="x")
    _add_legend(axes)


def _write_column(axes: Axes, x: float, title: str, texts: list[str]) -> None:
    """Write a text beside each row, right of the axes."""
    axes.text(x, 1.0, title, transform=axes.transAxes, ha="right", va="bottom", fontsize=_SMALL, color=_MUTED)
    for place, text in enumerate(texts):
        where = axes.get_yaxis_transform()
        axes.text(x, place, text, transform=where, ha="right", va="center", fontsize=_SMALL, color=_INK)


def _stages(life: Life) -> list[tuple[str, str, Seconds]]:
    return [
        ("fetch", "worker", life.fetch),
        ("collate", "worker", life.collate),
        ("encode", "worker", life.encode),
        ("transport", "idle", life.transport),
        ("decode", "trainer", life.decode),
        ("delivery order", "idle", life.order),
        ("wait for the loop", "idle", life.queued),
        ("handing over", "trainer", life.pickup),
        ("copy to device", "trainer", life.copy),
    ]


def _add_legend(axes: Axes) -> None:
    from matplotlib.patches import Patch

    names = {"worker": "worker", "trainer": "trainer", "idle": "nobody: the batch waits"}
    handles = [Patch(color=COLOURS[who], label=name) for who, name in names.items()]
    legend = axes.legend(handles=handles, fontsize=_SMALL, frameon=False, columnspacing=1.2, handlelength=1.4, ncols=3)
    legend.set_loc("upper left")
    legend.set_bbox_to_anchor((-0.02, -0.2), axes.transAxes)


def draw_build_times(axes: Axes, observations: Observations) -> None:
    """Draw how long workers take for a batch, and name the samples that took longest."""
    batches = observations.batches
    times = (batches["fetch_ns"] + batches["collate_ns"] + batches["encode_ns"]) / 1e6
    p50, p99 = np.quantile(times, (0.5, 0.99))
    low, high = float(times.min()), float(times.max())
    is_long = low > 0 and p99 > _LONG_TAIL * p50
    margin = max((high - low) * 0.02, high * 0.01, 1e-6)
    num_bins = int(np.clip(2 * np.sqrt(len(times)), 8, 60))
    edges = (
        np.geomspace(low * 0.9, high * 1.1, num_bins) if is_long else np.linspace(low - margin, high + margin, num_bins)
    )
    axes.hist(times, bins=edges.tolist(), color=COLOURS["worker"], zorder=2)
    if is_long:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    for name, value, side in (("p50", p50, "right"), ("p99", p99, "left")):
        axes.axvline(value, color=_INK, linewidth=1, linestyle="--", zorder=3)
        where = axes.get_xaxis_transform()
        axes.text(value, 1.0, f" {name} ", transform=where, ha=side, va="bottom", fontsize=_SMALL, color=_INK)
    _note_slowest(axes, observations.slowest)
    scale = " (log scale)" if is_long else ""
    _dress(axes, "Time to build a batch", x=f"ms for fetch, collate and encode{scale}", y="batches", grid="y")


def _note_slowest(axes: Axes, slowest: tuple[SlowSample, ...]) -> None:
    if not slowest:
        return
    lines = [f"{sample.index}: {_ms(sample.seconds * 1e3)} ms" for sample in slowest[:_MAX_SLOWEST]]
    for height, text, colour in ((1.0, "slowest, by index", _MUTED), (0.93, "\n".join(lines), _INK)):
        where = axes.transAxes
        axes.text(1.04, height, text, transform=where, va="top", fontsize=_SMALL, color=colour, linespacing=1.5)


def draw_throughput(axes: Axes, series: Series) -> None:
    """Draw how many batches the loop got in each second."""
    axes.stairs(series.batches_per_s, series.edges_s, baseline=None, color=COLOURS["worker"], linewidth=1.6, zorder=3)
    axes.set_ylim(0, max(float(series.batches_per_s.max()) * 1.18, 1e-9))
    _dress(
        axes, "Throughput of the loop" + (" (dotted: a new epoch)" if series.epochs else ""), y="batches/s", grid="y"
    )
    _mark_epochs(axes, series, named=True)


def draw_waits(axes: Axes, series: Series) -> None:
    """Draw in how much of its time the loop waited."""
    axes.stairs(series.wait_share * 100, series.edges_s, fill=True, color=COLOURS["trainer"], alpha=0.85, zorder=3)
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 50, 100])
    _dress(axes, "Share of time in which the loop waits for a batch", y="% of time", grid="y")
    _mark_epochs(axes, series, named=False)


def draw_workers(axes: Axes, series: Series) -> None:
    """Draw when each worker was at a batch: a row each. White: batches of that time aren't delivered yet."""
    num_rows = len(series.occupancy)
    mesh = axes.pcolormesh(
        series.edges_s, np.arange(num_rows + 1) - 0.5, series.occupancy * 100, cmap="cividis", vmin=0, vmax=100
    )
    every = max(1, -(-num_rows // 8))
    rows = range(0, num_rows, every)
    axes.set_yticks(list(rows), [str(row * series.workers_per_row) for row in rows])
    axes.set_ylim(num_rows - 0.5, -0.5)
    label = "worker" if series.workers_per_row == 1 else f"first of {series.workers_per_row} workers"
    _dress(axes, "Workers: share of time at a batch", x="seconds", y=label)
    inset = axes.inset_axes((1.012, 0, 0.012, 1))
    bar = axes.figure.colorbar(mesh, cax=inset)
    bar.set_ticks([0, 50, 100], labels=["idle", "50 %", "busy"])
    bar.ax.tick_params(length=0, labelsize=_SMALL, colors=_INK)
    bar.outline.set_visible(False)


def _mark_epochs(axes: Axes, series: Series, *, named: bool) -> None:
    for epoch, begin in series.epochs:
        axes.axvline(begin, color=_MUTED, linewidth=0.8, linestyle=":", zorder=2)
        if named and len(series.epochs) <= _MAX_EPOCH_LABELS:
            where = axes.get_xaxis_transform()
            axes.text(begin, 0.96, f" epoch {epoch}", transform=where, va="top", fontsize=_SMALL, color=_MUTED)


def _dress(axes: Axes, title: str, *, x: str = "", y: str = "", grid: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_INK, pad=14 if "build" in title or "life" in title else 5)
    axes.set_xlabel(x, fontsize=_FONT, color=_INK)
    axes.set_ylabel(y, fontsize=_FONT, color=_INK)
    axes.tick_params(which="both", length=0, labelsize=_FONT, colors=_INK)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis="x" if grid == "x" else "y", color=_GRID, linewidth=0.8)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)


def _ms(value: float) -> str:
    """Return a number of milliseconds with two digits that count, or more."""
    if value >= 100:  # noqa: PLR2004
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 1 else f"{value:.2g}" if value >= 0.001 else "0"  # noqa: PLR2004
