"""Measures batches per second: swift_loader, torch's DataLoader, and an ideal that sends nothing.

    python benchmarks/throughput.py [--rounds 5] [--seconds 2] [--only CASE ...] [--json FILE] [--chart FILE.svg]

One run measures all of them, with two workers each:

- swift_loader: `SwiftLoader` with its defaults, which deliver NumPy arrays;
- torch: `DataLoader` with `multiprocessing_context="spawn"`, `persistent_workers=True`, `prefetch_factor=4`, and its
  own collate, which delivers tensors;
- ideal: two processes that fetch and collate as swift_loader's workers do, into one warm buffer each; nothing is sent.

Systems take turns in an order that changes from round to round, so that other load on the machine affects all of them.
Each system starts once per case, warms up and stays. Between its turns its queues are full and it is idle. Each turn
begins with batches that don't count, because they may have been ready before. The loop takes batches and does nothing
with them. Datasets are shuffled. Epochs follow each other without a break.

The table shows medians over the rounds with minimum and maximum, and ratios of medians. The case `gap` is the time from
the last batch of a short epoch to the first batch of the next. Less is better there, so the chart shows its inverse
ratio. The case `jpeg` spends nearly all its time on decoding and is measured four times as long as the others. Its
relevant figure is the ratio to the ideal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from common.report import Result, describe_machine, format_machine, format_number, format_table, write_json
from transport.cases import CASES, GAP_CASE, NUM_DISCARDED, NUM_WORKERS, Case
from transport.ideal import IdealSystem
from transport.systems import EpochGap, System, Throughput, make_swift, make_torch

_WARM_UP_S = 1.0
_HEADERS = ["case", "system", "median", "min", "max", "unit", "vs torch", "vs ideal"]


def main() -> None:
    arguments = parse_arguments()
    machine = describe_machine()
    print(format_machine(machine))
    print(f"{NUM_WORKERS} workers, {arguments.rounds} rounds of {arguments.seconds:g} s\n", flush=True)
    results = []
    for case in (*CASES, GAP_CASE):
        if not arguments.only or case.name in arguments.only:
            print(f"measuring {case.name}: {case.title} ...", file=sys.stderr, flush=True)
            results += measure_case(case, arguments.rounds, arguments.seconds)
    print(make_table(results))
    if arguments.json:
        settings = {
            "num_workers": NUM_WORKERS,
            "rounds": arguments.rounds,
            "seconds": arguments.seconds,
            "num_discarded": NUM_DISCARDED,
        }
        write_json(arguments.json, machine, settings, results)
    if arguments.chart:
        draw(arguments.chart, results, format_machine(machine))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.name for case in (*CASES, GAP_CASE)]
    parser.add_argument("--rounds", type=int, default=5, help="turns per system (default: 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per turn (default: 2)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"some of: {', '.join(names)}")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    parser.add_argument("--chart", metavar="FILE.svg", help="write a chart of the ratios to torch there")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.seconds <= 0:
        parser.error(f"--rounds {arguments.rounds} --seconds {arguments.seconds:g}: both must be positive")
    return arguments


def measure_case(case: Case, rounds: int, seconds: float) -> list[Result]:
    """Measure all systems in turn. Return a result for each."""
    unit = "ms" if case is GAP_CASE else "batches/s"
    systems: dict[str, System] = {}
    try:
        start_systems(case, systems)
        results = {name: Result(case.name, name, unit) for name in systems}
        for system in systems.values():
            system.measure(_WARM_UP_S)
        names = list(systems)
        for number in range(rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                results[name].samples.append(systems[name].measure(seconds * case.time_factor))
    finally:
        for system in systems.values():
            system.close()
    return list(results.values())


def start_systems(case: Case, systems: dict[str, System]) -> None:
    """Add the systems of a case to a dict one by one, so that the caller can close those that started."""
    clock = EpochGap if case is GAP_CASE else Throughput
    systems["swift_loader"] = clock(make_swift(case))
    systems["torch"] = clock(make_torch(case))
    if case is not GAP_CASE:
        systems["ideal"] = IdealSystem(case)


def make_table(results: Sequence[Result]) -> str:
    medians = {(result.case, result.system): result.median for result in results}
    rows: list[list[str]] = []
    for result in results:
        if rows and rows[-1][0] != result.case:
            rows.append([])
        ratios = [
            f"{format_number(result.median / reference)}x" if reference else "-"
            for reference in (medians.get((result.case, "torch")), medians.get((result.case, "ideal")))
        ]
        rows.append([*result.as_cells(), *ratios])
    return format_table(_HEADERS, rows)


def draw(path: str, results: Sequence[Result], subtitle: str) -> None:
    from common.chart import Bars, draw_chart

    medians = {(result.case, result.system): result.median for result in results}
    rows = []
    for case in CASES:
        if (case.name, "torch") in medians:
            torch = medians[case.name, "torch"]
            rows.append(
                Bars(case.title, medians[case.name, "swift_loader"] / torch, medians[case.name, "ideal"] / torch)
            )
    if (GAP_CASE.name, "torch") in medians:
        shorter = medians[GAP_CASE.name, "torch"] / medians[GAP_CASE.name, "swift_loader"]
        rows.append(Bars(f"{GAP_CASE.title}:\ntimes shorter", shorter, None))
    draw_chart(path, rows, subtitle)


if __name__ == "__main__":
    main()
