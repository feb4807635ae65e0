"""Measures the gain of reading samples in runs of neighbours: one file in orders of run length 1, 2, 4, 8, ...

    python benchmarks/locality.py [--folder .] [--mib 256] [--batch-size 64] [--rounds 3] [--json FILE]

The file has records of one size. Every order is a windowed shuffle, like SwiftLoader's. Its window is the default for
that run length, so that all orders mix equally well. Run length 1 is a uniform shuffle. Cases:

- warm: the file is in the page cache. pread(2) reads the records.
- cold: the file is first dropped from the page cache (posix_fadvise). pread(2) reads the records, or page faults of an
  np.memmap do. The device's setting determines the read-ahead (`/sys/block/*/queue/read_ahead_kb`, printed).
- disk: a simulated spinning disk with a file of 64 GiB; no I/O. A read that misses the page cache costs a seek and
  loads the aligned 128 KiB around it, Linux's default read-ahead. The page cache is an LRU list of 4 GiB.

The table shows thousands of records per second, medians over the rounds. "vs 1" is the ratio to run length 1.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from common.report import Result, describe_machine, format_machine, format_number, format_table, write_json
from numpy.typing import NDArray

from swift_loader.sampling.shuffle import Order, OrderSettings, local_window

RECORD_BYTES = (256, 3072, 12_288, 110_000)
"""A short text or a row of a table; CIFAR; 64 x 64 RGB; a JPEG of ImageNet."""
RUN_LENGTHS = (1, 2, 4, 8, 16, 32)

MAX_RECORDS = 100_000
"""Bytes read per turn, from all over the file."""

SEEK_S = 0.008
"""Half a rotation at 7,200 rpm plus the move of the arm."""
BYTES_PER_SECOND = 150e6
READ_AHEAD_BYTES = 128 << 10
DISK_BYTES = 64 << 30
CACHE_BYTES = 4 << 30
_HEADERS = ["case", "run length", "median", "min", "max", "unit", "vs 1"]


def order_of(num_records: int, run_length: int, batch_size: int) -> NDArray[np.int64]:
    """Return the records of an epoch that are read, from its beginning."""
    window = local_window(batch_size, run_length) if run_length > 1 else 0
    order = Order(num_records, OrderSettings(7, shuffle=True, window=window, run_length=run_length))
    return order.indices(0, np.arange(min(num_records, MAX_RECORDS)))


def read_all(path: Path, nbytes: int, records: Sequence[int]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for record in records:
            os.pread(descriptor, nbytes, record * nbytes)
    finally:
        os.close(descriptor)


def map_all(path: Path, nbytes: int, records: Sequence[int]) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for record in records:
            mapped[record * nbytes : (record + 1) * nbytes]


def drop(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def disk_seconds(nbytes: int, records: Sequence[int]) -> float:
    """Return the seconds that a spinning disk needs for these records, one after the other."""
    capacity = CACHE_BYTES // READ_AHEAD_BYTES
    cache: OrderedDict[int, None] = OrderedDict()
    seconds, head = 0.0, -1
    for record in records:
        first, last = record * nbytes // READ_AHEAD_BYTES, ((record + 1) * nbytes - 1) // READ_AHEAD_BYTES
        for block in range(first, last + 1):
            if block in cache:
                cache.move_to_end(block)
                continue
            seconds += (SEEK_S if block != head + 1 else 0) + READ_AHEAD_BYTES / BYTES_PER_SECOND
            head = block
            cache[block] = None
            if len(cache) > capacity:
                cache.popitem(last=False)
    return seconds


def timed(read: Callable[[Path, int, Sequence[int]], None], path: Path, nbytes: int, records: Sequence[int]) -> float:
    start = time.perf_counter()
    read(path, nbytes, records)
    return time.perf_counter() - start


def measure(path: Path, nbytes: int, batch_size: int, rounds: int) -> list[Result]:
    """Return the results for one size of records, grouped by case."""
    num_records = path.stat().st_size // nbytes
    orders = {length: order_of(num_records, length, batch_size).tolist() for length in RUN_LENGTHS}
    names = ("warm pread", "cold pread", "cold memmap", "disk")  # the last of which is computed, once
    results = {
        (name, length): Result(f"{nbytes} B, {name}", str(length), "k records/s")
        for name in names
        for length in RUN_LENGTHS
    }
    for length in RUN_LENGTHS:
        records = order_of(DISK_BYTES // nbytes, length, batch_size).tolist()
        results["disk", length].samples.append(len(records) / disk_seconds(nbytes, records) / 1e3)
    for _ in range(rounds):
        for length, records in orders.items():
            drop(path)
            cold_s = timed(read_all, path, nbytes, records)
            drop(path)
            mapped_s = timed(map_all, path, nbytes, records)
            path.read_bytes()
            warm_s = timed(read_all, path, nbytes, records)
            for name, seconds in zip(names, (warm_s, cold_s, mapped_s), strict=False):
                results[name, length].samples.append(len(records) / seconds / 1e3)
    return list(results.values())


def read_ahead_of(path: Path) -> str:
    """Return the read-ahead in KiB of the device that holds a file, or "unknown" if /sys doesn't show it."""
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for place in (block / "queue/read_ahead_kb", block / "../queue/read_ahead_kb"):
        if place.exists():
            return place.read_text().strip()
    return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="folder for the file (default: here)")
    parser.add_argument("--mib", type=int, default=256, help="size of the file (default: 256)")
    parser.add_argument("--batch-size", type=int, default=64, help="sets the size of the windows (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each order (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    arguments = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine), flush=True)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder, "records")
        path.write_bytes(np.random.default_rng(0).bytes(arguments.mib << 20))
        print(f"{arguments.mib} MiB, read-ahead of the device {read_ahead_of(path)} KiB", flush=True)
        for nbytes in RECORD_BYTES:
            results += measure(path, nbytes, arguments.batch_size, arguments.rounds)
    base = {result.case: result.median for result in results if result.system == "1"}
    rows = [[*result.as_cells(), f"{format_number(result.median / base[result.case])}x"] for result in results]
    print(format_table(_HEADERS, rows))
    if arguments.json:
        options = {name: getattr(arguments, name) for name in ("mib", "batch_size", "rounds")}
        write_json(arguments.json, machine, options, results)


if __name__ == "__main__":
    main()
