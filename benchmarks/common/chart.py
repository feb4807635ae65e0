"""Draws the charts of the benchmarks: each case as a multiple of another system's figure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = {"swift_loader": "#1f6fb4", "ideal": "#c4c9d0", "torch": "#d1603d"}
_TIMES = "\N{MULTIPLICATION SIGN}"
_BAR_HEIGHT = 0.36
_ROW_HEIGHT_INCHES = 0.72


@dataclass(frozen=True, slots=True)
class Bars:
    """One case, as multiples of the other system's figure. More is better."""

    title: str
    swift: float
    ideal: float | None


def draw_chart(
    path: str | os.PathLike[str],
    rows: Sequence[Bars],
    subtitle: str,
    *,
    other: str = "torch's DataLoader, two workers each",
) -> None:
    """Write the chart. The file's suffix chooses the format. `other` is the system whose figures are 1."""
    plt = new_pyplot()
    figure, axes = plt.subplots(figsize=(9, 1.5 + _ROW_HEIGHT_INCHES * len(rows)), facecolor="white")
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#e6e8eb", linewidth=0.8)
    half = _BAR_HEIGHT / 2
    for place, row in enumerate(rows):
        if row.ideal is None:
            _draw_bar(axes, place, row.swift, "swift_loader")
        else:
            _draw_bar(axes, place - half, row.swift, "swift_loader")
            _draw_bar(axes, place + half, row.ideal, "ideal")
    axes.axvline(1, color=COLOURS["torch"], linewidth=1.5, zorder=3)
    _dress_axes(axes, rows)
    _add_legend(axes, other.split(",", maxsplit=1)[0], has_ideal=any(row.ideal is not None for row in rows))
    axes.set_title(f"Times {other} (log scale, more is better)", loc="left", fontsize=12, pad=20)
    axes.text(0, 1, subtitle, transform=axes.transAxes, va="bottom", fontsize=8, color="#5b6470")
    save_chart(figure, path)
    plt.close(figure)


def new_pyplot():
    """Return pyplot, set up to draw without a screen, and the same file each time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "svg.fonttype": "path", "svg.hashsalt": "swift_loader"})
    return plt


def save_chart(figure, path: str | os.PathLike[str]) -> None:
    """Write a figure; the file's ending chooses the format."""
    metadata = {"Date": None} if str(path).endswith(".svg") else None
    figure.savefig(path, bbox_inches="tight", facecolor="white", metadata=metadata)


def _draw_bar(axes, place: float, ratio: float, system: str) -> None:
    """Draw a bar from 1, which is the other system, to the ratio."""
    axes.barh(place, ratio - 1, left=1, height=_BAR_HEIGHT, color=COLOURS[system], zorder=2)
    label = f"{ratio:.{1 if ratio >= 10 else 2}f}{_TIMES}"
    axes.annotate(
        label, (max(ratio, 1), place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9, zorder=4
    )


def _dress_axes(axes, rows: Sequence[Bars]) -> None:
    ratios = [ratio for row in rows for ratio in (row.swift, row.ideal) if ratio is not None]
    low, high = min([0.8, *(ratio * 0.85 for ratio in ratios)]), max([2.0, *ratios])
    axes.set_xscale("log")
    axes.set_xlim(low, high * 1.5)
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if low <= tick <= high * 1.5]
    axes.set_xticks(ticks, [f"{tick:g}{_TIMES}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(rows)), [row.title for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(length=0, colors="#2c333b")
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)


def _add_legend(axes, other: str, *, has_ideal: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries = [
        Patch(color=COLOURS["swift_loader"], label="swift_loader"),
        *([Patch(color=COLOURS["ideal"], label="ideal: fetch and collate, nothing sent")] if has_ideal else []),
        Line2D([], [], color=COLOURS["torch"], linewidth=1.5, label=f"{other} = 1"),
    ]
    axes.legend(
        handles=entries, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(entries), frameon=False, fontsize=9
    )
