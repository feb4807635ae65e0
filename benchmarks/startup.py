"""Measures the cost of starting, of holding workers and of waiting: swift_loader beside torch's DataLoader.

    python benchmarks/startup.py [--rounds 5] [--heavy-rounds 2] [--only PART ...] [--json FILE]

Each measurement runs in a fresh process, and the systems take turns. For both, the training process imports torch
before the clock starts. The clock starts right before the dataset and the loader are made.

- first_batch: time until the first batch of a NumPy-only dataset arrives, with two workers.
- many_workers: the same with 2 workers and with 64, of swift_loader alone.
- all_workers: time until each worker has delivered a batch, with one worker and with eight, and the memory
  (proportional set size) of all descendants of the trainer at that moment. The dataset's module imports torch. The
  dataset has 256 MiB of arrays and 200,000 strings. For swift_loader the memory includes the template process.
- slow_first: time until the first batch of 256 samples that sleep 10 ms arrives, with eight workers.
- evaluation: time of a pass of four such batches.
- heavy_tail: rate in order as a share of that in completion order, with eight workers and two batches in flight per
  worker; of 32 samples each, of which one in twenty sleeps 50 ms, the others 1 ms. swift_loader alone.
- waiting: CPU time of the training process, over all threads, while it waits for two workers that need 0.5 s per
  sample, in percent of a core.

all_workers takes torch about 20 s and 3.4 GB per round on two cores, so it has fewer rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.report import Result, describe_machine, format_machine, format_number, format_table, write_json
from starting.probes import PROBES, SYSTEMS

_FOLDER = str(Path(__file__).resolve().parent)
_PROBE_TIMEOUT_S = 400
_KNOWN_WARNING = "This DataLoader will create"
"""torch warns about more workers than cores, which is intended here."""
_NUM_WORKERS = {"first_batch": (2,), "many_workers": (2, 64), "all_workers": (1, 8), "waiting": (2,)} | dict.fromkeys(
    ("slow_first", "evaluation", "heavy_tail"), (8,)
)
_GROWTHS = (("64 workers", "2 workers"), ("8 workers", "1 worker"))
"""The last column compares the first with the second."""
_UNITS = {
    "seconds": "s",
    "megabytes": "MB",
    "percent": "% of a core",
    "seconds_of_work": "s",
    "percent_of_order": "% of the rate",
}
_TITLES = {
    ("first_batch", "seconds"): "first batch",
    ("many_workers", "seconds"): "first batch of swift_loader",
    ("all_workers", "seconds"): "all workers ready",
    ("all_workers", "megabytes"): "memory",
    ("waiting", "percent"): "CPU while waiting",
    ("slow_first", "seconds"): "slow first batch, since the start",
    ("slow_first", "seconds_of_work"): "slow first batch, since a worker was ready",
    ("evaluation", "seconds_of_work"): "four slow batches, since a worker was ready",
    ("heavy_tail", "percent_of_order"): "in order, of completion order's rate",
}


@dataclass(frozen=True, slots=True)
class Probe:
    """One measurement, which runs in its own process."""

    name: str
    system: str
    num_workers: int

    def run(self) -> dict[str, float]:
        """Run it and return its figures by name."""
        quiet = ["-W", f"ignore:{_KNOWN_WARNING}"]
        command = [sys.executable, *quiet, "-m", "starting.probes", self.name, self.system, str(self.num_workers)]
        path = filter(None, [os.environ.get("PYTHONPATH")])
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([_FOLDER, *path])},
            stdout=subprocess.PIPE,
            check=True,
            timeout=_PROBE_TIMEOUT_S,
            text=True,
        )
        return json.loads(done.stdout)


def main() -> None:
    arguments = parse_arguments()
    machine = describe_machine()
    print(format_machine(machine))
    print(f"{arguments.rounds} rounds, {arguments.heavy_rounds} of all_workers\n", flush=True)
    results: list[Result] = []
    for name in arguments.only or PROBES:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        results += measure(name, arguments.heavy_rounds if name == "all_workers" else arguments.rounds)
    print(make_table(results))
    if arguments.json:
        settings = {"rounds": arguments.rounds, "heavy_rounds": arguments.heavy_rounds}
        write_json(arguments.json, machine, settings, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each system (default: 5)")
    parser.add_argument("--heavy-rounds", type=int, default=2, help="measurements of all_workers (default: 2)")
    parser.add_argument("--only", nargs="+", choices=PROBES, metavar="PART", help=f"some of: {', '.join(PROBES)}")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.heavy_rounds) < 1:
        parser.error("--rounds and --heavy-rounds must be at least 1")
    return arguments


def measure(name: str, rounds: int) -> list[Result]:
    """Run one probe on all systems in turn. Return a result per figure, number of workers and system."""
    results: dict[tuple[str, int, str], Result] = {}
    for probe in _plan(name, rounds):
        for figure, value in probe.run().items():
            key = (figure, probe.num_workers, probe.system)
            if key not in results:
                case = f"{_TITLES[name, figure]}, {probe.num_workers} worker{'s' * (probe.num_workers > 1)}"
                results[key] = Result(case, probe.system, _UNITS[figure])
            results[key].samples.append(value)
    order = {system: place for place, system in enumerate(SYSTEMS)}
    return [results[key] for key in sorted(results, key=lambda key: (key[0], key[1], order[key[2]]))]


def _plan(name: str, rounds: int) -> Iterator[Probe]:
    """Yield the measurements. Systems alternate, and each goes first in every other round."""
    for number in range(rounds):
        for num_workers in _NUM_WORKERS[name]:
            systems = {"many_workers": SYSTEMS[:1], "heavy_tail": SYSTEMS[:2]}.get(name, SYSTEMS)
            systems = systems if name in ("slow_first", "evaluation", "heavy_tail") else systems[::2]
            for system in systems[:: -1 if number % 2 else 1]:
                yield Probe(name, system, num_workers)


def make_table(results: Sequence[Result]) -> str:
    medians = {(result.case, result.system): result.median for result in results}
    rows: list[list[str]] = []
    for result in results:
        if rows and rows[-1][0] != result.case:
            rows.append([])
        torch = medians.get((result.case, "torch"))
        fewer = next((result.case.replace(*pair) for pair in _GROWTHS if pair[0] in result.case), None)
        fewest = medians.get((fewer, result.system)) if fewer is not None else None
        ratios = [f"{format_number(result.median / base)}x" if base else "-" for base in (torch, fewest)]
        rows.append([*result.as_cells(), *ratios])
    return format_table(["measure", "system", "median", "min", "max", "unit", "vs torch", "vs fewer"], rows)


if __name__ == "__main__":
    main()
