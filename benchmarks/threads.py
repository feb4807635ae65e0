"""Compares worker threads with worker processes: batches per second, and CPU time per batch.

    python benchmarks/threads.py [--rounds 5] [--seconds 2] [--only CASE ...] [--json FILE]

Both are `SwiftLoader` with its defaults and two workers; one has `worker_type="thread"`. The calling thread, with no
workers, is beside them. The case `jpeg` decodes photos with Pillow, which releases the GIL. The others copy arrays and
hold it. The loop takes batches and does nothing with them.

The systems take turns in an order that changes from round to round. The table shows medians over the rounds with
minimum and maximum, and ratios of medians. CPU time is that of this process and its workers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import psutil
from common.report import Result, describe_machine, format_machine, format_number, format_table, write_json
from transport.cases import CASES, NUM_DISCARDED, NUM_WORKERS, Case
from transport.systems import LoaderHandle, endless

from swift_loader import SwiftLoader

SYSTEMS = {"processes": (NUM_WORKERS, "process"), "threads": (NUM_WORKERS, "thread"), "no workers": (0, "process")}
UNITS = ("batches/s", "CPU ms")
_WARM_UP_S = 1.0
_HEADERS = ["case", "system", "median", "min", "max", "unit", "vs processes"]


def main() -> None:
    arguments = parse_arguments()
    machine = describe_machine()
    print(format_machine(machine))
    print(f"{NUM_WORKERS} workers, {arguments.rounds} rounds of {arguments.seconds:g} s\n", flush=True)
    results = []
    for case in CASES:
        if not arguments.only or case.name in arguments.only:
            print(f"measuring {case.name}: {case.title} ...", file=sys.stderr, flush=True)
            results += measure_case(case, arguments.rounds, arguments.seconds)
    print(make_table(results))
    if arguments.json:
        settings = {"num_workers": NUM_WORKERS, "rounds": arguments.rounds, "seconds": arguments.seconds}
        write_json(arguments.json, machine, settings, results)


def parse_arguments() -> argparse.Namespace:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each system (default: 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn (default: 2)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"some of: {', '.join(names)}")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.seconds <= 0:
        parser.error(f"--rounds {arguments.rounds} --seconds {arguments.seconds:g}: both must be positive")
    return arguments


class Costs:
    """Measures wall time and CPU time per batch. Continues where the last measurement ended."""

    def __init__(self, handle: LoaderHandle) -> None:
        others = set(psutil.Process().children(recursive=True))
        self._handle = handle
        self._batches = endless(handle.loader)
        next(self._batches)
        self._processes = [psutil.Process(), *set(psutil.Process().children(recursive=True)) - others]

    def measure(self, seconds: float) -> tuple[float, float]:
        """Return batches per second and CPU milliseconds per batch. Batches that were ready before don't count."""
        for _ in range(NUM_DISCARDED):
            next(self._batches)
        count, start, cpu_start = 0, time.perf_counter(), self._cpu_seconds()
        while time.perf_counter() - start < seconds:
            next(self._batches)
            count += 1
        return count / (time.perf_counter() - start), 1e3 * (self._cpu_seconds() - cpu_start) / count

    def close(self) -> None:
        """Stop the workers."""
        self._batches.close()
        self._handle.close()

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(process_times.user + process_times.system for process_times in times)


def measure_case(case: Case, rounds: int, seconds: float) -> list[Result]:
    """Measure all systems in turn. Return two results for each."""
    systems: dict[str, Costs] = {}
    names = list(SYSTEMS)
    try:
        for name in names:
            systems[name] = Costs(make_handle(case, *SYSTEMS[name]))
            systems[name].measure(_WARM_UP_S)
        results = {name: [Result(case.name, name, unit) for unit in UNITS] for name in names}
        for number in range(rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                for result, figure in zip(results[name], systems[name].measure(seconds), strict=True):
                    result.samples.append(figure)
    finally:
        for system in systems.values():
            system.close()
    return [results[name][column] for column in range(len(UNITS)) for name in names]


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


def make_table(results: Sequence[Result]) -> str:
    references = {(result.case, result.unit): result.median for result in results if result.system == "processes"}
    rows: list[list[str]] = []
    for result in results:
        if rows and rows[-1][0] != result.case:
            rows.append([])
        ratio = result.median / references[result.case, result.unit]
        rows.append([*result.as_cells(), f"{format_number(ratio)}x"])
    return format_table(_HEADERS, rows)


if __name__ == "__main__":
    main()
