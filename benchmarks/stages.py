"""Measures StageLoader and Pipeline beside SPDL's DataLoader and pipeline: items per second, and CPU time per item.

    python benchmarks/stages.py [--rounds 5] [--only CASE ...] [--json FILE] [--chart FILE.svg]

Needs `pip install spdl`; without it, only swift_loader is measured. Each measurement goes through some items from the
beginning to the end, and counts from the 20th on, so that starting threads and processes doesn't count. The systems
take turns. The table shows medians over the rounds with minimum and maximum, and ratios of medians.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from common.report import Result, format_machine
from common.turns import begin, end, make_parser, measure_in_turns, parse
from staging.cases import CASES, StageCase

NUM_DISCARDED = 20


def main() -> None:
    parser = make_parser(__doc__, [case.name for case in CASES], rounds=5, seconds=None)
    parser.add_argument("--chart", metavar="FILE.svg", help="write a chart of the ratios to SPDL there")
    arguments = parse(parser)
    begun = begin(arguments)
    results: list[Result] = []
    for case in CASES:
        if not arguments.only or case.name in arguments.only:
            print(f"measuring {case.name}: {case.title} ...", file=sys.stderr, flush=True)
            results += measure(case, arguments.rounds)
    end(arguments, begun, results, "spdl")
    if arguments.chart:
        draw(arguments.chart, results, format_machine(begun["machine"]))


def measure(case: StageCase, rounds: int) -> list[Result]:
    """Measure all systems of a case in turn."""
    names = [name for name in case.systems if name != "spdl" or importlib.util.find_spec("spdl")]
    turns = {name: partial(run_system, case, name) for name in names}
    return measure_in_turns(case.name, ("items/s", "CPU us"), turns, rounds, is_warm=True)


def run_system(case: StageCase, name: str) -> tuple[float, float]:
    return run(case.systems[name](case.num_items), case.num_items)


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


def draw(path: str, results: Sequence[Result], subtitle: str) -> None:
    """Write the chart of items per second as multiples of SPDL's."""
    from common.chart import Bars, draw_chart

    rates = {(result.case, result.system): result.median for result in results if result.unit == "items/s"}
    bars = [
        Bars(case.name, {"swift_loader": rates[case.name, "swift_loader"] / rates[case.name, "spdl"]})
        for case in CASES
        if (case.name, "spdl") in rates
    ]
    draw_chart(path, bars, subtitle, other="SPDL 0.8")


if __name__ == "__main__":
    main()
