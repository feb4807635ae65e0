"""Measures whether advice is worth following: the gain that a report predicts, beside the gain that it brings.

    python benchmarks/advice.py [--only NAME] [--rounds 3] [--seconds 4] [--json FILE]

Twelve workloads with a poor setting each; the model sleeps for a fixed time per batch. The loader runs with the poor
setting, the first advice about options is followed, and it runs again. Both settings take turns. Without advice, the
workers are doubled, which should bring nothing more than predicted.

The predicted gain is the median over the reports of all rounds, for the advice of the first round. The real gain is
that of the median speeds. They agree if the predicted speed is within 10 % of the real one. Samples sleep, use a fixed
CPU time, or copy memory, so other load on the machine disturbs only those that need cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from advising.workloads import BATCH_SIZE, WORKLOADS, Samples, Workload
from common.report import Result, describe_machine, format_machine, format_table, write_json

from swift_loader import SwiftLoader
from swift_loader.report.prediction import Change, Data
from swift_loader.report.report import Report

_AGREES = 0.10


@dataclass(slots=True)
class Row:
    """What was measured of one workload."""

    workload: Workload
    poor: Result
    better: Result
    advice: str = ""
    change: Change = field(default_factory=Change)
    predicted: list[float] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The one that most rounds gave."""
        return statistics.mode(self.verdicts)

    @property
    def gain(self) -> float:
        """The real one."""
        return self.better.median / self.poor.median - 1

    @property
    def error(self) -> float:
        """Of the predicted speed, compared with the real one."""
        return (1 + statistics.median(self.predicted)) / (1 + self.gain) - 1

    def as_cells(self) -> list[str]:
        """Return the row of the table."""
        return [
            self.workload.name,
            f"{self.workload.step_ms:g} ms",
            ", ".join(f"{name}={value}" for name, value in self.workload.options.items()),
            self.verdict,
            self.advice,
            f"{100 * statistics.median(self.predicted):+.0f} %",
            f"{100 * self.gain:+.0f} %",
            f"{100 * self.error:+.0f} %",
        ]


def main() -> None:
    arguments = parse_arguments()
    machine = describe_machine()
    print(format_machine(machine))
    print(f"{arguments.rounds} rounds of {arguments.seconds:g} s\n", flush=True)
    rows = []
    for workload in WORKLOADS:
        if arguments.only in (None, workload.name):
            rows.append(measure(workload, arguments.rounds, arguments.seconds))
            print(f"measured: {' | '.join(rows[-1].as_cells())}", file=sys.stderr, flush=True)
    head = ["workload", "model", "poor setting", "verdict", "advice", "predicted", "real", "error"]
    print(format_table(head, [row.as_cells() for row in rows]))
    agreeing = sum(abs(row.error) <= _AGREES for row in rows)
    right = sum(row.verdict == row.workload.bound for row in rows)
    print(f"\npredicted within 10 %: {agreeing} of {len(rows)}; verdict right: {right} of {len(rows)}")
    if arguments.json:
        settings = {"rounds": arguments.rounds, "seconds": arguments.seconds}
        write_json(arguments.json, machine, settings, [result for row in rows for result in (row.poor, row.better)])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[workload.name for workload in WORKLOADS], help="one workload")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each setting (default: 3)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a turn (default: 4)")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.seconds <= 0:
        parser.error("--rounds and --seconds must be positive")
    return arguments


def measure(workload: Workload, rounds: int, seconds: float) -> Row:
    """Measure a workload with its poor setting and with the advice of the first round, in turns."""
    row = Row(workload, *(Result(workload.name, system, "batches/s") for system in ("poor", "advised")))
    for number in range(rounds):
        rate, report = run(workload, workload.options, seconds)
        if not number:
            row.change, row.advice = choose(report)
        change = row.change
        row.poor.samples.append(rate)
        row.verdicts.append(report.verdict.bound.value)
        row.predicted.append(
            report.predict(
                num_workers=change.num_workers, max_in_flight=change.max_in_flight, in_order=change.in_order
            ).gain
        )
        row.better.samples.append(run(workload, changed(workload.options, change), seconds)[0])
    return row


def choose(report: Report) -> tuple[Change, str]:
    """Return the first advice about options. Without one, twice the workers."""
    for advice in report.advice:
        if advice.change.data is Data.AS_IS:
            return advice.change, advice.action
    assert report.observations is not None
    doubled = 2 * report.observations.setup.num_workers
    return Change(num_workers=doubled), f"none; tried {doubled} workers"


def changed(options: dict[str, Any], change: Change) -> dict[str, Any]:
    """Return the options after a change."""
    given = {
        "worker_per_consumer": change.num_workers,
        "data_queue_size": change.max_in_flight,
        "in_order": change.in_order,
    }
    return {**options, **{name: value for name, value in given.items() if value is not None}}


def run(workload: Workload, options: dict[str, Any], seconds: float) -> tuple[float, Report]:
    """Return batches per second and the report. The loop warms up before it is timed."""
    with SwiftLoader(
        Samples, workload.samples, batch_size=BATCH_SIZE, nearby_shuffle=0, seed=1, **workload.others, **options
    ) as loader:
        batches = iter(loader)
        spin(batches, workload.step_ms / 1e3, 0.2 * seconds)
        num_batches, elapsed = spin(batches, workload.step_ms / 1e3, seconds)
        return num_batches / elapsed, loader.report()


def spin(batches: Any, step_s: float, seconds: float) -> tuple[int, float]:
    """Run the loop for some time. Return how many batches it got, and how long it took."""
    began = time.perf_counter()
    num_batches = 0
    while (elapsed := time.perf_counter() - began) < seconds:
        next(batches)
        time.sleep(step_s)
        num_batches += 1
    return num_batches, elapsed


if __name__ == "__main__":
    main()
