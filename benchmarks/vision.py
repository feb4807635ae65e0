"""Compares timm's `create_loader` with swift_loader's, on a folder of JPEG photos.

    python benchmarks/vision.py [--rounds 5] [--seconds 6] [--only CASE ...] [--json FILE]

Both get the same options: `ImageDataset`, 224 by 224 pixels, batches of 32, two workers, and the CPU as the device.
Everything else is the default. Each runs timm's transforms in its workers, and converts and normalises on the loop's
thread. The folder has 2,048 files of 6 photos, all in the page cache. Needs timm and torchvision, but no network.

The systems take turns in an order that changes from round to round. Each turn begins with batches that don't count,
because they may have been ready before. The table shows medians over the rounds with minimum and maximum: batches per
second, and the CPU time per batch of workers and loop together, which is more reliable on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Generator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from common.datasets import JpegPhotos
from common.report import Result, describe_machine, format_machine, format_number, format_table, write_json
from transport.cases import NUM_DISCARDED, NUM_WORKERS
from transport.systems import LoaderHandle

from swift_loader.vision import create_loader

NUM_FILES = 2048
BATCH_SIZE = 32
INPUT_SIZE = (3, 224, 224)
CASES: dict[str, dict[str, Any]] = {
    "evaluation": {},
    "training": {"is_training": True, "re_prob": 0.25, "re_mode": "pixel"},
    "augmented": {"is_training": True, "re_prob": 0.25, "re_mode": "pixel", "auto_augment": "rand-m9-mstd0.5"},
}
SYSTEMS = ("swift_loader", "timm")
UNITS = ("batches/s", "CPU ms")
_WARM_UP_S = 1.0
_HEADERS = ["case", "system", "median", "min", "max", "unit", "vs timm"]


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", "Failed to load image Python extension")  # torchvision's own decoder isn't used
    machine = {**describe_machine(), "timm": metadata.version("timm"), "torchvision": metadata.version("torchvision")}
    print(format_machine(machine) + f", timm {machine['timm']}")
    print(f"{NUM_WORKERS} workers, {arguments.rounds} rounds of {arguments.seconds:g} s\n", flush=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder))
        for name in arguments.only or CASES:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            results += measure_case(name, folder, arguments.rounds, arguments.seconds)
    print(make_table(results))
    if arguments.json:
        settings = {"num_workers": NUM_WORKERS, "rounds": arguments.rounds, "seconds": arguments.seconds}
        write_json(arguments.json, machine, settings, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each system (default: 5)")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a turn (default: 6)")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.seconds <= 0:
        parser.error(f"--rounds {arguments.rounds} --seconds {arguments.seconds:g}: both must be positive")
    return arguments


def write_photos(folder: Path) -> None:
    """Write the photos, 300 to 640 pixels per side, each under many names."""
    for number, photo in enumerate(JpegPhotos(0)._photos):  # noqa: SLF001 - the files of the case `jpeg`
        (folder / f"class{number}").mkdir()
        first = folder / f"class{number}" / f"{number}.jpg"
        first.write_bytes(photo)
    firsts = sorted(folder.glob("*/*.jpg"))
    for number in range(len(firsts), NUM_FILES):
        first = firsts[number % len(firsts)]
        os.link(first, first.with_name(f"{number}.jpg"))


class Costs:
    """Measures wall time and CPU time per batch. Continues where the last measurement ended."""

    def __init__(self, handle: LoaderHandle) -> None:
        others = set(psutil.Process().children(recursive=True))
        self._handle = handle
        self._batches = endless(handle.loader)
        next(self._batches)
        self._processes = [psutil.Process(), *set(psutil.Process().children(recursive=True)) - others]

    def measure(self, seconds: float) -> tuple[float, float]:
        """Return batches per second and CPU milliseconds per batch. Batches that were ready before don't count."""
        for _ in range(NUM_DISCARDED):
            next(self._batches)
        count, start, cpu_start = 0, time.perf_counter(), self._cpu_seconds()
        while time.perf_counter() - start < seconds:
            next(self._batches)
            count += 1
        return count / (time.perf_counter() - start), 1e3 * (self._cpu_seconds() - cpu_start) / count

    def close(self) -> None:
        """Stop the workers."""
        self._batches.close()
        self._handle.close()

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(process_times.user + process_times.system for process_times in times)


def endless(loader: Any) -> Generator[Any, None, None]:
    while True:
        yield from loader


def measure_case(name: str, folder: str, rounds: int, seconds: float) -> list[Result]:
    """Measure both systems in turn. Return two results for each."""
    systems: dict[str, Costs] = {}
    try:
        for system in SYSTEMS:
            systems[system] = Costs(make_handle(system, folder, CASES[name]))
            systems[system].measure(_WARM_UP_S)
        results = {system: [Result(name, system, unit) for unit in UNITS] for system in SYSTEMS}
        for number in range(rounds):
            shift = number % len(SYSTEMS)
            for system in SYSTEMS[shift:] + SYSTEMS[:shift]:
                for result, figure in zip(results[system], systems[system].measure(seconds), strict=True):
                    result.samples.append(figure)
    finally:
        for costs in systems.values():
            costs.close()
    return [results[system][column] for column in range(len(UNITS)) for system in SYSTEMS]


def make_handle(system: str, folder: str, options: dict[str, Any]) -> LoaderHandle:
    from timm.data import ImageDataset
    from timm.data import create_loader as create_loader_of_timm

    create: Any = create_loader if system == "swift_loader" else create_loader_of_timm
    device, dataset = torch.device("cpu"), ImageDataset(folder)
    loader = create(dataset, INPUT_SIZE, BATCH_SIZE, num_workers=NUM_WORKERS, device=device, **options)
    return LoaderHandle(loader, loader.close if system == "swift_loader" else lambda: None)


def make_table(results: Sequence[Result]) -> str:
    references = {(result.case, result.unit): result.median for result in results if result.system == "timm"}
    rows: list[list[str]] = []
    for result in results:
        if rows and rows[-1][0] != result.case:
            rows.append([])
        ratio = result.median / references[result.case, result.unit]
        rows.append([*result.as_cells(), f"{format_number(ratio)}x"])
    return format_table(_HEADERS, rows)


if __name__ == "__main__":
    main()
