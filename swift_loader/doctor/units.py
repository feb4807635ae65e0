"""Numbers as text for people: times, sizes, shares. Pure."""

from __future__ import annotations

__all__ = ["count_text", "nbytes_text", "share_text", "time_text"]

_TIMES = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "us", 1e6))
"""(at least, unit, units per second)."""

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")

_STEP = 1024


def time_text(seconds: float) -> str:
    """Return a time with its unit: `1.20 s`, `3.4 ms`, `12 us`."""
    for least, unit, factor in _TIMES:
        if seconds >= least:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def nbytes_text(nbytes: float) -> str:
    """Return a size with its unit: `512 B`, `1.5 MiB`."""
    unit = 0
    while nbytes >= _STEP and unit < len(_SIZES) - 1:
        nbytes, unit = nbytes / _STEP, unit + 1
    return f"{_digits(nbytes) if unit else round(nbytes)} {_SIZES[unit]}"


def share_text(share: float) -> str:
    """Return a share as per cent."""
    return f"{100 * share:.0f} %"


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun: `1 sample`, `1,000 samples`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _digits(number: float) -> str:
    """Return about three significant digits, without an exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"  # noqa: PLR2004
