"""Measures workers that are Ray actors beside worker processes.

    python benchmarks/remote.py [--rounds 5] [--seconds 1.5] [--workers 1 2] [--only CASE ...]
                                [--phases 60] [--quick] [--json FILE]

Needs `pip install 'swift_loader[ray]'`. It starts a Ray cluster of two nodes on this machine, with a raylet and an
object store each, and ends it. Three parts:

- rates: batches/s of worker processes, of actors on the trainer's node, and of actors on the other node, whose batches
  go through Ray's object transfer. The loaders of a case take turns. Ratios are ratios of medians.
- the way of a batch: from the loader's own measurements, medians in ms. "Way" is the time from when a worker has built
  a batch until the trainer can read it. CPU times are per batch, of all threads of a process.
- Ray's part of it, from single calls of an actor without a loader: see `remoting/phases.py`.

Both nodes share this machine's cores, so the rates of the other node are lower than with a machine of its own.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

from common.report import Result, describe_machine, format_machine, write_json
from remoting.cases import CASES, Case
from remoting.cluster import TwoNodes
from remoting.loaders import Workers
from remoting.phases import PHASES, measure_phases
from remoting.tables import OTHER_NODE, PLACES, SAME_NODE, Row, format_bytes, phase_table, rate_table, way_table

NUM_WARMING = 2
"""Turns at first that don't count: writing to fresh pages of an object store takes several times as long."""


def main() -> None:
    arguments = parse_arguments()
    machine = describe_machine()
    print(format_machine(machine))
    print(f"{arguments.rounds} rounds of {arguments.seconds:g} s, batches/s\n", flush=True)
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only]
    with TwoNodes() as cluster:
        rows = []
        for case, num_workers in itertools.product(cases, arguments.workers):
            print(f"measuring {case.name}, {num_workers} workers ...", file=sys.stderr, flush=True)
            rows += measure(case, num_workers, cluster, arguments)
        phases = measure_ray(cases, cluster, arguments.phases)
    print("\n\n".join([rate_table(rows), way_table(rows), phase_table(phases)]))
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("rounds", "seconds", "phases")}
        results = [result for row in rows for result in row.results()]
        write_json(arguments.json, machine, settings, [*results, *phases])


def parse_arguments() -> argparse.Namespace:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="turns of each system (default: 5)")
    parser.add_argument("--seconds", type=float, help="length of a turn (default: 1.5)")
    parser.add_argument("--workers", type=int, nargs="+", metavar="N", help="numbers of workers (default: 1 2)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"some of: {', '.join(names)}")
    parser.add_argument("--phases", type=int, help="calls in which Ray's part is measured (default: 60)")
    parser.add_argument("--quick", action="store_true", help="1 worker, 1 round of 0.3 s, 5 calls")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    arguments = parser.parse_args()
    defaults = (1, 0.3, [1], 5) if arguments.quick else (5, 1.5, [1, 2], 60)
    for name, default in zip(("rounds", "seconds", "workers", "phases"), defaults, strict=True):
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    if min(arguments.rounds, arguments.phases, *arguments.workers) < 1:
        parser.error("--rounds, --workers and --phases must be at least 1")
    if arguments.seconds <= 0:
        parser.error("--seconds must be positive")
    return arguments


def measure(case: Case, num_workers: int, cluster: TwoNodes, arguments: argparse.Namespace) -> list[Row]:
    """Measure all systems in turn, in an order that changes from round to round."""
    rows = {system: Row(case, system, num_workers) for system in PLACES}
    running: dict[str, Workers] = {}
    try:
        for system, place in PLACES.items():
            running[system] = Workers(case, place, num_workers, cluster)
            for _ in range(NUM_WARMING):
                running[system].measure(arguments.seconds)
        names = list(running)
        for number in range(arguments.rounds):
            shift = number % len(names)
            for system in names[shift:] + names[:shift]:
                rows[system].turns.append(running[system].measure(arguments.seconds))
    finally:
        for workers in running.values():
            workers.close()
    return list(rows.values())


def measure_ray(cases: Sequence[Case], cluster: TwoNodes, count: int) -> list[Result]:
    """Measure Ray's part for the sizes of the cases."""
    results = []
    for nbytes, system in itertools.product(sorted({case.nbytes for case in cases}), (SAME_NODE, OTHER_NODE)):
        spans = measure_phases(cluster.ray, PLACES[system], nbytes, count)
        results += [
            Result(f"{format_bytes(nbytes)}, {name}", system, "ms", [span_s * 1e3 for span_s in spans[name]])
            for name in PHASES
        ]
    return results


if __name__ == "__main__":
    main()
