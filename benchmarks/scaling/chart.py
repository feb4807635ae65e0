"""The chart of the workers benchmark: batches per second over the number of workers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from common.chart import COLOURS, new_pyplot, save_chart

Curve = Sequence[tuple[int, float]]
"""(workers, batches per second)."""

_STYLES = {
    "ideal": {"color": "#8a929c", "linestyle": "--", "linewidth": 1.5},
    "torch": {"color": COLOURS["torch"], "marker": "o", "markersize": 4},
    "in order": {"color": COLOURS["swift_loader"], "marker": "o", "markersize": 4},
    "completion": {"color": "#5aa7de", "marker": "o", "markersize": 4, "linestyle": ":"},
}
_LABELS = {
    "ideal": "ideal: fetch and collate, nothing sent",
    "torch": "torch, prefetch_factor=2",
    "in order": "swift_loader",
    "completion": "swift_loader, in_order=False",
}
_TITLES = {"even": "samples of 2 ms", "heavy-tailed": "5 % of the samples take 100 ms"}


def draw_curves(path: str | os.PathLike[str], curves: Mapping[str, Mapping[str, Curve]], subtitle: str) -> None:
    """Write the chart: a panel for each kind of samples, a curve for each system."""
    plt = new_pyplot()
    figure, panels = plt.subplots(1, len(curves), figsize=(10, 4.2), facecolor="white", squeeze=False)
    for axes, (samples, systems) in zip(panels[0], curves.items(), strict=True):
        for system, curve in systems.items():
            axes.plot(*zip(*curve, strict=True), label=_LABELS[system], **_STYLES[system])
        _dress_axes(axes, samples, [num_workers for num_workers, _ in systems["ideal"]])
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, -0.08), ncols=len(labels), frameon=False)
    figure.suptitle("Batches of 32 samples that only sleep", x=0.07, ha="left", fontsize=12, y=1.04)
    figure.text(0.07, 0.955, subtitle, fontsize=8, color="#5b6470")
    save_chart(figure, path)
    plt.close(figure)


def _dress_axes(axes, samples: str, num_workers: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(num_workers, [str(number) for number in num_workers])
    axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
    axes.set_xlabel("workers")
    axes.set_ylabel("batches/s")
    axes.set_title(_TITLES[samples], loc="left", fontsize=10)
    axes.grid(color="#e6e8eb", linewidth=0.8)
    axes.tick_params(length=0, colors="#2c333b")
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
