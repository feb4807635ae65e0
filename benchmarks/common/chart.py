"""Draws the charts of the benchmarks: each case as a multiple of another system's figure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COLOURS = {
    "torch spawn": "#e9b09d",
    "DataLoader": "#7fb3dc",
    "SwiftLoader": "#1f6fb4",
    "swift_loader": "#1f6fb4",
    "ideal": "#c4c9d0",
}
"""Of the systems' bars, in this order from the top."""
_OTHER_COLOUR = "#d1603d"
_LABELS = {"DataLoader": "swift_loader.DataLoader", "ideal": "ideal: fetch and collate, nothing sent"}
_TIMES = "\N{MULTIPLICATION SIGN}"
_BAR_HEIGHT_INCHES = 0.24


@dataclass(frozen=True, slots=True)
class Bars:
    """One case, as multiples of the other system's figure. More is better."""

    title: str
    ratios: Mapping[str, float]
    """By system, one of `COLOURS`."""


def draw_chart(
    path: str | os.PathLike[str],
    rows: Sequence[Bars],
    subtitle: str,
    *,
    other: str,
) -> None:
    """Write the chart. The file's suffix chooses the format. `other` is the system whose figures are 1."""
    plt = new_pyplot()
    systems = [system for system in COLOURS if any(system in row.ratios for row in rows)]
    num_bars = sum(len(row.ratios) + 1 for row in rows)
    figure, axes = plt.subplots(figsize=(9, 1.3 + _BAR_HEIGHT_INCHES * num_bars), facecolor="white")
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#e6e8eb", linewidth=0.8)
    middles, place = [], 0
    for row in rows:
        middles.append(place + (len(row.ratios) - 1) / 2)
        for system in systems:
            if system in row.ratios:
                _draw_bar(axes, place, row.ratios[system], system)
                place += 1
        place += 1  # a gap
    axes.set_yticks(middles, [row.title for row in rows])
    axes.set_ylim(place - 1, -1)
    axes.axvline(1, color=_OTHER_COLOUR, linewidth=1.5, zorder=3)
    _dress_axes(axes, rows)
    _add_legend(axes, systems, other.split(",", maxsplit=1)[0])
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
    axes.barh(place, ratio - 1, left=1, height=0.9, color=COLOURS[system], zorder=2)
    label = f"{ratio:.{1 if ratio >= 10 else 2}f}{_TIMES}"
    axes.annotate(
        label, (max(ratio, 1), place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, zorder=4
    )


def _dress_axes(axes, rows: Sequence[Bars]) -> None:
    ratios = [ratio for row in rows for ratio in row.ratios.values()]
    low, high = min([0.8, *(ratio * 0.85 for ratio in ratios)]), max([2.0, *ratios])
    axes.set_xscale("log")
    axes.set_xlim(low, high * 1.5)
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if low <= tick <= high * 1.5]
    axes.set_xticks(ticks, [f"{tick:g}{_TIMES}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.tick_params(length=0, colors="#2c333b")
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)


def _add_legend(axes, systems: Sequence[str], other: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries = [
        Line2D([], [], color=_OTHER_COLOUR, linewidth=1.5, label=f"{other} = 1"),
        *(Patch(color=COLOURS[system], label=_LABELS.get(system, system)) for system in systems),
    ]
    axes.legend(handles=entries, loc="upper center", bbox_to_anchor=(0.4, -0.04), ncols=3, frameon=False, fontsize=9)
