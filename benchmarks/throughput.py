"""Measures batches per second: both loaders, torch's DataLoader, and an ideal that sends nothing.

    python benchmarks/throughput.py [--rounds 5] [--seconds 2] [--only CASE ...] [--json FILE] [--chart FILE.svg]

One run measures all of them, with two workers each:

- torch: `DataLoader` with forked workers, its default on Linux, `persistent_workers=True`, `prefetch_factor=4`, and its
  own collate, which delivers tensors;
- torch spawn: the same with `multiprocessing_context="spawn"`;
- DataLoader: swift_loader's, with forked workers and `persistent_workers=True`;
- SwiftLoader: with its defaults, which deliver NumPy arrays;
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
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from common.report import Result, format_machine
from common.turns import NUM_DISCARDED, WARM_UP_S, begin, end, make_parser, measure_in_turns, parse
from transport.cases import CASES, GAP_CASE, NUM_WORKERS, Case
from transport.ideal import IdealSystem
from transport.systems import EpochGap, Throughput, make_drop_in, make_swift, make_torch


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
    makers: dict[str, Callable[[], Any]] = {
        "torch": lambda: clock(make_torch(case, "fork")),
        "torch spawn": lambda: clock(make_torch(case)),
        "DataLoader": lambda: clock(make_drop_in(case)),
        "SwiftLoader": lambda: clock(make_swift(case)),
    }
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

    rows = []
    for case in (*CASES, GAP_CASE):
        medians = {result.system: result.median for result in results if result.case == case.name}
        if torch := medians.pop("torch", None):
            is_time = case is GAP_CASE
            ratios = {system: torch / median if is_time else median / torch for system, median in medians.items()}
            rows.append(Bars(f"{case.title}:\ntimes shorter" if is_time else case.title, ratios))
    draw_chart(path, rows, subtitle, other="torch's DataLoader (fork), two workers each")


if __name__ == "__main__":
    main()
