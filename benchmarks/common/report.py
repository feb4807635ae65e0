"""The output of the benchmarks: the machine, a table, and all samples as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "numpy", "pillow")


@dataclass(slots=True)
class Result:
    """The samples of one system in one case."""

    case: str
    system: str
    unit: str
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median, from which ratios are computed."""
        return statistics.median(self.samples)

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain JSON types."""
        return {
            "case": self.case,
            "system": self.system,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.samples),
            "max": max(self.samples),
            "samples": self.samples,
        }

    def as_cells(self) -> list[str]:
        """Return case, system, median, min, max and unit for a table."""
        figures = [format_number(figure) for figure in (self.median, min(self.samples), max(self.samples))]
        return [self.case, self.system, *figures, self.unit]


def describe_machine() -> dict[str, Any]:
    """Return the facts that figures depend on: CPU, memory, system, versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
    }


def format_machine(machine: dict[str, Any]) -> str:
    """Describe a machine in one line."""
    packages = ", ".join(f"{name} {machine[name]}" for name in ("python", *_PACKAGES))
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}; {packages}"


def format_number(number: float) -> str:
    """Format with three significant digits, but keep all digits before the point."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}" if number >= 1 else f"{number:.3f}"


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 2) -> str:
    """Return a plain-text table.

    Args:
        headers: One per column.
        rows: Cells. An empty row makes a gap.
        num_left: How many columns are left-aligned. The others hold numbers.
    """
    filled = [row for row in rows if row]
    widths = [max(len(row[column]) for row in (headers, *filled)) for column in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(headers), rule, *(line(row) if row else "" for row in rows)])


def write_json(
    path: str | os.PathLike[str], machine: dict[str, Any], settings: dict[str, Any], results: Sequence[Result]
) -> None:
    """Write the machine, the settings and all samples to a file."""
    content = {"machine": machine, "settings": settings, "results": [result.as_json() for result in results]}
    Path(path).write_text(json.dumps(content, indent=2) + "\n")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
