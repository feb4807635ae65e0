"""Measures `cached` with a folder of JPEG photos: beside no cache, beside samples in memory, and beside torch.

    python benchmarks/cache.py [--rounds 10] [--seconds 2] [--only PART ...] [--json FILE]

The folder has 2,000 files of 500 by 375 pixels (quality 90), all in the page cache. A sample is read, decoded with
Pillow and resized to 256 pixels on its shorter side: that part is cached. On each access, it is cropped to 224 by 224
at random, flipped and normalised to float32, by the same function everywhere. Batches of 32, two workers, shuffled.

- torch, DataLoader, SwiftLoader: batches per second and CPU time per batch from the second epoch on, in each of these
  loaders. "torch" is torch's DataLoader without a cache, with forked, persistent workers. "from memory": the dataset
  holds the decoded samples as a list of arrays. Systems start once, and take turns.
- first: an epoch that fills the cache, beside the same without one. Each turn has a new loader and a new cache. Wall
  time and CPU time of all processes, from the first batch to the last.
- budget: a cache for half of the data. Hit rates of the second and third epoch, and those that an LRU cache of the same
  size would have in the same order.
- ranks: four processes, each with a loader of its own over the whole dataset, which share a cache: in memory, by
  torch.distributed (gloo), or by a path. How often a sample is decoded, all in all, and how many copies of the decoded
  data there are: memory of all processes less that of the same run with 16 samples, which are used repeatedly. It is
  their private memory (PSS) and each file in memory that they have open, once.
- training: five epochs with a step that sleeps 20 ms, as a GPU leaves the CPU alone. Wall time, from making the loader
  to the last step. The report of the last run says where the time goes.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common.datasets import load_photos
from common.report import Result
from common.turns import WARM_UP_S, begin, end, make_parser, measure_in_turns, parse
from memory import pss_of
from numpy.typing import NDArray
from transport.cases import NUM_WORKERS
from transport.systems import Costs, LoaderHandle

from swift_loader import DataLoader, SwiftLoader, cached

NUM_FILES = 2_000
NUM_DISTINCT = 60
SHORT_SIDE, CROP = 256, 224
BATCH_SIZE = 32
NUM_BATCHES = -(-NUM_FILES // BATCH_SIZE)
NUM_RANKS = 4
NUM_EPOCHS, STEP_S = 5, 0.020
PAUSE_S = 1.5
"""Longer than two workers decode ten batches."""

LOADERS = ("torch", "DataLoader", "SwiftLoader")
SOURCES = ("uncached", "cached", "cached in a file", "from memory")

Sample = tuple[NDArray[Any], int]


class Photos:
    """The decoded photos of a folder, `(256, 341, 3) uint8`, with their indices. A file may count the decodes."""

    def __init__(self, folder: Path, length: int = NUM_FILES, counter: Path | None = None) -> None:
        self._paths = [f"{folder}/{index}.jpg" for index in range(length)]
        self._counter = counter

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Sample:
        from PIL import Image

        if self._counter:
            with self._counter.open("ab", buffering=0) as file:
                file.write(b".")
        image = Image.open(self._paths[index]).convert("RGB")
        scale = SHORT_SIDE / min(image.size)
        return np.asarray(image.resize((round(scale * image.width), round(scale * image.height)))), index


class Transformed:
    """Samples with a transform, from a dataset or a list."""

    def __init__(self, samples: Photos | Sequence[Sample], transform: Callable[[Sample], Sample]) -> None:
        self._samples, self._transform = samples, transform

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._transform(self._samples[index])


class Augment:
    """Random crop, random flip, normalised `(3, 224, 224) float32`."""

    def __init__(self) -> None:
        mean, deviation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        self._factor = np.float32(1 / (255 * np.array(deviation))).reshape(3, 1, 1)
        self._shift = np.float32(np.array(mean) / deviation).reshape(3, 1, 1)

    def __call__(self, sample: Sample) -> Sample:
        """Return an augmented sample."""
        image, index = sample
        top, left = (random.randint(0, side - CROP) for side in image.shape[:2])
        crop = image[top : top + CROP, left : left + CROP]
        if random.random() < 0.5:
            crop = crop[:, ::-1]
        pixels = np.multiply(crop.transpose(2, 0, 1), self._factor, order="C")
        pixels -= self._shift
        return pixels, index


class Bench:
    """A folder of photos, and what is made of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names = count()

    def new_path(self) -> Path:
        """Return a path that nobody uses."""
        return self.folder / f"cache-{next(self._names)}"

    @contextmanager
    def loader(self, kind: str, source: str) -> Iterator[LoaderHandle]:
        """Yield a new loader with a new cache."""
        photos, augment, path = Photos(self.folder), Augment(), self.new_path()
        dataset: Any
        if source == "uncached":
            dataset = Transformed(photos, augment)
        elif source == "from memory":
            dataset = Transformed([photos[index] for index in range(len(photos))], augment)
        else:
            dataset = cached(photos, augment, where=path if source == "cached in a file" else "memory")
        handle = make_handle(kind, dataset)
        del dataset
        try:
            yield handle
        finally:
            handle.close()
            path.unlink(missing_ok=True)


