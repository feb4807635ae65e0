"""Measures whether all workers are busy: batches/s with 1 to 64 workers, beside torch's DataLoader and the ideal.

    python benchmarks/workers.py [--workers 1 2 4 ...] [--rounds 3] [--seconds 3] [--quick] [--json FILE]
                                 [--chart FILE.svg]

Samples only sleep, so workers need hardly any CPU. Each sample sleeps 2 ms, and 32 make a batch. The benchmark shows
whether each worker always has a batch to build. With `heavy-tailed` samples, one in twenty sleeps 50 times as long,
always the same ones.

- in order, completion: `SwiftLoader` with its defaults, and with `in_order=False`;
- torch: `DataLoader` with `persistent_workers=True` and its default `prefetch_factor` of 2, forked;
- ideal: as many processes that fetch and collate the same batches and send nothing, perfectly shared.

All are timed over the same batches, in the middle of an epoch, so that neither its beginning nor its end counts; the
first epoch warms up and doesn't count either. Systems take turns, in an order that changes from round to round. The
table gives medians over the rounds, ratios of medians, and how many batches' memory the trainer had mapped in the end.

A full run takes about 20 minutes. 64 workers build 30,000 samples/s. That takes about one core, so on two cores the
rate depends on other load.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from common.report import Result, describe_machine, format_machine, format_number, format_table, write_json
from scaling.systems import SLOW_SHARE, SYSTEMS, Course

_NUM_WORKERS = (1, 2, 4, 8, 16, 32, 64)
_QUICK_WORKERS = (2, 8, 32)
_TIME_FACTOR = {"even": 1.0, "heavy-tailed": 2.0}
"""How much longer this is measured, for having fewer batches a second."""

_RATIOS = (("in order", "ideal"), ("in order", "torch"), ("completion", "torch"), ("in order", "completion"))
_SHORT = {"in order": "order", "completion": "compl."}


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured with one number of workers."""

    samples: str
    num_workers: int
    results: dict[str, Result]
    num_mapped: dict[str, int]
    """Batches' memory in the trainer."""

    def median(self, system: str) -> float:
        """Return batches per second."""
        return self.results[system].median

    def as_cells(self) -> list[str]:
        """Return the row of the table."""
        rates = [format_number(self.median(system)) for system in SYSTEMS]
        ratios = [f"{self.median(one) / self.median(other):.2f}" for one, other in _RATIOS]
        mapped = [str(self.num_mapped[system]) for system in ("in order", "completion")]
        return [self.samples, str(self.num_workers), *rates, *ratios, *mapped]


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", "This DataLoader will create")  # of more workers than cores
    machine = describe_machine()
    print(format_machine(machine))
    print(f"{arguments.rounds} rounds of {arguments.seconds:g} s, batches/s\n", flush=True)
    rows = []
    for samples in SLOW_SHARE:
        for num_workers in arguments.workers:
            print(f"measuring {num_workers} workers, {samples} samples ...", file=sys.stderr, flush=True)
            course = Course(samples, num_workers, arguments.seconds * _TIME_FACTOR[samples])
            rows.append(measure(course, arguments.rounds))
    print(make_table(rows))
    if arguments.json:
        settings = {"rounds": arguments.rounds, "seconds": arguments.seconds}
        write_json(arguments.json, machine, settings, [result for row in rows for result in row.results.values()])
    if arguments.chart:
        from scaling.chart import draw_curves

        curves = {samples: [row for row in rows if row.samples == samples] for samples in SLOW_SHARE}
        medians = {
            samples: {system: [(row.num_workers, row.median(system)) for row in found] for system in SYSTEMS}
            for samples, found in curves.items()
        }
        draw_curves(arguments.chart, medians, format_machine(machine))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", metavar="N", help="numbers of workers (default: 1 2 4 … 64)")
    parser.add_argument("--rounds", type=int, help="turns of each system (default: 3)")
    parser.add_argument("--seconds", type=float, help="length of a turn (default: 3; heavy-tailed samples take twice)")
    parser.add_argument("--quick", action="store_true", help="2, 8 and 32 workers, 1 round of 2 s")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    parser.add_argument("--chart", metavar="FILE.svg", help="draw the rates there")
    arguments = parser.parse_args()
    arguments.workers = arguments.workers or list(_QUICK_WORKERS if arguments.quick else _NUM_WORKERS)
    arguments.rounds = arguments.rounds if arguments.rounds is not None else 1 if arguments.quick else 3
    arguments.seconds = arguments.seconds if arguments.seconds is not None else 2.0 if arguments.quick else 3.0
    if min(arguments.workers) < 1 or arguments.rounds < 1 or arguments.seconds <= 0:
        parser.error("--workers, --rounds and --seconds must be positive")
    return arguments


def measure(course: Course, rounds: int) -> Row:
    """Measure all systems in turn."""
    name = f"{course.samples}, {course.num_workers} workers"
    results = {system: Result(name, system, "batches/s") for system in SYSTEMS}
    num_mapped = {}
    running = {}
    try:
        for system, make in SYSTEMS.items():
            running[system] = make(course)
        names = list(running)
        for number in range(rounds):
            shift = number % len(names)
            for system in names[shift:] + names[:shift]:
                results[system].samples.append(running[system].measure())
    finally:
        for system, loader in reversed(running.items()):
            num_mapped[system] = loader.close()
    return Row(course.samples, course.num_workers, results, num_mapped)


def make_table(rows: Sequence[Row]) -> str:
    ratios = [f"{_SHORT.get(one, one)}/{_SHORT.get(other, other)}" for one, other in _RATIOS]
    headers = ["samples", "workers", *SYSTEMS, *ratios, "mapped order", "compl."]
    cells: list[list[str]] = []
    for row in rows:
        if cells and cells[-1][0] != row.samples:
            cells.append([])
        cells.append(row.as_cells())
    return format_table(headers, cells, num_left=1)


if __name__ == "__main__":
    main()
