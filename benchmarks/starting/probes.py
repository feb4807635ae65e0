"""The measurements of `startup.py`, each in a fresh process: `python -m starting.probes PROBE SYSTEM NUM_WORKERS`.

Prints the figures by name as one line of JSON. Imports that a training script needs anyway, such as torch, happen
before the clock starts, for both systems.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

PROBES = ("first_batch", "many_workers", "all_workers", "waiting", "slow_first", "evaluation", "heavy_tail")
SYSTEMS = ("swift_loader", "DataLoader", "torch")
"""The second is swift_loader's."""

_SLOW_SAMPLE_S = 0.5
_NUM_SLOW_BATCHES = 10
_LONG_ENOUGH_S = 300.0
_NUM_UNCOUNTED, _NUM_COUNTED = 80, 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("probe", choices=PROBES)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("num_workers", type=int)
    arguments = parser.parse_args()
    probe = first_batch if arguments.probe == "many_workers" else globals()[arguments.probe]
    print(json.dumps(probe(loader_maker(arguments.system), arguments.num_workers)))


def loader_maker(system: str) -> Callable[..., Any]:
    """Import a system. Return `make(dataset_class, kwargs, batch_size, num_workers)`."""
    import torch  # noqa: F401 - a training script imports it anyway
    from torch.utils.data import DataLoader

    import swift_loader

    def make_swift(dataset_class: type, kwargs: dict[str, Any], batch_size: int, num_workers: int, **more: Any) -> Any:
        return swift_loader.SwiftLoader(
            dataset_class,
            kwargs,
            batch_size=batch_size,
            worker_per_consumer=num_workers,
            shuffle=True,
            seed=1,
            **({"data_queue_size": more.pop("prefetch_factor") * num_workers} if more else {}),
            **more,
        )

    def make_drop_in(
        dataset_class: type, kwargs: dict[str, Any], batch_size: int, num_workers: int, **more: Any
    ) -> Any:
        more.setdefault("prefetch_factor", 4)
        dataset = dataset_class(**kwargs)
        return swift_loader.DataLoader(dataset, batch_size, shuffle=True, seed=1, num_workers=num_workers, **more)

    def make_torch(dataset_class: type, kwargs: dict[str, Any], batch_size: int, num_workers: int) -> DataLoader[Any]:
        return DataLoader(
            dataset_class(**kwargs),
            batch_size,
            shuffle=True,
            num_workers=num_workers,
            multiprocessing_context="spawn",
            persistent_workers=True,
            prefetch_factor=4,
        )

    return {"swift_loader": make_swift, "DataLoader": make_drop_in, "torch": make_torch}[system]


def first_batch(make: Callable[..., Any], num_workers: int) -> dict[str, float]:
    """Time the first batch of a dataset that only needs NumPy."""
    from common.datasets import Rows

    start = time.perf_counter()
    loader = make(Rows, {"length": 100_000}, 64, num_workers)
    next(iter(loader))
    return {"seconds": time.perf_counter() - start}


def all_workers(make: Callable[..., Any], num_workers: int) -> dict[str, float]:
    """Measure the time until each worker of a heavy dataset delivered a batch, then the memory of all descendants.

    The memory is the proportional set size, which counts shared pages once.
    """
    from common.torch_datasets import HeavyDataset

    start = time.perf_counter()
    loader = make(HeavyDataset, {}, 4, num_workers)
    pids: set[int] = set()
    for batch in endless(loader):
        pids.add(int(batch["pid"][0]))
        seconds = time.perf_counter() - start
        if len(pids) == num_workers:
            break
        if seconds > _LONG_ENOUGH_S:
            raise TimeoutError(
                f"only {len(pids)} of {num_workers} workers have delivered a batch after {seconds:.0f} s"
            )
    return {"seconds": seconds, "megabytes": descendants_nbytes() / 1e6}


def waiting(make: Callable[..., Any], num_workers: int) -> dict[str, float]:
    """Measure the CPU time of this process, over all threads, while it waits for slow workers."""
    from common.datasets import SlowSamples

    loader = make(SlowSamples, {"length": 10_000, "seconds": _SLOW_SAMPLE_S}, 1, num_workers)
    batches = iter(loader)
    next(batches)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(_NUM_SLOW_BATCHES * num_workers):
        next(batches)
    return {"percent": 100 * (time.process_time() - cpu) / (time.perf_counter() - wall)}


def slow_first(make: Callable[..., Any], num_workers: int) -> dict[str, float]:
    """Time the first batch of 256 samples that take 10 ms: since the loader was made, and since a worker was ready."""
    from common.datasets import TimedSamples

    start = time.monotonic()
    loader = make(TimedSamples, {"length": 256 * 40, "seconds": 0.01}, 256, num_workers)
    batches = iter(loader)  # kept, because it ends workers
    batch, now = next(batches), time.monotonic()
    return {"seconds": now - start, "seconds_of_work": now - min(batch.tolist())}


def evaluation(make: Callable[..., Any], num_workers: int) -> dict[str, float]:
    """Time a pass of 4 batches of 256 such samples, since a worker was ready."""
    from common.datasets import TimedSamples

    loader = make(TimedSamples, {"length": 256 * 4, "seconds": 0.01}, 256, num_workers)
    batches, now = list(loader), time.monotonic()
    return {"seconds_of_work": now - min(min(batch.tolist()) for batch in batches)}


def heavy_tail(make: Callable[..., Any], num_workers: int) -> dict[str, float]:
    """Measure batches of 32 samples, of which one in twenty takes 50 ms and the others 1 ms, two in flight per worker.

    As the share of the rate that the same loader has in completion order.
    """
    from common.datasets import SleepingSamples

    rates = []
    for in_order in (True, False):
        kwargs = {"length": 32 * 700, "seconds": 0.001, "slow_share": 0.05}
        batches = iter(make(SleepingSamples, kwargs, 32, num_workers, prefetch_factor=2, in_order=in_order))
        for _ in range(_NUM_UNCOUNTED):
            next(batches)
        start = time.perf_counter()
        for _ in range(_NUM_COUNTED):
            next(batches)
        rates.append(_NUM_COUNTED / (time.perf_counter() - start))
        del batches
    return {"percent_of_order": 100 * rates[0] / rates[1]}


def endless(loader: Any) -> Any:
    while True:
        yield from loader


def descendants_nbytes() -> int:
    """Return the proportional set size of this process's descendants."""
    import psutil

    return sum(process.memory_full_info().pss for process in psutil.Process().children(recursive=True))


if __name__ == "__main__":
    main()
