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

import os
import sys
import tempfile
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common.datasets import JpegPhotos
from common.report import Result
from common.turns import WARM_UP_S, begin, end, make_parser, measure_in_turns, parse
from transport.cases import NUM_WORKERS
from transport.systems import Costs, LoaderHandle

from swift_loader.vision import create_loader

NUM_FILES = 2048
BATCH_SIZE = 32
INPUT_SIZE = (3, 224, 224)
CASES: dict[str, dict[str, Any]] = {
    "evaluation": {},
    "training": {"is_training": True, "re_prob": 0.25, "re_mode": "pixel"},
    "augmented": {"is_training": True, "re_prob": 0.25, "re_mode": "pixel", "auto_augment": "rand-m9-mstd0.5"},
}


def main() -> None:
    arguments = parse(make_parser(__doc__, CASES, rounds=5, seconds=6.0))
    warnings.filterwarnings("ignore", "Failed to load image Python extension")  # torchvision's own decoder isn't used
    begun = begin(arguments, num_workers=NUM_WORKERS)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder))
        for name in arguments.only or CASES:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            results += measure_case(name, folder, arguments.rounds, arguments.seconds)
    end(arguments, begun, results, "timm")


def measure_case(name: str, folder: str, rounds: int, seconds: float) -> list[Result]:
    """Start both systems, and measure them in turn."""
    turns = {}
    with ExitStack() as running:
        for system in ("swift_loader", "timm"):
            costs = Costs(make_handle(system, folder, CASES[name]))
            running.callback(costs.close)
            costs.measure(WARM_UP_S)
            turns[system] = partial(costs.measure, seconds)
        return measure_in_turns(name, ("batches/s", "CPU ms"), turns, rounds, is_warm=True)


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


def make_handle(system: str, folder: str, options: dict[str, Any]) -> LoaderHandle:
    from timm.data import ImageDataset
    from timm.data import create_loader as create_loader_of_timm

    create: Any = create_loader if system == "swift_loader" else create_loader_of_timm
    device, dataset = torch.device("cpu"), ImageDataset(folder)
    loader = create(dataset, INPUT_SIZE, BATCH_SIZE, num_workers=NUM_WORKERS, device=device, **options)
    return LoaderHandle(loader, loader.close if system == "swift_loader" else lambda: None)


if __name__ == "__main__":
    main()
