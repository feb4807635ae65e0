"""The outcome of a part of the benchmark: a table, and a comparison with its targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.report import Result, format_number, format_table

from gpu.accelerator import Accelerator

__all__ = ["Outcome", "Target", "measure_in_turns", "paired_ratios", "table_with_ratios"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a part."""

    text: str
    """To print."""
    results: Sequence[Result]
    is_right: bool = True
    """Whether the content was correct, at any speed."""


@dataclass(frozen=True, slots=True)
class Target:
    """The limits of a ratio."""

    name: str
    at_least: float | None = None
    at_most: float | None = None

    def judge(self, ratios: Sequence[float], accelerator: Accelerator) -> str:
        """Return a line that compares the median ratio with the limits."""
        ratio = statistics.median(ratios)
        limit = f"at least {self.at_least}" if self.at_least is not None else f"at most {self.at_most}"
        met = (self.at_least is None or ratio >= self.at_least) and (self.at_most is None or ratio <= self.at_most)
        verdict = ("met" if met else "MISSED") if accelerator.is_gpu else accelerator.describe()
        span = f"{min(ratios):.3f} to {max(ratios):.3f}"
        return f"{self.name}, in pairs: {ratio:.3f}, {span} (target: {limit}): {verdict}"


def measure_in_turns(case: str, unit: str, systems: dict[str, Callable[[], float]], rounds: int) -> list[Result]:
    """Measure systems in an order that changes from round to round; the first time doesn't count."""
    results = {name: Result(case, name, unit) for name in systems}
    for measure in systems.values():
        measure()
    names = list(systems)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].samples.append(systems[name]())
    return list(results.values())


def paired_ratios(results: Sequence[Result], case: str, system: str, reference: str) -> list[float]:
    """Return the ratios of a system to another one, each within one round: what else the machine does weighs less."""
    samples = {result.system: result.samples for result in results if result.case == case}
    return [ours / theirs for ours, theirs in zip(samples[system], samples[reference], strict=True)]


def table_with_ratios(results: Sequence[Result], reference: str) -> str:
    """Return a table of all results, with the ratio of each to that of one system in the same case."""
    references = {result.case: result.median for result in results if result.system == reference}
    rows: list[list[str]] = []
    for result in results:
        if rows and rows[-1][0] != result.case:
            rows.append([])
        rows.append([*result.as_cells(), f"{format_number(result.median / references[result.case])}x"])
    return format_table(["case", "system", "median", "min", "max", "unit", f"vs {reference}"], rows)
