"""Compares two ranks that need the same data: sharing batches, and each for itself. And one rank alone.

    python benchmarks/group.py [--rounds 3] [--batches 400] [--only CASE ...] [--json FILE]

Each rank is a process with a `SwiftLoader` with two workers where it loads itself. "shared" is
`start(rank=0, world_size=1)` in both: one rank has the workers, and broadcasts. "independent" adds
`share_batches=False`. The loop copies each batch into a buffer of its own, as a copy to a device reads it, and does
nothing else. "no copy" leaves that out.

The table shows medians over the rounds. CPU time is user and system time of all ranks and their workers, between the
same two batches. Batches per second are those of the slowest rank. Both ranks' bytes are compared by checksums, in a
round that isn't measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common.datasets import Images, JpegPhotos
from common.report import Result, describe_machine, format_machine, format_number, format_table, write_json
from numpy.typing import NDArray

from swift_loader import SwiftLoader

NUM_WORKERS = 2
NUM_WARM = 60
NUM_CHECKED = 40
SYSTEMS = {"one rank": (1, True), "shared": (2, True), "independent": (2, False)}
_HEADERS = ["case", "system", "batches/s", "CPU ms/batch", "vs one rank", "same bytes"]
_LIMIT_S = 600.0


class FloatRows:
    """Rows of 4,096 floats, each made by a little arithmetic: 64 of them are 1 MiB."""

    def __init__(self, length: int, num_steps: int = 1) -> None:
        self._rows = np.random.default_rng(0).random((64, 4096), dtype=np.float32)
        self._length, self._num_steps = length, num_steps

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        row = self._rows[index % len(self._rows)]
        for _ in range(self._num_steps):
            row = row * np.float32(0.5) + np.float32(index % 7)
        return row


CASES: dict[str, tuple[Any, dict[str, Any], int, bool]] = {
    "floats": (FloatRows, {"length": 1 << 20}, 64, True),
    "floats, no copy": (FloatRows, {"length": 1 << 20}, 64, False),
    "augmented floats": (FloatRows, {"length": 1 << 20, "num_steps": 20}, 64, True),
    "images": (Images, {"length": 1 << 20}, 64, True),
    "jpeg": (JpegPhotos, {"length": 1 << 20}, 16, True),
}


def main() -> None:
    arguments = parse_arguments()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    machine = describe_machine()
    print(format_machine(machine))
    print(f"{NUM_WORKERS} workers, {arguments.rounds} rounds of {arguments.batches} batches\n", flush=True)
    results: list[Result] = []
    for case in CASES:
        if not arguments.only or case in arguments.only:
            print(f"measuring {case} ...", file=sys.stderr, flush=True)
            results += measure_case(case, arguments)
    print(make_table(results))
    if arguments.json:
        write_json(arguments.json, machine, {"rounds": arguments.rounds, "batches": arguments.batches}, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system (default: 3)")
    parser.add_argument("--batches", type=int, default=400, help="batches of a turn (default: 400)")
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="CASE")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--system", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_case(case: str, arguments: argparse.Namespace) -> list[Result]:
    samples: dict[tuple[str, str], list[float]] = {}
    for number in range(arguments.rounds):
        names = list(SYSTEMS)
        for system in names[number % len(names) :] + names[: number % len(names)]:
            for unit, value in measure(case, system, arguments.batches).items():
                samples.setdefault((system, unit), []).append(value)
    return [Result(case, system, unit, values) for (system, unit), values in samples.items()]


def measure(case: str, system: str, num_batches: int) -> dict[str, float]:
    """Run the ranks of a system; return what they measured together."""
    num_ranks, _ = SYSTEMS[system]
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--case", case, "--system", system, "--store", str(Path(folder) / "store")]
        command = [sys.executable, __file__, *fixed, "--batches", str(num_batches), "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(num_ranks)]
        reports = [json.loads(rank.communicate(timeout=_LIMIT_S)[0]) for rank in ranks]
    return {
        "batches/s": min(report["batches_per_s"] for report in reports),
        "CPU ms": 1e3 * sum(report["cpu_s"] for report in reports) / num_batches,
        "same bytes": float(len({report["checksum"] for report in reports}) == 1),
    }


def run_rank(arguments: argparse.Namespace) -> None:
    import torch.distributed as dist

    num_ranks, shares = SYSTEMS[arguments.system]
    store = f"file://{arguments.store}"
    dist.init_process_group("gloo", store, timedelta(seconds=60), world_size=num_ranks, rank=arguments.rank)
    make, kwargs, batch_size, copies = CASES[arguments.case]
    with SwiftLoader(make, kwargs, batch_size, worker_per_consumer=NUM_WORKERS, seed=0) as loader:
        loader.start(rank=0, world_size=1, share_batches=shares)
        batches = iter(loader)
        buffer = np.empty_like(next(batches))
        checksum = hashlib.blake2b()
        for number in range(NUM_CHECKED + NUM_WARM):
            batch = next(batches)
            if number < NUM_CHECKED:
                checksum.update(batch.tobytes())
            buffer[:] = batch
        del batch
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        dist.barrier()
        before_s, began_s = cpu_s(processes), time.perf_counter()
        for _ in range(arguments.batches):
            batch = next(batches)
            if copies:
                buffer[:] = batch
        took_s = time.perf_counter() - began_s
        dist.barrier()
        used_s = cpu_s(processes) - before_s
        dist.barrier()
    report = {"cpu_s": used_s, "batches_per_s": arguments.batches / took_s, "checksum": checksum.hexdigest()}
    print(json.dumps(report), flush=True)
    dist.destroy_process_group()


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def make_table(results: list[Result]) -> str:
    medians = {(result.case, result.system, result.unit): result.median for result in results}
    rows = []
    for case in CASES:
        for system in SYSTEMS:
            if (case, system, "CPU ms") in medians:
                cpu_ms = medians[case, system, "CPU ms"]
                ratio = cpu_ms / medians[case, "one rank", "CPU ms"]
                is_same = "yes" if medians[case, system, "same bytes"] == 1 else "NO"
                speed = format_number(medians[case, system, "batches/s"])
                rows.append([case, system, speed, f"{cpu_ms:.3g}", f"{ratio:.2f}", is_same])
    return format_table(_HEADERS, rows)


if __name__ == "__main__":
    main()
