"""Measures how much memory the loaders of one machine's ranks take, with one dataset for all and with one for each.

    python benchmarks/node_memory.py [--rounds 1] [--ranks 1 2 4] [--gib 1] [--json FILE]

Each rank is a process of its own, with the environment variables that torchrun sets, and has two workers. Its dataset
is an array of the given size, which `dataset_class` builds in the template. The ranks iterate over it once. Then the
proportional set size (PSS) of all processes is measured, from /proc/*/smaps_rollup, without the ranks themselves: what
the loaders have started. Pages that processes share are counted once.

- shared: `share_dataset="auto"`, the default.
- own: `share_dataset=False`. Each rank has a dataset of its own.
- empty, shared and own: the same with an empty dataset. It shows what the interpreters take.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
from common.report import Result, describe_machine, format_machine, format_table, write_json

_NUM_SAMPLES = 1024
_NUM_WORKERS = 2
_MIB = 1 << 20
_MARK = "SWIFT_LOADER_BENCHMARKS_NODE"


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        be_rank(int(sys.argv[2]), json.loads(sys.argv[3]))
        return
    arguments = parse_arguments()
    machine = describe_machine()
    print(format_machine(machine), flush=True)
    results = []
    for nbytes, prefix in ((0, "empty, "), (arguments.gib << 30, "")):
        for is_shared, name in ((True, "shared"), (False, "own")):
            for num_ranks in arguments.ranks:
                case = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
                results += measure(case, prefix + name, num_ranks, nbytes, is_shared, arguments.rounds)
    print(make_table(results))
    if arguments.json:
        write_json(arguments.json, machine, {"rounds": arguments.rounds, "gib": arguments.gib}, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each case (default: 1)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks (default: 1 2 4)")
    parser.add_argument("--gib", type=int, default=1, help="size of the dataset in GiB (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    return parser.parse_args()


def measure(case: str, system: str, num_ranks: int, nbytes: int, is_shared: bool, rounds: int) -> list[Result]:
    """Return the results of one case: memory, processes, and seconds until all ranks have started."""
    print(f"measuring {case}, {system} ...", file=sys.stderr, flush=True)
    results = [Result(case, system, unit) for unit in ("MiB", "processes", "s")]
    for _ in range(rounds):
        for result, value in zip(results, run_ranks(num_ranks, nbytes, is_shared), strict=True):
            result.samples.append(value)
    return results


def run_ranks(num_ranks: int, nbytes: int, is_shared: bool) -> tuple[float, float, float]:
    """Return MiB and number of the processes that the ranks start, and the seconds until all have started."""
    mark = uuid.uuid4().hex
    began_s = time.monotonic()
    ranks = [start_rank(rank, num_ranks, mark, nbytes, is_shared) for rank in range(num_ranks)]
    try:
        started_s = [float(read_line(rank)) for rank in ranks]
        for rank in ranks:
            read_line(rank)
        own = {rank.pid for rank in ranks}
        found = [process for process in marked(mark) if process.pid not in own]
        mib = sum(map(pss_of, found)) / _MIB
    finally:
        for rank in ranks:
            rank.communicate()
    return mib, float(len(found)), max(started_s) - began_s


def start_rank(rank: int, num_ranks: int, mark: str, nbytes: int, is_shared: bool) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks)),
        "MASTER_PORT": "29500",
        _MARK: mark,
    }
    command = [sys.executable, str(Path(__file__).resolve()), "rank", str(nbytes), json.dumps(is_shared)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True)


def read_line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    line = rank.stdout.readline()
    if not line:
        sys.exit(f"a rank has ended with {rank.wait()}")
    return line


def marked(mark: str) -> list[psutil.Process]:
    """Return all processes that have the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if f"{_MARK}={mark}\0" in Path(f"/proc/{process.pid}/environ").read_text():
                found.append(process)
        except OSError:
            continue
    return found


def pss_of(process: psutil.Process) -> int:
    """Return the proportional set size of a process in bytes."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def make_table(results: list[Result]) -> str:
    medians: dict[tuple[str, str], dict[str, float]] = {}
    for result in results:
        medians.setdefault((result.case, result.system), {})[result.unit] = result.median
    rows = [
        [case, system, f"{found['MiB']:,.0f}", f"{found['processes']:.0f}", f"{found['s']:.1f}"]
        for (case, system), found in medians.items()
    ]
    return format_table(["ranks", "dataset", "MiB", "processes", "start in s"], rows)


# In a rank ------------------------------------------------------------------------------------------------------------


class Array:
    """An array of so many bytes, of which a sample reads a part."""

    def __init__(self, nbytes: int) -> None:
        import numpy as np

        self._array: Any = np.ones((_NUM_SAMPLES, nbytes // _NUM_SAMPLES), np.uint8)

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return int(self._array[index].sum())


def be_rank(nbytes: int, is_shared: bool) -> None:
    """Iterate once, and keep the workers until stdin ends. Say when they have started, and when the epoch is over."""
    from swift_loader import SwiftLoader

    options: dict[str, Any] = {} if is_shared else {"share_dataset": False}
    with SwiftLoader(
        Array, {"nbytes": nbytes}, batch_size=16, worker_per_consumer=_NUM_WORKERS, seed=1, **options
    ) as loader:
        loader.start()
        print(time.monotonic(), flush=True)
        for _ in loader:
            pass
        print("done", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
