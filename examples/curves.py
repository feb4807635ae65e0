"""The loss and the accuracy of a training run, epoch by epoch, and a picture of them.

Drawing needs matplotlib. Nothing else does, so it is imported only there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

ENDINGS = (".png", ".svg", ".pdf")

BLUE, RED, GREY, DARK = "#1f6fb4", "#d1603d", "#e6e8eb", "#2c333b"
FROM_PERCENT = 90
"""Where the axis of the accuracy begins: the first epochs may leave the picture, so the last ones can be told apart."""


@dataclass(slots=True)
class Curves:
    """One value per epoch."""

    losses: list[float] = field(default_factory=list)
    """Mean of the training samples."""
    accuracies: list[float] = field(default_factory=list)
    """Of the held-out samples, 0 to 1."""


def check_plot(path: Path) -> None:
    """Raise ValueError, with a message of one line, if `draw_curves` couldn't write to `path`; leave no file behind."""
    try:
        import matplotlib.figure  # noqa: F401 - a training run should not end with an ImportError
    except ImportError as error:
        raise ValueError(
            f"--plot needs matplotlib, which can't be imported ({error}): pip install matplotlib"
        ) from None
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"--plot is {path}; the name must end in one of {', '.join(ENDINGS)}")
    if path.is_dir():
        raise ValueError(f"--plot is {path}, which is a folder; name a file")
    if not path.parent.is_dir():
        raise ValueError(f"--plot is {path}; there is no folder {path.parent}: create it first")
    try:
        with TemporaryFile(dir=path.parent):  # permissions alone don't say that a file system is read-only
            pass
    except OSError as error:
        raise ValueError(f"--plot is {path}; can't create a file in {path.parent}: {error.strerror}") from None
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"--plot is {path}; the file exists and is write-protected: name another one")


def draw_curves(path: Path, curves: Curves, title: str, required_accuracy: float) -> None:
    """Write the picture, accuracy above loss; the file's ending chooses the format."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a screen
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 6), dpi=150, facecolor="white", layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=DARK)
    epochs = range(1, len(curves.losses) + 1)
    percent = [100 * accuracy for accuracy in curves.accuracies]
    draw_curve(above, epochs, percent, BLUE, f"{percent[-1]:.2f}%")
    draw_curve(below, epochs, curves.losses, RED, f"{curves.losses[-1]:.3f}")
    above.axhline(100 * required_accuracy, color=DARK, linewidth=1, linestyle=(0, (4, 3)))
    above.annotate(
        f"required: {required_accuracy:.1%}",
        (0.995, 100 * required_accuracy),
        xycoords=("axes fraction", "data"),
        annotation_clip=True,
        xytext=(0, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9,
        color=DARK,
    )
    above.set_title("Held-out accuracy (%)", loc="left", fontsize=10, color=DARK)
    below.set_title("Training loss", loc="left", fontsize=10, color=DARK)
    below.set_xlabel("epoch", color=DARK)
    above.set_ylim(min(FROM_PERCENT, percent[-1] - 5), max(100, 100 * required_accuracy) + 0.5)
    below.set_xlim(0.7, len(epochs) + 0.3)
    below.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.savefig(path)


def draw_curve(axes: Any, epochs: range, values: list[float], colour: str, last: str) -> None:
    """Draw one line on a light grid, and write its last value beside its last point."""
    axes.plot(epochs, values, color=colour, linewidth=1.8)
    axes.plot(epochs[-1], values[-1], "o", color=colour, markersize=7, clip_on=False)
    axes.annotate(
        last,
        (epochs[-1], values[-1]),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=10,
        color=colour,
        annotation_clip=False,
    )
    axes.set_axisbelow(True)
    axes.grid(color=GREY, linewidth=0.8)
    axes.tick_params(length=0, colors=DARK)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
