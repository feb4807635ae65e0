"""The tables of the benchmark: what was measured, and what the model says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields

from common.report import Result, format_number, format_table

from remoting.model import CostsBySize, Line, Load
from remoting.rows import Row
from remoting.turns import LOCAL

__all__ = [
    "SIZES",
    "cost_table",
    "format_bytes",
    "model_table",
    "phase_table",
    "rate_table",
    "total_table",
    "way_table",
]

SIZES = (100_000, 1_000_000, 10_000_000, 100_000_000)
"""Bytes of a batch, in the model's table and chart."""

_TOTAL_LOADS = ((1_000_000, 0.020), (10_000_000, 0.020), (10_000_000, 0.100))
_TOTAL_CORES = (4, 16)
_TOTAL_REMOTE = (0, 8, 32)
_BUILDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_SPANS = ("build_ms", "way_ms", "view_ms")
_CPU_TIMES = ("worker_cpu_ms", "trainer_cpu_ms", "here_cpu_ms", "there_cpu_ms")


def format_bytes(nbytes: int) -> str:
    return f"{nbytes // 10**6} MB" if nbytes >= 10**6 else f"{nbytes // 1000} kB"


def rate_table(rows: Sequence[Row]) -> str:
    """Return batches/s, and the ratio to local workers in the same case."""
    local = {(row.case.name, row.num_workers): row.median("rate") for row in rows if row.system == LOCAL}
    cells = []
    for row in rows:
        rates = [turn.rate for turn in row.turns]
        figures = [format_number(figure) for figure in (row.median("rate"), min(rates), max(rates))]
        ratio = row.median("rate") / local[row.case.name, row.num_workers]
        cells.append([row.case.name, row.system, str(row.num_workers), *figures, format_number(ratio)])
    return format_table(["case", "system", "workers", "batches/s", "min", "max", "local = 1"], cells)


def way_table(rows: Sequence[Row]) -> str:
    """Return where a batch's time goes, and the CPU time that it takes."""
    cells = []
    for row in rows:
        spans_ms = [row.median(name) for name in _SPANS]
        share = 1 - spans_ms[0] / sum(spans_ms)
        times = [format_number(row.median(name)) for name in _CPU_TIMES]
        spans = [format_number(span_ms) for span_ms in spans_ms]
        cells.append([row.case.name, row.system, str(row.num_workers), *spans, f"{share:.0%}", *times])
    headers = ["ms per batch", "system", "workers", "build", "way", "view", "way and view"]
    return format_table([*headers, "CPU: workers", "trainer", "raylet here", "raylet there"], cells)


def phase_table(phases: Sequence[Result]) -> str:
    """Return Ray's part of the way."""
    return format_table(["Ray's part", "system", "median", "min", "max", "unit"], [one.as_cells() for one in phases])


def cost_table(costs: CostsBySize) -> str:
    """Return the model's costs."""
    cells = []
    for title, part in (("small", costs.small), ("large", costs.large)):
        lines = {one.name.replace("_", " "): getattr(part, one.name) for one in fields(part)}
        cells += [
            [title, name, f"{line.fixed_s * 1e3:.3f}", f"{line.per_byte_s * 1e9:.3f}"]
            for name, line in lines.items()
            if isinstance(line, Line)
        ]
    return format_table(["batches", "core time, measured", "ms per batch", "ms per MB"], cells)


def model_table(costs: CostsBySize) -> str:
    """Return what a remote worker brings, for each size and build time."""
    headers = ["computed: batch", *(f"{build_s * 1e3:g} ms" for build_s in _BUILDS_S), "less than"]
    shares, numbers = [], []
    for nbytes in SIZES:
        found = costs.of(nbytes)
        loads = [Load(nbytes, build_s) for build_s in _BUILDS_S]
        least_ms = format_number(found.least_build_s(nbytes) * 1e3)
        brought = [_format_share(found.net_share(load)) for load in loads]
        shares.append([format_bytes(nbytes), *brought, f"{least_ms} ms"])
        counts = [f"{found.num_saturating(load):,.1f}" for load in loads]
        numbers.append([format_bytes(nbytes), *counts, found.limit(loads[0]).name])
    first = format_table(headers, shares, num_left=1)
    second = format_table(["", *headers[1:-1], "limit"], numbers, num_left=1)
    return (
        f"What one remote worker brings, a core of the trainer = 1. It doesn't pay off if building takes less than the "
        f"last column says.\n{first}\n\nHow many remote workers saturate the link of "
        f"{costs.large.link_bytes_per_s * 8 / 1e9:g} Gb/s, or a thread of the trainer or its raylet\n{second}"
    )


def total_table(costs: CostsBySize) -> str:
    """Return the rates of a trainer that uses all its cores for local workers, and has remote ones besides."""
    cells = []
    for (nbytes, build_s), num_cores in itertools.product(_TOTAL_LOADS, _TOTAL_CORES):
        rates = [costs.of(nbytes).rate(Load(nbytes, build_s), num_cores, num_remote) for num_remote in _TOTAL_REMOTE]
        load = f"{format_bytes(nbytes)}, {build_s * 1e3:g} ms"
        cells.append([load, str(num_cores), *(format_number(rate) for rate in rates)])
    headers = ["computed: batches/s", "local cores", *(f"{number} remote" for number in _TOTAL_REMOTE)]
    return format_table(headers, cells, num_left=1)


def _format_share(share: float) -> str:
    return f"{share:.2f}" if share > 0 else "-"
