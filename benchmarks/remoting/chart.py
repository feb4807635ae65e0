"""The chart of the cost model: what remote workers bring, over the time that building a batch takes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from common.chart import new_pyplot, save_chart

from remoting.model import CostsBySize, Load
from remoting.tables import format_bytes

__all__ = ["draw_model"]

_COLOURS = ("#9ecae1", "#5aa7de", "#1f6fb4", "#0b3d6b")
_NUM_POINTS = 61
_DECADES = (-3.0, 0.0)
"""Powers of ten: build times from 1 ms to 1 s."""


def draw_model(path: str | os.PathLike[str], costs: CostsBySize, sizes: Sequence[int], subtitle: str) -> None:
    """Write the chart: on the left what one remote worker brings, on the right how many can be fed."""
    plt = new_pyplot()
    low, high = _DECADES
    times_s = [10 ** (low + (high - low) * number / (_NUM_POINTS - 1)) for number in range(_NUM_POINTS)]
    times_ms = [1e3 * time_s for time_s in times_s]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), facecolor="white")
    for nbytes, colour in zip(sizes, _COLOURS, strict=True):
        loads, found = [Load(nbytes, time_s) for time_s in times_s], costs.of(nbytes)
        left.plot(
            times_ms, [max(0.0, found.net_share(load)) for load in loads], color=colour, label=format_bytes(nbytes)
        )
        right.plot(times_ms, [found.num_saturating(load) for load in loads], color=colour)
    left.set_ylim(0, 1.05)
    left.set_title("one remote worker, one core of the trainer = 1", loc="left", fontsize=10)
    right.set_yscale("log")
    right.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    right.set_title("remote workers that can be received from", loc="left", fontsize=10)
    for axes in (left, right):
        _dress_axes(axes)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, -0.08), ncols=len(labels), frameon=False)
    figure.suptitle("What remote workers bring, computed from measured costs", x=0.07, ha="left", fontsize=12, y=1.04)
    figure.text(0.07, 0.955, subtitle, fontsize=8, color="#5b6470")
    save_chart(figure, path)
    plt.close(figure)


def _dress_axes(axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda time_ms, _: f"{time_ms:g}")
    axes.set_xlabel("ms to build a batch")
    axes.grid(color="#e6e8eb", linewidth=0.8)
    axes.tick_params(which="both", length=0, colors="#2c333b")
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