def main() -> None:
    parts: dict[str, Callable[[Bench, argparse.Namespace], list[Result]]] = {
        **{kind: partial(measure_rates, kind) for kind in LOADERS},
        "first": measure_first_epochs,
        "budget": measure_budget,
        "ranks": measure_ranks,
        "training": measure_training,
    }
    parser = make_parser(__doc__, parts, rounds=10, seconds=2.0)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    arguments = parse(parser)
    if arguments.rank:
        run_rank(*arguments.rank)
        return
    begun = begin(arguments, num_workers=NUM_WORKERS, num_files=NUM_FILES, batch_size=BATCH_SIZE)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder))
        for part in arguments.only or parts:
            print(f"measuring {part} ...", file=sys.stderr, flush=True)
            results += parts[part](Bench(Path(folder)), arguments)
    end(arguments, begun, results, "torch", "uncached", "from memory")


def write_photos(folder: Path) -> None:
    """Write random details of scikit-image's photos, each under many names."""
    from PIL import Image

    photos, generator = load_photos(), random.Random(0)
    for number in range(NUM_DISTINCT):
        photo = Image.fromarray(photos[number % len(photos)])
        width, height = (side * generator.uniform(0.7, 1.0) for side in photo.size)
        left, top = generator.uniform(0, photo.width - width), generator.uniform(0, photo.height - height)
        detail = photo.resize((500, 375), box=(left, top, left + width, top + height))
        detail.save(folder / f"{number}.jpg", quality=90)
    for number in range(NUM_DISTINCT, NUM_FILES):
        os.link(folder / f"{number % NUM_DISTINCT}.jpg", folder / f"{number}.jpg")


def make_handle(kind: str, dataset: Any) -> LoaderHandle:
    if kind == "SwiftLoader":
        loader = SwiftLoader(dataset=dataset, batch_size=BATCH_SIZE, worker_per_consumer=NUM_WORKERS, seed=1)
        return LoaderHandle(loader, loader.close)
    options: dict[str, Any] = {"num_workers": NUM_WORKERS, "persistent_workers": True}
    if kind == "DataLoader":
        return LoaderHandle(DataLoader(dataset, BATCH_SIZE, shuffle=True, **options), lambda: None)
    from torch.utils.data import DataLoader as TorchDataLoader

    options |= {"multiprocessing_context": "fork", "prefetch_factor": 4}
    return LoaderHandle(TorchDataLoader(dataset, BATCH_SIZE, shuffle=True, **options), lambda: None)


# The parts ------------------------------------------------------------------------------------------------------------


def measure_rates(kind: str, bench: Bench, arguments: argparse.Namespace) -> list[Result]:
    systems = {"torch": ("torch", "uncached")} | {source: (kind, source) for source in SOURCES}
    if kind == "torch":
        del systems["uncached"]
    turns = {}
    with ExitStack() as running:
        for name, system in systems.items():
            costs = Costs(running.enter_context(bench.loader(*system)))
            for _ in range(NUM_BATCHES):  # the first epoch
                next(costs._batches)  # noqa: SLF001
            costs.measure(WARM_UP_S)
            turns[name] = partial(measure_alone, costs, arguments.seconds)
        return measure_in_turns(kind, ("batches/s", "CPU ms"), turns, arguments.rounds, is_warm=True)


def measure_alone(costs: Costs, seconds: float) -> tuple[float, float]:
    """Measure, after the workers of the system before have filled their queue."""
    time.sleep(PAUSE_S)
    return costs.measure(seconds)


def measure_first_epochs(bench: Bench, arguments: argparse.Namespace) -> list[Result]:
    results = []
    for kind in LOADERS[1:]:
        turns = {source: partial(first_epoch, bench, kind, source) for source in SOURCES[:3]}
        results += measure_in_turns(f"{kind}, first epoch", ("s", "CPU s"), turns, arguments.rounds)
    return results


