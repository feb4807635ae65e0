"""Measures the drop-in DataLoader beside torch's, with tensors out on both sides, and beside SwiftLoader.

    python benchmarks/dataloader.py [--rounds 5] [--seconds 2] [--only CASE ...] [--json FILE]

The same arguments for both classes: two workers, `persistent_workers=True`. torch forks its workers, as by default on
Linux. Systems take turns in an order that changes from round to round, as in throughput.py. The cases:

    uint8, float32, small, dict   batches per second of shuffled map-style datasets, as in throughput.py
    sampler                       `small` with a WeightedRandomSampler
    stream                        `small` as an IterableDataset that shards itself
    start                         ms from making a loader to its first batch, when the process has used one before
    gap                           ms from the last batch of a validation to the first batch of the next training epoch;
                                  with the default persistent_workers=False, which starts torch's workers anew

Less is better for `start` and `gap`. The table shows medians over the rounds, and ratios of medians.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from common.datasets import Images
from common.report import Result, describe_machine, format_machine, format_number, format_table, write_json
from dropin.cases import CASES, NUM_WORKERS, LoaderCase
from torch.utils.data import DataLoader as TorchDataLoader

from swift_loader import DataLoader, SwiftLoader

_NUM_DISCARDED = 30
_WARM_UP_S = 1.0
_HEADERS = ["case", "system", "median", "min", "max", "unit", "vs torch", "vs SwiftLoader"]
_EXTRAS = ("start", "gap")

Turn = Callable[[float], float]
"""Measures for some seconds, and returns the figure."""


def main() -> None:
    arguments = parse_arguments()
    machine = describe_machine()
    print(format_machine(machine))
    print(f"{NUM_WORKERS} workers, {arguments.rounds} rounds of {arguments.seconds:g} s\n", flush=True)
    results: list[Result] = []
    for case in CASES:
        if not arguments.only or case.name in arguments.only:
            print(f"measuring {case.name} ...", file=sys.stderr, flush=True)
            results += take_turns(case.name, "batches/s", rates(case), arguments)
    for name, systems in (("start", starts()), ("gap", gaps())):
        if not arguments.only or name in arguments.only:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            results += take_turns(name, "ms", systems, arguments)
    print(make_table(results))
    if arguments.json:
        write_json(arguments.json, machine, {"rounds": arguments.rounds, "seconds": arguments.seconds}, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*(case.name for case in CASES), *_EXTRAS]
    parser.add_argument("--rounds", type=int, default=5, help="turns per system (default: 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per turn (default: 2)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=f"some of: {', '.join(names)}")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    return parser.parse_args()


def take_turns(case: str, unit: str, systems: dict[str, Turn], arguments: argparse.Namespace) -> list[Result]:
    """Measure all systems in turn. Return a result for each."""
    results = {name: Result(case, name, unit) for name in systems}
    for turn in systems.values():
        turn(_WARM_UP_S)
    names = list(systems)
    for number in range(arguments.rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].samples.append(systems[name](arguments.seconds))
    return list(results.values())


def rates(case: LoaderCase) -> dict[str, Turn]:
    """Return what measures batches per second."""
    systems = {
        "DataLoader": rate(DataLoader(**case.arguments(), persistent_workers=True)),
        "torch": rate(TorchDataLoader(**case.arguments(), persistent_workers=True)),
    }
    if case.order == "shuffle":
        kwargs = {"length": case.batch_size * case.num_batches, **case.kwargs}
        loader = SwiftLoader(case.dataset_class, kwargs, case.batch_size, worker_per_consumer=NUM_WORKERS, seed=1)
        systems["SwiftLoader"] = rate(loader)
    return systems


def rate(loader: Any) -> Turn:
    """Return what measures a loader's batches per second, over as many epochs as needed."""
    batches = endless(loader)

    def measure(seconds: float) -> float:
        for _ in range(_NUM_DISCARDED):
            next(batches)
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            next(batches)
            count += 1
        return count / (time.perf_counter() - start)

    return measure


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def starts() -> dict[str, Turn]:
    """Return what measures the time from making a loader to its first batch."""

    def start(kind: type[Any]) -> Turn:
        def measure(_: float) -> float:
            began = time.perf_counter()
            loader = kind(Images(640), 64, num_workers=NUM_WORKERS)
            next(iter(loader))
            return (time.perf_counter() - began) * 1000

        return measure

    return {"DataLoader": start(DataLoader), "torch": start(TorchDataLoader)}


def gaps() -> dict[str, Turn]:
    """Return what measures the time between a validation and the next training epoch."""

    def gap(kind: type[Any]) -> Turn:
        train = kind(Images(1280), 64, shuffle=True, num_workers=NUM_WORKERS)
        validation = kind(Images(640), 64, num_workers=NUM_WORKERS)

        def measure(_: float) -> float:
            for _batch in itertools.chain(train, validation):
                pass
            began = time.perf_counter()
            batches = iter(train)
            next(batches)
            elapsed = time.perf_counter() - began
            for _batch in batches:
                pass
            return elapsed * 1000

        return measure

    return {"DataLoader": gap(DataLoader), "torch": gap(TorchDataLoader)}


def make_table(results: Sequence[Result]) -> str:
    medians = {(result.case, result.system): result.median for result in results}
    rows: list[list[str]] = []
    for result in results:
        if rows and rows[-1] and rows[-1][0] != result.case:
            rows.append([])
        others = [medians.get((result.case, other)) for other in ("torch", "SwiftLoader")]
        ratios = [f"{format_number(result.median / other)}x" if other else "" for other in others]
        rows.append([*result.as_cells(), *ratios])
    return format_table(_HEADERS, rows)


if __name__ == "__main__":
    main()
