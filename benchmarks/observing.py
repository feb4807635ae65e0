"""Measures what the always-on measuring of a loader costs, with 16-float samples: batches that take the least time.

    python benchmarks/observing.py [--before TREE] [--loader swift|dataloader] [--pairs 20] [--batches 10000]

Variants are compared in fresh processes that take turns, so that other load on the machine affects all of them:

- on: this tree, as users have it;
- off: this tree with `benchmark=False`, for SwiftLoader only. The workers measure all the same;
- before: another checkout (`--before`), for example of the commit before a change.

Each process runs a loader with two workers, warms up, and takes `--batches` batches in a loop that does nothing. It
reports wall time and CPU time per batch: of 500 batches at a time, the lowest decile, which other load on the machine
disturbs least. The CPU time is that of all threads of the trainer and the workers. The table shows medians over the
processes, and how much more "on" takes than the others: the median over the pairs of neighbours, and an interval that
holds the true median with 95 % probability.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from math import comb
from pathlib import Path
from typing import Any

_TREE = Path(__file__).resolve().parent.parent
_NUM_WARM_UP = 2500
"""Batches before the measurement: all slots were written, and all that is measured now and then was."""

_WINDOW = 500
"""Batches that are timed together."""

_FIGURES = ("wall_us", "cpu_us")


def main() -> None:
    arguments = parse_arguments()
    if arguments.child:
        print(json.dumps(measure(arguments.loader, arguments.batches, is_on=arguments.child == "on")))
        return
    variants = [("on", _TREE, "on")]
    if arguments.loader == "swift":
        variants.append(("off", _TREE, "off"))
    if arguments.before:
        variants.append(("before", Path(arguments.before).resolve(), "on"))
    samples: dict[str, list[dict[str, float]]] = {name: [] for name, _, _ in variants}
    for number in range(arguments.pairs):
        shift = number % len(variants)
        for name, tree, state in variants[shift:] + variants[:shift]:
            samples[name].append(run_child(tree, state, arguments))
        print(f"{number + 1}/{arguments.pairs}", file=sys.stderr, end="\r", flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(samples), encoding="utf-8")
    for line in table(samples):
        print(line)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", metavar="TREE", help="another checkout to compare with")
    parser.add_argument("--loader", choices=("swift", "dataloader"), default="swift")
    parser.add_argument("--pairs", type=int, default=20, help="processes per variant (default: 20)")
    parser.add_argument("--batches", type=int, default=10000, help="measured batches per process (default: 10000)")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    parser.add_argument("--child", choices=("on", "off"), help=argparse.SUPPRESS)
    return parser.parse_args()


def run_child(tree: Path, state: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure in a fresh process, with the package of this tree."""
    command = [sys.executable, __file__, "--child", state, "--loader", arguments.loader]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [*command, "--batches", str(arguments.batches)], env=environment, check=True, capture_output=True, text=True
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(kind: str, num_batches: int, *, is_on: bool) -> dict[str, float]:
    """Return wall time and CPU time per batch, in microseconds."""
    batches = endless(make_loader(kind, is_on=is_on))
    for _ in islice(batches, _NUM_WARM_UP):
        pass
    family = [Path(f"/proc/{pid}/task") for pid in family_of(os.getpid())]
    wall_us, cpu_us = [], []
    for _ in range(max(1, num_batches // _WINDOW)):
        began_s, cpu_s = time.perf_counter(), cpu_time_s(family)
        for _ in islice(batches, _WINDOW):
            pass
        wall_us.append((time.perf_counter() - began_s) / _WINDOW * 1e6)
        cpu_us.append((cpu_time_s(family) - cpu_s) / _WINDOW * 1e6)
    return {"wall_us": low(wall_us), "cpu_us": low(cpu_us)}


def low(values: list[float]) -> float:
    """Return the lowest decile: what a window takes that other load on the machine hardly disturbs."""
    return sorted(values)[len(values) // 10]


def make_loader(kind: str, *, is_on: bool) -> Any:
    """Return a loader. Its workers end with the process."""
    from common.datasets import Rows
    from transport.cases import CASES, NUM_WORKERS

    case = next(case for case in CASES if case.dataset_class is Rows)
    if kind == "swift":
        from swift_loader import SwiftLoader

        return SwiftLoader(
            case.dataset_class, case.dataset_kwargs, case.batch_size, worker_per_consumer=NUM_WORKERS, benchmark=is_on
        )
    from swift_loader import DataLoader

    return DataLoader(case.make_dataset(), case.batch_size, shuffle=True, num_workers=NUM_WORKERS)


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def family_of(root: int) -> set[int]:
    """Return a process and all its descendants."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family, grown = {root}, True
    while grown:
        found = {pid for pid, parent in parents.items() if parent in family} - family
        family, grown = family | found, bool(found)
    return family


def cpu_time_s(family: list[Path]) -> float:
    """Return the CPU time of all threads of these processes."""
    total_ns = 0
    for tasks in family:
        for task in tasks.iterdir():
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def table(samples: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    """Yield the lines of the result."""
    for figure in _FIGURES:
        of_figure = {name: [each[figure] for each in figures] for name, figures in samples.items()}
        for name, values in of_figure.items():
            line = f"{figure:8} {name:7} median {statistics.median(values):7.1f}  min {min(values):7.1f}"
            if name != "on":
                ratios = sorted(on / other - 1 for on, other in zip(of_figure["on"], values, strict=True))
                low, high = confidence(ratios)
                line += f"  on takes {statistics.median(ratios):+.2%} more ({low:+.2%} to {high:+.2%})"
            yield line


def confidence(ordered: list[float]) -> tuple[float, float]:
    """Return the order statistics between which the true median lies with at least 95 % probability."""
    number, tail, rank = len(ordered), 0.0, 0
    while rank < number // 2 and tail + comb(number, rank) / 2**number <= 0.025:
        tail += comb(number, rank) / 2**number
        rank += 1
    return ordered[max(0, rank - 1)], ordered[min(number - 1, number - rank)]


if __name__ == "__main__":
    main()
