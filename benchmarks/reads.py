"""Measures `mapped`, which reads ahead of the transform, beside torch, Grain and SPDL: samples per second.

    python benchmarks/reads.py [--rounds 2] [--seconds 10] [--only CASE ...] [--systems NAME ...] [--json FILE]

Needs `pip install grain spdl datasets`. The rows of what isn't installed say so.

- constant-0, constant-2, constant-10: a read sleeps 20 ms, and a transform takes 0, 2 or 10 ms of CPU and holds the
  GIL. Batches of 32, two workers. exponential: the waits are exponential with a mean of 20 ms. tail: 1 % of them are
  2 s. A row waits equally long in all systems, which read the rows in one order. "2 x 32": two processes, each with 32
  reads at the same time. "any order": samples come as they are ready; in the other systems they keep their order. The
  ideal is the least of 64 reads / mean wait, and what two processes do that only transform.
- hf-plain, hf-numpy, hf-torch: 20,000 rows of a Hugging Face dataset on disk, in that format, shuffled, with a random
  augmentation. In torch, a dataset's `__getitems__` augments the rows, or `with_transform` does.
- hf-bytes: whether the bytes of an epoch are the same with 1, 2 and 4 workers.

Each measurement is a process of its own, and systems take turns. The first batches don't count: 3 s, and one of each
worker. CPU time is that of all processes, per sample.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import psutil
from common.report import Result, format_number, format_table, write_json
from common.turns import begin, endless, make_parser, measure_in_turns, parse

NUM_WORKERS, NUM_READS, BATCH_SIZE = 2, 32, 32
MEAN_S = 0.020
NUM_ROWS, NUM_HF_ROWS, NUM_HF_COMPARED = 200_000, 20_000, 2_048
WARM_UP_S = 3.0
LIMIT_S = 300.0
"""How long a measurement may take, with the start."""


# Reads that wait ------------------------------------------------------------------------------------------------------


class Reads:
    """Rows whose read waits. It is a data source of all systems."""

    def __init__(self, waits: str) -> None:
        draw = np.random.default_rng(0)
        self._waits_s = np.full(NUM_ROWS, MEAN_S) if waits == "constant" else draw.exponential(MEAN_S, NUM_ROWS)
        if waits == "tail":
            self._waits_s[draw.random(NUM_ROWS) < 0.01] = 2.0
        self.mean_s = float(self._waits_s.mean())

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._waits_s[index])
        return np.full(3_072, index % 256, np.uint8)


class Burn:
    """A transform that takes CPU time, and doesn't release the GIL meanwhile."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def __call__(self, row: Any) -> Any:
        """Return the row as it is."""
        sum(range(self.num_steps))
        return row

    def of_batch(self, rows: list[Any]) -> Any:
        """Return a batch of the rows."""
        return np.stack([self(row) for row in rows])

    def rate(self, seconds: float) -> tuple[float, float]:
        """Return the transforms per second of this process, and the CPU milliseconds of one."""
        began_s, cpu_s, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began_s < seconds:
            self(None)
            count += 1
        return count / (time.perf_counter() - began_s), 1e3 * (time.process_time() - cpu_s) / count


class Transformed:
    """What one writes without `mapped`: reading and transforming are one call."""

    def __init__(self, rows: Any, transform: Callable[[Any], Any]) -> None:
        self._rows, self._transform = rows, transform

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._transform(self._rows[index])


