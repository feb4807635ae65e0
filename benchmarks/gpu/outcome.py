"""The outcome of a part of the benchmark: a table, and a comparison with its targets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from common.report import Result

from gpu.accelerator import Accelerator


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


def paired_ratios(results: Sequence[Result], case: str, system: str, reference: str) -> list[float]:
    """Return the ratios of a system to another one, each within one round: what else the machine does weighs less."""
    samples = {result.system: result.samples for result in results if result.case == case}
    return [ours / theirs for ours, theirs in zip(samples[system], samples[reference], strict=True)]
