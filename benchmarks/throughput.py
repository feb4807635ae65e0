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

import sys
from contextlib import ExitStack
from functools import partial

from common.report import Result, format_machine
from common.turns import NUM_DISCARDED, WARM_UP_S, begin, end, make_parser, measure_in_turns, parse
from transport.cases import CASES, GAP_CASE, NUM_WORKERS, Case
from transport.ideal import IdealSystem
from transport.systems import EpochGap, Throughput, make_swift, make_torch


def main() -> None:
    parser = make_parser(__doc__, [case.name for case in (*CASES, GAP_CASE)], rounds=5, seconds=2.0)
    parser.add_argument("--chart", metavar="FILE.svg", help="write a chart of the ratios to torch there")
    arguments = parse(parser)
    begun = begin(arguments, num_workers=NUM_WORKERS, num_discarded=NUM_DISCARDED)
    results = []
    for case in (*CASES, GAP_CASE):
        if not arguments.only or case.name in arguments.only:
            print(f"measuring {case.name}: {case.title} ...", file=sys.stderr, flush=True)
            results += measure_case(case, arguments.rounds, arguments.seconds)
    end(arguments, begun, results, "torch", "ideal")
    if arguments.chart:
        draw(arguments.chart, results, format_machine(begun["machine"]))


def measure_case(case: Case, rounds: int, seconds: float) -> list[Result]:
    """Start all systems, and measure them in turn."""
    clock = EpochGap if case is GAP_CASE else Throughput
    makers = {"swift_loader": lambda: clock(make_swift(case)), "torch": lambda: clock(make_torch(case))}
    if case is not GAP_CASE:
        makers["ideal"] = lambda: IdealSystem(case)
    systems = {}
    with ExitStack() as running:
        for name, make in makers.items():
            systems[name] = make()
            running.callback(systems[name].close)
        for system in systems.values():
            system.measure(WARM_UP_S)
        turns = {name: partial(system.measure, seconds * case.time_factor) for name, system in systems.items()}
        return measure_in_turns(case.name, "ms" if case is GAP_CASE else "batches/s", turns, rounds, is_warm=True)


def draw(path: str, results: list[Result], subtitle: str) -> None:
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