class TransformedBatches(Transformed):
    """The same for a dataset that reads several rows at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self._transform(row) for row in self._rows.__getitems__(indices)]


def torch_loader(dataset: Any, num_workers: int = NUM_WORKERS, **options: Any) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    return endless(DataLoader(dataset, BATCH_SIZE, num_workers=num_workers, persistent_workers=True, **options))


def drop_in(dataset: Any, **options: Any) -> Iterator[Any]:
    from swift_loader import DataLoader

    return endless(DataLoader(dataset, BATCH_SIZE, num_workers=NUM_WORKERS, persistent_workers=True, **options))


def swift(dataset: Any, num_workers: int = NUM_WORKERS, **options: Any) -> Iterator[Any]:
    from swift_loader import SwiftLoader

    options |= {"batch_size": BATCH_SIZE, "worker_per_consumer": num_workers, "seed": 1}
    with SwiftLoader(dataset=dataset, **options) as loader:
        yield from endless(loader)


def ours(reads: Any, transform: Callable[[Any], Any], num_reads: int | None = NUM_READS) -> Any:
    from swift_loader import mapped

    return mapped(reads, transform, reads=num_reads)


def grain(reads: Reads, burn: Burn, num_threads: int | None = None) -> Iterator[Any]:
    import grain as library

    class Operation(library.transforms.Map):  # type: ignore[misc, name-defined]
        def map(self, element: Any) -> Any:
            return burn(element)

    loader = library.DataLoader(
        data_source=reads,
        sampler=library.samplers.SequentialSampler(NUM_ROWS),
        operations=[Operation(), library.transforms.Batch(BATCH_SIZE)],
        worker_count=NUM_WORKERS,
        read_options=library.ReadOptions(num_threads=num_threads) if num_threads else None,
    )
    return endless(loader)


def spdl_pool(reads: Reads, burn: Burn, order: str = "completion") -> Iterator[Any]:
    """Read in threads of this process, and transform batches in a process pool."""
    from spdl.pipeline import PipelineBuilder

    num_reads = NUM_WORKERS * NUM_READS
    with ProcessPoolExecutor(NUM_WORKERS) as pool:
        builder = PipelineBuilder().add_source(range(NUM_ROWS))
        builder.pipe(reads.__getitem__, concurrency=num_reads, output_order=order).aggregate(BATCH_SIZE)
        builder.pipe(burn.of_batch, executor=pool, concurrency=NUM_WORKERS, output_order=order).add_sink(3)
        pipeline = builder.build(num_threads=num_reads + NUM_WORKERS)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()


def spdl_region(reads: Reads, burn: Burn) -> Iterator[Any]:
    """Read and transform in each of two processes."""
    from spdl.pipeline import PipelineBuilder
    from spdl.pipeline.defs import MAIN_PROCESS, ProcessPoolExecutorConfig

    builder = PipelineBuilder().add_source(range(NUM_ROWS))
    builder.to(ProcessPoolExecutorConfig(max_workers=NUM_WORKERS), buffer_size=BATCH_SIZE)
    builder.pipe(reads.__getitem__, concurrency=NUM_READS).aggregate(BATCH_SIZE).pipe(burn.of_batch)
    pipeline = builder.to(MAIN_PROCESS).add_sink(3).build(num_threads=NUM_READS + 2)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


# Hugging Face ---------------------------------------------------------------------------------------------------------


def save_rows(folder: str) -> None:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 50_000, (NUM_HF_ROWS, 128))
    features = draw.random((NUM_HF_ROWS, 256), np.float32)
    columns = {"tokens": tokens, "features": features, "label": np.arange(NUM_HF_ROWS)}
    Dataset.from_dict(columns).save_to_disk(folder)


def load_rows(folder: str, form: str) -> Any:
    from datasets import load_from_disk

    return load_from_disk(folder).with_format(None if form == "plain" else form)


def augment(row: dict[str, Any]) -> dict[str, Any]:
    """Mask tokens at random, and add noise to the features."""
    tokens, features = np.asarray(row["tokens"]).astype(int), np.asarray(row["features"]).astype(np.float32)
    tokens[np.random.random(len(tokens)) < 0.15] = 0
    features += np.random.normal(0, 0.1, len(features))
    return {"tokens": tokens, "features": features, "label": int(row["label"])}


def augment_columns(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    rows = [augment(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    return {name: [row[name] for row in rows] for name in columns}


def compare_bytes(folder: str) -> None:
    for form in HF_FORMS:
        digests = {}
        for num_workers in (1, 2, 4):
            rows = load_rows(folder, form).select(range(NUM_HF_COMPARED))
            batches = swift(ours(rows, augment, None), num_workers, shuffle=True)
            digest = hashlib.sha256()
            for _ in range(NUM_HF_COMPARED // BATCH_SIZE):
                for name, column in sorted(next(batches).items()):
                    digest.update(name.encode() + np.asarray(column).tobytes())
            batches.close()  # type: ignore[attr-defined]
            digests[num_workers] = digest.hexdigest()[:16]
        verdict = "the same bytes" if len(set(digests.values())) == 1 else "DIFFERENT BYTES"
        print(f"hf-{form}, {NUM_HF_COMPARED} rows: {verdict} with 1, 2 and 4 workers, {digests}\n", flush=True)


# Systems and turns ----------------------------------------------------------------------------------------------------

System = Callable[[Any, Any], Iterator[Any]]
"""Gets the reads and the transform, and returns batches without an end. Its name begins with a package's."""

