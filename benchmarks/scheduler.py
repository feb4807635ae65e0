"""Measures the scheduler with up to thousands of workers, and the plan with up to 10^12 samples. No process is started.

    python benchmarks/scheduler.py [--rounds 9] [--workers 1,8,...] [--nodes 64] [--batches 500000] [--json FILE]

Three tables. The first has the real time in the scheduler per batch: for the worker's answer, and for the loop that
takes the batch. Build times vary; the numbers of workers take turns. The second is about a cluster in virtual time.
Workers and whole nodes die and are replaced, and the loop checks that it gets each batch once and in order. "scheduler"
is real time in the scheduler per virtual time. The third has the time for the indices of a batch and for a resume, the
memory of the plan, and the size of the saved state.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from common.report import Result, describe_machine, format_machine, format_number, format_table, write_json
from scheduling.cluster import Cluster, Outcome
from scheduling.plans import LargeRun
from scheduling.settings import ClusterSettings

NUM_WORKERS = (1, 8, 64, 256, 1024, 2048)
BATCH_NBYTES = (10**6, 10**7)
RUNS = ((10**6, 1), (10**9, 64), (10**12, 4096))
"""(samples, ranks)"""

_BATCHES_PER_TURN = 3000
_WORKERS_PER_NODE = 32
_LOST = (20, 50)
"""Nodes, and other workers."""

_CLUSTER_HEADERS = [
    "batch",
    "nodes lost",
    "workers lost",
    "rebuilt",
    "batches/s",
    "Gb/s",
    "loop waits",
    "scheduler",
    "events/s",
]


def measure_batches(numbers: Sequence[int], rounds: int) -> list[Result]:
    results, clusters = {}, {}
    for number in numbers:
        for in_order in (True, False):
            key = (number, in_order)
            order = "in order" if in_order else "as they are ready"
            results[key] = Result(f"{number} worker{'s' * (number > 1)}", order, "us/batch")
            clusters[key] = Cluster(ClusterSettings(1, number, build_s=0.02, in_order=in_order))
            clusters[key].run(6 * number + 100)
    for turn in range(rounds):
        for key in list(clusters)[:: 1 if turn % 2 else -1]:
            results[key].samples.append(clusters[key].run(_BATCHES_PER_TURN).us_per_batch)
    return list(results.values())


def simulate_cluster(num_nodes: int, nbytes: int, num_batches: int, lost: tuple[int, int]) -> Outcome:
    """Run through so many batches, with so many deaths of nodes and of other workers at even distances."""
    settings = ClusterSettings(
        num_nodes, _WORKERS_PER_NODE, build_s=0.2, step_s=1e-4, batch_nbytes=nbytes, latency_s=5e-5
    )
    cluster = Cluster(settings)

    def disturb(number: int) -> None:
        for num_lost, kill in zip(lost, (cluster.nodes.kill_a_node, cluster.nodes.kill_a_worker), strict=True):
            if number * num_lost // num_batches > (number - 1) * num_lost // num_batches:
                kill()

    cluster.run(6 * settings.num_workers)
    return cluster.run(num_batches, disturb)


def measure_clusters(num_nodes: int, num_batches: int) -> tuple[list[list[str]], list[Result]]:
    """Return the rows of the table, and the same as results."""
    rows, results = [], []
    for nbytes in BATCH_NBYTES:
        for lost in ((0, 0), _LOST):
            outcome = simulate_cluster(num_nodes, nbytes, num_batches, lost)
            per_s, waits = outcome.num_batches / outcome.virtual_s, outcome.waited_s / outcome.virtual_s
            size, share = f"{nbytes / 1e6:g} MB", outcome.scheduler_s / outcome.virtual_s
            rows.append(
                [
                    size,
                    *map(str, lost),
                    f"{outcome.num_rebuilt:,}",
                    format_number(per_s),
                    format_number(per_s * nbytes * 8e-9),
                    f"{100 * waits:.1f} %",
                    f"{100 * share:.1f} %",
                    format_number(outcome.events_per_s),
                ]
            )
            case = f"{size}, {lost[0]} nodes and {lost[1]} workers lost"
            results += [
                Result(case, "throughput", "batches/s", [per_s]),
                Result(case, "loop waits", "share", [waits]),
                Result(case, "scheduler", "events/s", [outcome.events_per_s]),
            ]
    return rows, results


def measure_plans(rounds: int) -> list[Result]:
    results = []
    for num_samples, num_ranks in RUNS:
        run = LargeRun(num_samples, num_ranks)
        case = f"{num_samples:.0e} samples, {num_ranks} ranks".replace("e+", "e")
        run.resume_s()
        results += [
            Result(case, "indices", "us/batch", [run.batch_s() * 1e6 for _ in range(rounds)]),
            Result(case, "resume", "ms", [run.resume_s() * 1e3 for _ in range(rounds)]),
            Result(case, "memory", "KiB", [run.peak_nbytes() / 1024]),
            Result(case, "state", "bytes", [float(len(run.state))]),
        ]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="turns of each number of workers (default: 9)")
    parser.add_argument("--workers", default=",".join(map(str, NUM_WORKERS)), help="numbers of workers to measure")
    parser.add_argument("--nodes", type=int, default=64, help="nodes of the simulated cluster (default: 64)")
    parser.add_argument("--batches", type=int, default=500_000, help="batches of each simulation (default: 500,000)")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    arguments = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine), flush=True)

    batches = measure_batches([int(number) for number in arguments.workers.split(",")], arguments.rounds)
    rows = [[*result.as_cells(), format_number(2e6 / result.median)] for result in batches]
    print(format_table(["workers", "order", "median", "min", "max", "unit", "events/s"], rows), flush=True)

    rows, clusters = measure_clusters(arguments.nodes, arguments.batches)
    print(f"\n{arguments.nodes} nodes with {_WORKERS_PER_NODE} workers each")
    print(format_table(_CLUSTER_HEADERS, rows, num_left=1), flush=True)

    plans = measure_plans(arguments.rounds)
    print()
    print(format_table(["run", "what", "median", "min", "max", "unit"], [result.as_cells() for result in plans]))
    if arguments.json:
        write_json(arguments.json, machine, vars(arguments), batches + clusters + plans)


if __name__ == "__main__":
    main()
