"""Measures how much memory workers take: beside torch's DataLoader, and with the lists of a dataset in shared memory.

    python benchmarks/memory.py [--rounds 1] [--only PART ...] [--json FILE]

Each measurement runs in a fresh process. It iterates over a dataset once, and measures at the last batch: the
proportional set size (PSS) of the training process and of all its descendants, from /proc/*/smaps_rollup. Pages that
processes share are counted once. Each sample is read whole by a worker.

- arrays: the dataset holds 1 GiB, in 1,024 arrays.
- strings: the dataset holds a list of 2 million strings. Reading one changes its reference count.
- empty: the dataset holds nothing. It shows what the interpreters take.
- validation: two loaders with the arrays, one loop inside the other.

The last column says how much more four workers take than one, without what four take more with the empty dataset, in
percent of what one takes.

- paths: the dataset has 2 million samples, and as many paths of 60 characters in a list. A sample reads one.
- pairs: the same with tuples of a path and a number.

These two iterate twice, with 1, 2, 4 and 8 workers, and measure after that. The memory is what is more than in the same
run, with as many samples, over 1,000 paths. The last column says how many copies that is: a copy is what a `SharedList`
of 2 million takes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from common.report import Result, describe_machine, format_machine, format_table, write_json

_NBYTES = 1 << 30
_NUM_ARRAYS = 1024
_NUM_STRINGS = 2_000_000
_BATCH_SIZE = 16
_NUM_WORKERS = (1, 4)
_NUM_FEW = 1000
"""Paths in the run to compare with."""
_TIMEOUT_S = 600
_MIB = 1 << 20

PARTS = ("empty", "arrays", "strings", "validation")
SYSTEMS = ("swift_loader", "torch, fork", "torch, spawn")

LISTS = ("paths", "pairs")
"""Parts that compare these forms of a list. The second and the third are `SwiftLoader(shared=True)`."""
FORMS = ("SharedList", "shared instance", "shared class", "list", "torch, fork")


def main() -> None:
    if sys.argv[1:2] == ["probe"]:
        found = probe_list if sys.argv[2] in LISTS else probe
        print(json.dumps(found(*sys.argv[2:4], *map(int, sys.argv[4:]))))
        return
    arguments = parse_arguments()
    machine = describe_machine()
    print(format_machine(machine), flush=True)
    results = [one for part in arguments.only if part in PARTS for one in measure(part, arguments.rounds)]
    lists = [one for part in arguments.only if part in LISTS for one in measure_lists(part, arguments.rounds)]
    for table, measured in ((make_table, results), (make_lists_table, lists)):
        print(table(measured) if measured else "")
    results += lists
    if arguments.json:
        write_json(arguments.json, machine, {"rounds": arguments.rounds}, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each system (default: 1)")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS + LISTS, default=PARTS + LISTS, metavar="PART", help="some of the parts"
    )
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    return parser.parse_args()


def measure(part: str, rounds: int) -> list[Result]:
    """Return the results of a part: memory and processes of each system, for each number of workers."""
    results = []
    for system in SYSTEMS:
        for num_workers in _NUM_WORKERS:
            print(f"measuring {part} with {system} ...", file=sys.stderr, flush=True)
            case = f"{part}, {num_workers} worker{'s' * (num_workers > 1)}"
            memory, processes = Result(case, system, "MiB"), Result(case, system, "processes")
            for _ in range(rounds):
                found = run_probe(part, system, num_workers)
                memory.samples.append(found["mib"])
                processes.samples.append(found["processes"])
            results += [memory, processes]
    return results


def measure_lists(part: str, rounds: int) -> list[Result]:
    """Return the memory beyond that of few paths, and as many copies of the list."""
    results = []
    for form in FORMS:
        for num_workers in (1, 2, 4, 8):
            print(f"measuring {part} with {form} ...", file=sys.stderr, flush=True)
            case = f"{part}, {num_workers} worker{'s' * (num_workers > 1)}"
            memory, copies = Result(case, form, "MiB"), Result(case, form, "copies")
            for _ in range(rounds):
                many, few = (run_probe(part, form, num_workers, number) for number in (_NUM_STRINGS, _NUM_FEW))
                memory.samples.append(many["mib"] - few["mib"])
                copies.samples.append(memory.samples[-1] / many["copy"])
            results += [memory, copies]
    return results


def run_probe(part: str, system: str, num_workers: int, length: int = 0) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).resolve()),
        "probe",
        part,
        system,
        str(num_workers),
        str(length),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=_TIMEOUT_S, text=True)
    return json.loads(done.stdout)


# In the measuring process ---------------------------------------------------------------------------------------------


class Arrays:
    """So many arrays. A sample is the sum of one."""

    def __init__(self, nbytes: int) -> None:
        import numpy as np

        self._arrays = [np.full(nbytes // _NUM_ARRAYS, number % 256, np.uint8) for number in range(_NUM_ARRAYS)]

    def __len__(self) -> int:
        return _NUM_ARRAYS

    def __getitem__(self, index: int) -> int:
        return int(self._arrays[index].sum())


class Strings:
    """Strings, of which a sample reads a share."""

    def __init__(self, length: int) -> None:
        self._strings = [f"folder/{number}/image.jpg" for number in range(length)]

    def __len__(self) -> int:
        return _NUM_ARRAYS

    def __getitem__(self, index: int) -> int:
        return sum(map(len, self._strings[index::_NUM_ARRAYS]))


class Paths:
    """Always as many samples: each is the length of one of the list's paths."""

    def __init__(self, part: str, length: int, form: Any = list) -> None:
        paths = (
            f"/data/pictures/pets/n{number % 1000:08}/n{number % 1000:08}_{number:09}_image.jpeg"
            for number in range(length)
        )
        self.paths = form(paths if part == "paths" else ((path, number % 1000) for number, path in enumerate(paths)))

    def __len__(self) -> int:
        return _NUM_STRINGS

    def __getitem__(self, index: int) -> int:
        return len(self.paths[index % len(self.paths)])