WAITS, BURNS_MS, HF_FORMS = ("constant", "exponential", "tail"), (0, 2, 10), ("plain", "numpy", "torch")
MANY_WORKERS = f"torch, {NUM_WORKERS * NUM_READS} workers"

READING: dict[str, System] = {
    "torch": lambda reads, burn: torch_loader(Transformed(reads, burn)),
    MANY_WORKERS: lambda reads, burn: torch_loader(Transformed(reads, burn), NUM_WORKERS * NUM_READS),
    "grain, 2 x 16 (default)": grain,
    "grain, 2 x 32": lambda reads, burn: grain(reads, burn, NUM_READS),
    "spdl, 64 and a process pool, any order": spdl_pool,
    "spdl, 64 and a process pool": lambda reads, burn: spdl_pool(reads, burn, "input"),
    "spdl, 2 x 32, any order": spdl_region,
    "SwiftLoader, unmapped": lambda reads, burn: swift(Transformed(reads, burn), shuffle=False),
    "SwiftLoader, 2 x 32": lambda reads, burn: swift(ours(reads, burn), shuffle=False),
    "DataLoader, 2 x 32": lambda reads, burn: drop_in(ours(reads, burn)),
    "DataLoader, 2 x 32, prefetch 4": lambda reads, burn: drop_in(ours(reads, burn), prefetch_factor=4),
}
HUGGING_FACE: dict[str, System] = {
    "torch": lambda rows, transform: torch_loader(TransformedBatches(rows, transform), shuffle=True),
    "torch, mapped": lambda rows, transform: torch_loader(ours(rows, transform, None), shuffle=True),
    "SwiftLoader, unmapped": lambda rows, transform: swift(TransformedBatches(rows, transform), shuffle=True),
    "SwiftLoader": lambda rows, transform: swift(ours(rows, transform, None), shuffle=True),
    "DataLoader": lambda rows, transform: drop_in(ours(rows, transform, None), shuffle=True),
}
PLAIN: dict[str, System] = {
    "torch, with_transform": lambda rows, _: torch_loader(rows.with_transform(augment_columns), shuffle=True)
}
CASES: dict[str, dict[str, System]] = {f"{waits}-{burn_ms}": READING for waits in WAITS for burn_ms in BURNS_MS}
CASES |= {f"hf-{form}": HUGGING_FACE | (PLAIN if form == "plain" else {}) for form in HF_FORMS} | {"hf-bytes": {}}


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(*sys.argv[2:])))
        return
    parser = make_parser(__doc__, CASES, rounds=2, seconds=10.0)
    parser.add_argument("--systems", nargs="+", default=[""], metavar="NAME", help="those whose names begin so")
    arguments = parse(parser)
    begun = begin(arguments, num_workers=NUM_WORKERS, batch_size=BATCH_SIZE, warm_up_s=WARM_UP_S)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        cases = arguments.only or [*CASES]
        if any(case.startswith("hf-") for case in cases):
            save_rows(folder)
        for case in cases:
            if case == "hf-bytes":
                compare_bytes(folder)
                continue
            given = folder if case.startswith("hf-") else str(steps_of(int(case.split("-")[1])))
            chosen = [name for name in CASES[case] if name.startswith(tuple(arguments.systems))]
            if not chosen:
                continue
            chosen += [] if case.startswith("hf-") else ["ideal"]
            turns = {name: partial(run, case, name, given, str(arguments.seconds)) for name in chosen}
            found = measure_in_turns(case, ("samples/s", "CPU ms"), turns, arguments.rounds, is_warm=True)
            print(table(found) + "\n", flush=True)
            results += found
    if arguments.json:
        write_json(arguments.json, begun["machine"], begun["settings"], results)


