"""Measures the drop-in DataLoader beside torch's, with tensors out on both sides, and beside SwiftLoader.

    python benchmarks/dataloader.py [--rounds 5] [--seconds 2] [--only CASE ...] [--json FILE]

The same arguments for both classes: two workers, `persistent_workers=True`, forks, as by default on Linux. Systems
take turns in an order that changes from round to round, as in throughput.py. The cases:

    uint8, float32, small, dict   batches per second of shuffled map-style datasets, as in throughput.py
    sampler                       `small` with a WeightedRandomSampler
    stream                        `small` as an IterableDataset that shards itself
    uint8-20 and so on            the same in epochs of 20 batches, with the default persistent_workers=False
    start                         ms from making a loader to its first batch, when the process has used one before
    gap                           ms from the last batch of a validation to the first batch of the next training epoch;
                                  with the default persistent_workers=False, which starts workers anew

Less is better for `start` and `gap`. The table shows medians over the rounds, and ratios of medians.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from common.datasets import Images
from common.turns import WARM_UP_S, begin, end, endless, make_parser, measure_in_turns, parse, rate_of
from dropin.cases import CASES, NUM_WORKERS, LoaderCase
from torch.utils.data import DataLoader as TorchDataLoader

from swift_loader import DataLoader, SwiftLoader

_NUM_READY = 30
"""More batches than a loader has ready after a pause."""

Turn = Callable[[float], float]
"""Measures for some seconds, and returns the figure."""


def main() -> None:
    cases = {case.name: ("batches/s", partial(rates, case)) for case in CASES}
    cases |= {f"{case.name}-20": ("batches/s", partial(short_rates, case)) for case in CASES if case.order == "shuffle"}
    arguments = parse(make_parser(__doc__, [*cases, "start", "gap"], rounds=5, seconds=2.0))
    begun = begin(arguments, num_workers=NUM_WORKERS)
    cases |= {"start": ("ms", starts), "gap": ("ms", gaps)}
    results = []
    for name, (unit, make) in cases.items():
        if not arguments.only or name in arguments.only:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            systems = make()
            for turn in systems.values():
                turn(WARM_UP_S)
            turns = {system: partial(turn, arguments.seconds) for system, turn in systems.items()}
            results += measure_in_turns(name, unit, turns, arguments.rounds, is_warm=True)
    end(arguments, begun, results, "torch", "SwiftLoader")


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
    return lambda seconds: rate_of(batches, seconds, _NUM_READY)[0]


def short_rates(case: LoaderCase) -> dict[str, Turn]:
    """Return what measures batches per second in epochs of 20 batches."""
    arguments = replace(case, num_batches=20).arguments()
    return {"DataLoader": short_rate(DataLoader(**arguments)), "torch": short_rate(TorchDataLoader(**arguments))}


def short_rate(loader: Any) -> Turn:
    """Return what measures a loader's batches per second, over whole epochs."""

    def measure(seconds: float) -> float:
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            count += sum(1 for _ in loader)
        return count / (time.perf_counter() - start)

    return measure


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


if __name__ == "__main__":
    main()
