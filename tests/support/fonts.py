"""Fonts of matplotlib."""

from __future__ import annotations

from swift_loader.report.plots import draw
from tests.support.simulated import observed

__all__ = ["open_fonts"]


def open_fonts() -> None:
    """Draw once: matplotlib keeps the files of its fonts open from the first text on."""
    draw(observed(num_batches=1)).canvas.draw()