def probe_list(part: str, form: str, num_workers: int, length: int) -> dict[str, float]:
    """Iterate twice. Return the memory after that, and what a copy of the list takes, in MiB."""
    from swift_loader import SharedList, SwiftLoader

    kwargs = {"part": part, "length": length, "form": SharedList if form == "SharedList" else list}
    if form == "torch, fork":
        from torch.utils.data import DataLoader

        options: Any = {"num_workers": num_workers, "persistent_workers": True, "multiprocessing_context": "fork"}
        loader: Any = DataLoader(Paths(**kwargs), batch_size=256, shuffle=True, **options)
    else:
        given: Any = {"dataset_class": Paths, "dataset_kwargs": kwargs}
        given = given if form == "shared class" else {"dataset": Paths(**kwargs)}
        shared = form.startswith("shared")
        loader = SwiftLoader(**given, batch_size=256, worker_per_consumer=num_workers, shared=shared, seed=1)
    for _ in range(2):
        for _ in loader:
            pass
    return {
        "mib": measure_here()["mib"],
        "copy": Paths(part, length, SharedList).paths.nbytes / _MIB,
    }


def probe(part: str, system: str, num_workers: int, _length: int) -> dict[str, float]:
    """Iterate, and return the memory in MiB and the number of processes at the last batch."""
    train, valid = make_loaders(part, system, num_workers)
    found: dict[str, float] = {}
    for step, _ in enumerate(train):
        if step == len(train) - 1:
            for inner, _ in enumerate(valid):
                if inner == len(valid) - 1:
                    found = measure_here()
            found = found or measure_here()
    return found


def make_loaders(part: str, system: str, num_workers: int) -> tuple[Any, Any]:
    """Return the loader, and the one for validation, which has nothing except in that part."""
    dataset: Any = Strings(_NUM_STRINGS) if part == "strings" else Arrays(0 if part == "empty" else _NBYTES)
    options: dict[str, Any] = {"batch_size": _BATCH_SIZE, "num_workers": num_workers}
    if system.startswith("torch"):
        from torch.utils.data import DataLoader

        options["multiprocessing_context"] = system.rpartition(" ")[2]
    else:
        from swift_loader import DataLoader

    train = DataLoader(dataset, shuffle=True, **options)
    return train, DataLoader(Arrays(_NBYTES // 8), **options) if part == "validation" else []


def measure_here() -> dict[str, float]:
    """Return the memory and the number of this process and its descendants."""
    itself = psutil.Process()
    processes = [itself, *itself.children(recursive=True)]
    return {"mib": sum(map(pss_of, processes)) / _MIB, "processes": len(processes)}


def pss_of(process: psutil.Process, field: str = "Pss") -> int:
    """Return the proportional set size of a process in bytes, or a part of it."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def make_table(results: Sequence[Result]) -> str:
    medians = {(result.case, result.system, result.unit): result.median for result in results}
    rows: list[list[str]] = []
    for result in results:
        if result.unit != "MiB":
            continue
        processes = medians[result.case, result.system, "processes"]
        rows.append([result.case, result.system, f"{result.median:,.0f}", f"{processes:.0f}", _growth(medians, result)])
    return format_table(["dataset", "system", "MiB", "processes", "growth"], rows)


def make_lists_table(results: Sequence[Result]) -> str:
    found = {(result.case, result.system, result.unit): result.median for result in results}
    rows = [
        [case, form, f"{median:,.0f}", f"{found[case, form, 'copies']:.2f}"]
        for (case, form, unit), median in found.items()
        if unit == "MiB"
    ]
    return format_table(["dataset", "form", "MiB", "copies"], rows)


def _growth(medians: dict[tuple[str, str, str], float], result: Result) -> str:
    part, _, workers = result.case.partition(", ")
    names = [f"{name}, 1 worker" for name in (part, "empty")]
    bases = [medians.get((name, result.system, "MiB")) for name in names]
    empty = medians.get((f"empty, {workers}", result.system, "MiB"))
    if workers == "1 worker" or bases[0] is None or bases[1] is None or empty is None:
        return "-"
    return f"{100 * (result.median - bases[0] - (empty - bases[1])) / bases[0]:+.1f} %"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