def steps_of(burn_ms: int) -> int:
    """Return how many steps take so long, at best."""
    took_s = []
    for _ in range(50):
        began_s = time.perf_counter()
        Burn(100_000)(None)
        took_s.append(time.perf_counter() - began_s)
    return round(burn_ms / 1e3 / min(took_s) * 100_000)


def run(case: str, name: str, *given: str) -> tuple[float, float]:
    """Measure in another process. Return samples per second, and CPU milliseconds per sample."""
    if is_missing(name):
        return math.nan, math.nan
    command = [sys.executable, "-W", "ignore", __file__, "--one", case, name, *given]
    try:
        ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{case}, {name}: {error}\n{error.stderr}", file=sys.stderr, flush=True)
        return math.nan, math.nan
    rate, cpu_ms = json.loads(ended.stdout.splitlines()[-1])
    print(f"{case}, {name}: {rate:,.0f} samples/s, {cpu_ms:.2f} ms of CPU", file=sys.stderr, flush=True)
    return rate, cpu_ms


def is_missing(name: str) -> bool:
    package = name.partition(",")[0]
    return package in ("grain", "spdl") and not importlib.util.find_spec(package)


def measure(case: str, name: str, given: str, seconds: str) -> tuple[float, float]:
    """Return what `run` does. `given` is the folder of the rows, or the steps of the transform."""
    kind, detail = case.split("-")
    source, transform = (load_rows(given, detail), augment) if kind == "hf" else (Reads(kind), Burn(int(given)))
    if name == "ideal":
        return ideal(source, transform, float(seconds))
    batches = CASES[case][name](source, transform)
    num_together = NUM_WORKERS * (NUM_READS if name == MANY_WORKERS else 1)  # batches that come at one time
    take(batches, num_together, WARM_UP_S)
    cpu_s, began_s = cpu_of_all(), time.perf_counter()
    num_samples = BATCH_SIZE * take(batches, num_together, float(seconds))
    took_s, cpu_s = time.perf_counter() - began_s, cpu_of_all() - cpu_s
    batches.close()  # type: ignore[attr-defined]
    return num_samples / took_s, 1e3 * cpu_s / num_samples


def take(batches: Iterator[Any], num_together: int, seconds: float) -> int:
    """Take batches for so long. Return how many, which is a multiple of `num_together`."""
    for _ in range(num_together):
        next(batches)
    count, began_s = num_together, time.perf_counter()
    while time.perf_counter() - began_s < seconds or count % num_together:
        next(batches)
        count += 1
    return count


def ideal(reads: Reads, burn: Burn, seconds: float) -> tuple[float, float]:
    waiting = NUM_WORKERS * NUM_READS / reads.mean_s
    if not burn.num_steps:
        return waiting, 0.0
    with ProcessPoolExecutor(NUM_WORKERS) as pool:
        rates, cpus_ms = zip(*pool.map(burn.rate, [seconds] * NUM_WORKERS), strict=True)
    return min(waiting, sum(rates)), sum(cpus_ms) / len(cpus_ms)


def cpu_of_all() -> float:
    times = [process.cpu_times() for process in (psutil.Process(), *psutil.Process().children(recursive=True))]
    return sum(one.user + one.system for one in times)


def table(results: list[Result]) -> str:
    """Return the table of one case, with ratios to the ideal, or to torch if there is none."""
    rates, costs = results[: len(results) // 2], results[len(results) // 2 :]
    reference = rates[-1] if rates[-1].system == "ideal" else rates[0]
    rows = []
    for rate, cost in zip(rates, costs, strict=True):
        if math.isnan(rate.median):
            rows.append([rate.case, rate.system, "not installed" if is_missing(rate.system) else "failed", *[""] * 4])
        else:
            ratio = format_number(rate.median / reference.median)
            rows.append([*rate.as_cells()[:-1], format_number(cost.median), ratio])
    return format_table(["case", "system", "samples/s", "min", "max", "CPU ms", f"of {reference.system}"], rows)


if __name__ == "__main__":
    main()