def first_epoch(bench: Bench, kind: str, source: str) -> tuple[float, float]:
    """Return wall time and CPU time of all processes from the first batch of a new loader to the last."""
    with bench.loader(kind, source) as handle:
        batches = iter(handle.loader)
        next(batches)
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        before_s, began_s = cpu_s(processes), time.perf_counter()
        for _ in batches:
            pass
        figures = time.perf_counter() - began_s, cpu_s(processes) - before_s
        del batches
    return figures


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def measure_budget(bench: Bench, arguments: argparse.Namespace) -> list[Result]:  # noqa: ARG001 - as the other parts
    photos = Photos(bench.folder, counter=bench.new_path())
    half_nbytes = photos[0][0].nbytes * NUM_FILES // 2
    handle = make_handle("DataLoader", cached(photos, Augment(), budget=half_nbytes))
    ours, lru = (Result("budget of half", system, "hit rate") for system in ("cached", "LRU, simulated"))
    recent: OrderedDict[int, None] = OrderedDict()
    for epoch in range(3):
        before, hits = num_decodes(photos), 0
        for _, indices in handle.loader:
            hits += visit(recent, indices.tolist(), NUM_FILES // 2)
        if epoch:
            ours.samples.append(1 - (num_decodes(photos) - before) / NUM_FILES)
            lru.samples.append(hits / NUM_FILES)
    handle.close()
    return [ours, lru]


def num_decodes(photos: Photos) -> int:
    return photos._counter.stat().st_size  # noqa: SLF001


def visit(recent: OrderedDict[int, None], indices: Iterable[int], capacity: int) -> int:
    """Read samples from an LRU cache of so many. Return the hits."""
    hits = 0
    for index in indices:
        hits += index in recent
        recent[index] = None
        recent.move_to_end(index)
        if len(recent) > capacity:
            recent.popitem(last=False)
    return hits


def measure_ranks(bench: Bench, arguments: argparse.Namespace) -> list[Result]:  # noqa: ARG001 - as the other parts
    results = []
    nbytes = NUM_FILES * Photos(bench.folder)[0][0].nbytes
    for where in ("memory", "path"):
        decodes, memory = zip(*(run_ranks(bench, where, length) for length in (NUM_FILES, 16)), strict=True)
        case = f"{NUM_RANKS} ranks, {where}"
        results.append(Result(case, "cached", "decodes per sample", [decodes[0] / NUM_FILES]))
        results.append(Result(case, "cached", "copies", [(memory[0] - memory[1]) / nbytes]))
    return results


def run_ranks(bench: Bench, where: str, length: int) -> tuple[int, int]:
    """Return how often samples were decoded in an epoch of all ranks, and the memory of all processes at its end."""
    path = bench.new_path()
    command = [sys.executable, __file__, "--rank", str(bench.folder), str(path), f"{where}-{length}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    ranks = [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(NUM_RANKS)]  # type: ignore[call-overload]
    try:
        for rank in ranks:
            if not rank.stdout.readline():
                raise RuntimeError("a rank has failed")
        processes = [psutil.Process(rank.pid) for rank in ranks]
        processes += [child for process in processes for child in process.children(recursive=True)]
        return path.with_suffix(".count").stat().st_size, memory_of(processes, path)
    finally:
        for rank in ranks:
            rank.communicate()


def memory_of(processes: list[psutil.Process], path: Path) -> int:
    """Return the private memory of processes, and what the cache and other files in memory take, in bytes."""
    files = {}
    for process in processes:
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            if os.readlink(entry).startswith(("/memfd:", str(path))):
                status = entry.stat()
                files[status.st_dev, status.st_ino] = 512 * status.st_blocks
    return sum(pss_of(process, "Pss_Anon") for process in processes) + sum(files.values())


def run_rank(folder: str, path: str, run: str, rank: str) -> None:
    import torch

    where, length = run.split("-")
    torch.manual_seed(int(rank))
    photos = Photos(Path(folder), int(length), Path(path).with_suffix(".count"))
    if where == "memory":
        torch.distributed.init_process_group("gloo", f"file://{path}", rank=int(rank), world_size=NUM_RANKS)
    kept = cached(photos, Augment(), where="memory" if where == "memory" else path)
    handle = make_handle("DataLoader", torch.utils.data.Subset(kept, [index % len(kept) for index in range(NUM_FILES)]))
    for _ in handle.loader:
        pass
    print("done", flush=True)
    sys.stdin.read()
    handle.close()


def measure_training(bench: Bench, arguments: argparse.Namespace) -> list[Result]:
    turns = {"torch": partial(train, bench, "torch", "uncached")}
    turns |= {f"{kind}, cached": partial(train, bench, kind, "cached") for kind in LOADERS[1:]}
    results = measure_in_turns("training", "s", turns, -(-arguments.rounds // 3), is_warm=True)
    return [*results, Result("training", "the steps alone", "s", [NUM_EPOCHS * NUM_BATCHES * STEP_S])]


def train(bench: Bench, kind: str, source: str) -> float:
    began_s = time.perf_counter()
    with bench.loader(kind, source) as handle:
        for _ in range(NUM_EPOCHS):
            for _ in handle.loader:
                time.sleep(STEP_S)
        took_s = time.perf_counter() - began_s
        if kind != "torch":
            print(f"{kind}, {source}, {took_s:.1f} s:\n{handle.loader.report()}\n", flush=True)
    return took_s


if __name__ == "__main__":
    main()
