"""Compares worker threads with worker processes: batches per second, and CPU time per batch.

    python benchmarks/threads.py [--rounds 5] [--seconds 2] [--only CASE ...] [--json FILE]

Both are `SwiftLoader` with its defaults and two workers; one has `worker_type="thread"`. The calling thread, with no
workers, is beside them. The case `jpeg` decodes photos with Pillow, which releases the GIL. The others copy arrays and
hold it. The loop takes batches and does nothing with them.

The systems take turns in an order that changes from round to round. The table shows medians over the rounds with
minimum and maximum, and ratios of medians. CPU time is that of this process and its workers.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial

from common.report import Result
from common.turns import WARM_UP_S, begin, end, make_parser, measure_in_turns, parse
from transport.cases import CASES, NUM_WORKERS, Case
from transport.systems import Costs, LoaderHandle

from swift_loader import SwiftLoader

SYSTEMS = {"processes": (NUM_WORKERS, "process"), "threads": (NUM_WORKERS, "thread"), "no workers": (0, "process")}


def main() -> None:
    arguments = parse(make_parser(__doc__, [case.name for case in CASES], rounds=5, seconds=2.0))
    begun = begin(arguments, num_workers=NUM_WORKERS)
    results = []
    for case in CASES:
        if not arguments.only or case.name in arguments.only:
            print(f"measuring {case.name}: {case.title} ...", file=sys.stderr, flush=True)
            results += measure_case(case, arguments.rounds, arguments.seconds)
    end(arguments, begun, results, "processes")


def measure_case(case: Case, rounds: int, seconds: float) -> list[Result]:
    """Start all systems, and measure them in turn."""
    turns = {}
    with ExitStack() as running:
        for name, workers in SYSTEMS.items():
            costs = Costs(make_handle(case, *workers))
            running.callback(costs.close)
            costs.measure(WARM_UP_S)
            turns[name] = partial(costs.measure, seconds)
        return measure_in_turns(case.name, ("batches/s", "CPU ms"), turns, rounds, is_warm=True)


def make_handle(case: Case, num_workers: int, worker_type: str) -> LoaderHandle:
    loader = SwiftLoader(
        case.dataset_class,
        case.dataset_kwargs,
        batch_size=case.batch_size,
        worker_per_consumer=num_workers,
        worker_type=worker_type,
        seed=1,
    )
    return LoaderHandle(loader, loader.close)


if __name__ == "__main__":
    main()
