"""Measures `worker_per_consumer="auto"` from 1 worker against the best fixed number, and against torch at its best.

    python benchmarks/autotune.py [--only NAME] [--seconds 60] [--rounds 5] [--turn 3] [--long] [--json FILE]

For each load, a loop runs over a loader with `worker_per_consumer="auto"` for `--seconds`. Then each fixed number of a
grid runs for one turn, with swift_loader and with torch's DataLoader (fork). The best number of each is the smallest
whose rate is within 1 % of the highest. Then three loops take turns: auto, swift_loader with its best number, torch
with its best number. The ratios are those of the medians of these turns.

- within 5 %: how long it took until the loop first ran for 3 s with at least 95 % of the best fixed number's rate;
- resizes later: how often the number of workers changed after `--seconds`; `--long` adds ten minutes.

In the load `changing`, the model becomes faster, and later the samples slower. Each of its three phases takes
`--seconds`, and has a grid search and turns of its own, between which auto's loader stays as it is.

The model sleeps for a fixed time per step. Samples sleep, use CPU time, or are large. Only `CPU` needs all cores, so
other programs disturb that one most.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.report import Result, describe_machine, format_machine, format_number, format_table, write_json
from tuned.loads import CHANGES, LOADS, ChangingSamples, Load, Samples
from tuned.loops import Course, Dataset, rate_of, rate_with, swift_loader_of

from swift_loader import SwiftLoader

_CHANGING = "changing"
_NEARLY_BEST = 0.99
_WITHIN = 0.95
_LONG_S = 600.0
_SCOUTING = 0.5
"""A turn of the grid search is so long, compared with the others."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long things run, in seconds."""

    tuning_s: float
    turn_s: float
    num_rounds: int
    later_s: float
    """How long auto runs on after it was tuned, before the others run."""


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one load."""

    name: str
    step_ms: float
    num_chosen: int
    best: dict[str, int]
    """The best fixed number of workers, by system."""
    results: dict[str, Result]
    seconds_until: float
    num_later_resizes: str

    def ratio(self, system: str) -> float:
        """Return how fast auto is, compared with a system."""
        return self.results["auto"].median / self.results[system].median

    def as_cells(self) -> list[str]:
        """Return the row of the table."""
        return [
            self.name,
            f"{self.step_ms:g} ms",
            str(self.best["swift_loader"]),
            format_number(self.results["swift_loader"].median),
            str(self.num_chosen),
            format_number(self.results["auto"].median),
            f"{self.ratio('swift_loader'):.2f}",
            str(self.best["torch"]),
            format_number(self.results["torch"].median),
            f"{self.ratio('torch'):.2f}",
            f"{self.seconds_until:.0f} s",
            self.num_later_resizes,
        ]


_HEAD = [
    "load", "a step", "best fixed", "batches/s", "auto", "batches/s", "auto/fixed", "torch's best", "batches/s",
    "auto/torch", "within 5 %", "resizes later",
]  # fmt: skip


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", "This DataLoader will create")  # of more workers than cores
    times = Times(arguments.seconds, arguments.turn, arguments.rounds, _LONG_S if arguments.long else 0.0)
    machine = describe_machine()
    print(format_machine(machine))
    print(f"auto runs for {times.tuning_s:g} s, then {times.num_rounds} rounds of {times.turn_s:g} s\n", flush=True)
    rows: list[Row] = []
    for load in LOADS:
        if arguments.only in (None, load.name):
            rows.append(measure(load, times))
            print(f"measured: {' | '.join(rows[-1].as_cells())}", file=sys.stderr, flush=True)
    if arguments.only in (None, _CHANGING):
        rows += measure_changing(times)
    print(format_table(_HEAD, [row.as_cells() for row in rows], num_left=1))
    if arguments.json:
        settings = {"seconds": times.tuning_s, "rounds": times.num_rounds, "turn": times.turn_s}
        write_json(arguments.json, machine, settings, [result for row in rows for result in row.results.values()])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*(load.name for load in LOADS), _CHANGING], help="one load")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long auto runs at first (default: 60)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each loop (default: 5)")
    parser.add_argument("--turn", type=float, default=3.0, help="length of a turn in seconds (default: 3)")
    parser.add_argument("--long", action="store_true", help="auto runs ten minutes longer, and its resizes are counted")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or min(arguments.seconds, arguments.turn) <= 0:
        parser.error("--rounds, --seconds and --turn must be positive")
    return arguments


def measure(load: Load, times: Times) -> Row:
    """Let auto tune itself, find the best fixed numbers, and let the three take turns."""
    dataset, step_s = (Samples, load.samples), load.step_ms / 1e3
    with swift_loader_of(dataset, "auto") as loader:
        course = Course()
        course.follow(loader, step_s, times.tuning_s + times.later_s)
        resizes = f"{course.num_resizes(times.tuning_s)} in {times.later_s:.0f} s" if times.later_s else "-"
        num_chosen = loader.worker_per_consumer
        best, results = compare(load, loader, dataset, times)
    until = course.seconds_until(_WITHIN * results["swift_loader"].median)
    return Row(load.name, load.step_ms, num_chosen, best, results, until, resizes)


def compare(
    load: Load, loader: SwiftLoader, dataset: Dataset, times: Times
) -> tuple[dict[str, int], dict[str, Result]]:
    """Find the best fixed numbers, and let them and a loader that has tuned itself take turns."""
    step_s = load.step_ms / 1e3
    best = {system: best_number(system, dataset, load.grid, step_s, times) for system in ("swift_loader", "torch")}
    results = {system: Result(load.name, system, "batches/s") for system in ("auto", *best)}
    for _ in range(times.num_rounds):
        results["auto"].samples.append(rate_of(loader, step_s, times.turn_s))
        for system, number in best.items():
            results[system].samples.append(rate_with(system, dataset, number, step_s, times.turn_s))
    return best, results


def best_number(system: str, dataset: Dataset, grid: Sequence[int], step_s: float, times: Times) -> int:
    """Return the fewest workers of a grid that are nearly as fast as the best."""
    rates = {number: rate_with(system, dataset, number, step_s, _SCOUTING * times.turn_s) for number in grid}
    shown = ", ".join(f"{number}: {format_number(rate)}" for number, rate in rates.items())
    print(f"{system}, batches/s by workers: {shown}", file=sys.stderr, flush=True)
    return min(number for number, rate in rates.items() if rate >= _NEARLY_BEST * max(rates.values()))


def measure_changing(times: Times) -> list[Row]:
    """Let auto follow a load that changes twice. After each phase, compare it with the best."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sleep_ms")
        path.write_text(f"{CHANGES[0].sleep_ms}")
        dataset = (ChangingSamples, {"path": str(path)})
        with swift_loader_of(dataset, "auto") as loader:
            course = Course()
            for number, change in enumerate(CHANGES, start=1):
                path.write_text(f"{change.sleep_ms}")
                since_s = course.times[-1] if course.times else 0.0
                course.follow(loader, change.step_ms / 1e3, times.tuning_s)
                num_chosen = loader.worker_per_consumer
                load = Load(f"{_CHANGING}, phase {number}", {}, change.step_ms)
                best, results = compare(load, loader, dataset, times)
                until = course.seconds_until(_WITHIN * results["swift_loader"].median, since_s=since_s)
                rows.append(Row(load.name, load.step_ms, num_chosen, best, results, until, "-"))
                print(f"measured: {' | '.join(rows[-1].as_cells())}", file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()
