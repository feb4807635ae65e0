"""Measures how long the loop waits when a worker, all workers or the template are killed.

    python benchmarks/survival.py [--rounds 20]

Each round kills while the loop waits, and measures the time until the next batch arrives. This time includes noticing
the death, getting the exit code, forking a new worker (for the template: starting an interpreter and building the
dataset) and rebuilding the batch. The table also shows the wait without a kill.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import psutil
from common.datasets import Rows

from swift_loader import SwiftLoader

NUM_WORKERS = 2


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    cases: dict[str, Callable[[psutil.Process], Sequence[psutil.Process]]] = {
        "nobody": lambda _: (),
        "one worker": lambda template: template.children()[:1],
        "all workers": lambda template: template.children(),
        "the template": lambda template: [template],
    }
    print(f"{NUM_WORKERS} workers, {rounds} rounds\n\n{'killed':14} {'median ms':>10} {'max ms':>10}")
    for name, choose in cases.items():
        waits = [1e3 * seconds for seconds in _waits(choose, rounds)]
        print(f"{name:14} {statistics.median(waits):10.1f} {max(waits):10.1f}")


def _waits(choose: Callable[[psutil.Process], Sequence[psutil.Process]], rounds: int) -> list[float]:
    """Return the seconds that the loop waited in each round."""
    waits = []
    kwargs = {"length": 256 * 1000}
    with SwiftLoader(Rows, kwargs, batch_size=256, worker_per_consumer=NUM_WORKERS, data_queue_size=2) as loader:
        iterator = iter(loader)
        for _ in range(rounds):
            for _ in range(20):  # so that the deaths don't count as deaths in a row
                next(iterator)
            (template,) = psutil.Process().children()
            victims = choose(template)
            started = time.perf_counter()
            for victim in victims:
                victim.kill()
            for _ in range(10):  # more than are in flight or than other workers can build before they die too
                next(iterator)
            waits.append(time.perf_counter() - started)
    return waits


if __name__ == "__main__":
    main()
