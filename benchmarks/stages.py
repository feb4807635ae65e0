"""Measures StageLoader and Pipeline beside SPDL's DataLoader and pipeline: items per second, and CPU time per item.

    python benchmarks/stages.py [--rounds 5] [--only CASE ...] [--json FILE] [--chart FILE.svg]

Needs `pip install spdl`; without it, only swift_loader is measured. Each measurement goes through some items from the
beginning to the end, and counts from the 20th on, so that starting threads and processes doesn't count. The systems
take turns. The table shows medians over the rounds with minimum and maximum, and ratios of medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from common.report import Result, describe_machine, format_machine, format_table, write_json
from staging.cases import CASES, StageCase

NUM_DISCARDED = 20
_HEADERS = ["case", "system", "median", "min", "max", "unit", "vs spdl"]


def main() -> None:
    arguments = parse_arguments()
    machine = describe_machine()
    print(format_machine(machine))
    print(f"{arguments.rounds} rounds\n", flush=True)
    results: list[Result] = []
    for case in CASES:
        if not arguments.only or case.name in arguments.only:
            print(f"measuring {case.name}: {case.title} ...", file=sys.stderr, flush=True)
            results += measure(case, arguments.rounds)
    print(make_table(results))
    if arguments.json:
        write_json(arguments.json, machine, {"rounds": arguments.rounds}, results)
    if arguments.chart:
        draw(arguments.chart, results, format_machine(machine))


def parse_arguments() -> argparse.Namespace:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each system (default: 5)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"some of: {', '.join(names)}")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    parser.add_argument("--chart", metavar="FILE.svg", help="write a chart of the ratios to SPDL there")
    return parser.parse_args()


def measure(case: StageCase, num_rounds: int) -> list[Result]:
    """Measure all systems of a case in turn."""
    names = [name for name in case.systems if name != "spdl" or importlib.util.find_spec("spdl")]
    rates = {name: Result(case.name, name, "items/s") for name in names}
    costs = {name: Result(case.name, name, "CPU us") for name in names}
    for number in range(num_rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            rate, cpu_us = run(case.systems[name](case.num_items), case.num_items)
            rates[name].samples.append(rate)
            costs[name].samples.append(cpu_us)
    return [*rates.values(), *costs.values()]


def run(items: Iterator[Any], num_items: int) -> tuple[float, float]:
    """Go through the items. Return items per second, and CPU microseconds of this process per item."""
    began_s = cpu_s = 0.0
    count = 0
    for _ in items:
        count += 1
        if count == NUM_DISCARDED:
            began_s, cpu_s = time.perf_counter(), time.process_time()
    elapsed_s, used_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    assert count == num_items, f"{count} of {num_items} items came"
    return (count - NUM_DISCARDED) / elapsed_s, used_s / (count - NUM_DISCARDED) * 1e6


def make_table(results: Sequence[Result]) -> str:
    """Return the table, with the ratio to SPDL's figure of the same case."""
    others = {(result.case, result.unit): result.median for result in results if result.system == "spdl"}
    rows = []
    for result in results:
        other = others.get((result.case, result.unit))
        rows.append([*result.as_cells(), "" if other is None else f"{result.median / other:.2f}"])
    return format_table(_HEADERS, rows)


def draw(path: str, results: Sequence[Result], subtitle: str) -> None:
    """Write the chart of items per second as multiples of SPDL's."""
    from common.chart import Bars, draw_chart

    rates = {(result.case, result.system): result.median for result in results if result.unit == "items/s"}
    bars = [
        Bars(case.name, rates[case.name, "swift_loader"] / rates[case.name, "spdl"], None)
        for case in CASES
        if (case.name, "spdl") in rates
    ]
    draw_chart(path, bars, subtitle, other="SPDL 0.8")


if __name__ == "__main__":
    main()
