"""Train on rows of Parquet files, and resume in the middle of an epoch.

    python examples/stages_parquet.py
    python examples/stages_parquet.py --save place.json --stop-after 200
    python examples/stages_parquet.py --resume place.json

It writes 4 files of 8 row groups each into a temporary folder. The stages: shuffle the row groups, read some of them in
threads (pyarrow), take them apart into rows, shuffle the rows in a buffer of 5,000, collect batches. A linear model
learns from them by gradient descent, so its weights depend on the order of the rows. At the end, a resumed run compares
its weights with those of a run that wasn't stopped.

A resume reads the epoch's row groups up to the place again, because the buffer holds rows of many of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from rich.progress import Progress

from swift_loader.pipeline import Pipeline

NUM_FILES, GROUPS_PER_FILE, ROWS_PER_GROUP = 4, 8, 1000
NUM_ROWS = NUM_FILES * GROUPS_PER_FILE * ROWS_PER_GROUP
BUFFER_SIZE = 5000
BATCH_SIZE = 64
LEARNING_RATE = 0.05

RowGroup = tuple[Path, int]
Row = dict[str, float]
Batch = tuple[NDArray[np.float64], NDArray[np.float64]]


def write_files(folder: Path) -> None:
    """Write houses: their size, age and distance from the centre, and what they cost. Each file is another district."""
    draws = np.random.default_rng(0)
    for district in range(NUM_FILES):
        size, age, distance = draws.normal(size=(3, GROUPS_PER_FILE * ROWS_PER_GROUP))
        distance += district
        price = 3 * size - 0.5 * age - distance + draws.normal(0, 0.1, len(size))
        table = pa.table({"size": size, "age": age, "distance": distance, "price": price})
        pq.write_table(table, folder / f"district-{district}.parquet", row_group_size=ROWS_PER_GROUP)


def row_groups(folder: Path) -> list[RowGroup]:
    """Return the row groups of all files, each as (path, number)."""
    paths = sorted(folder.glob("*.parquet"))
    return [(path, number) for path in paths for number in range(pq.read_metadata(path).num_row_groups)]


def read(group: RowGroup) -> list[Row]:
    """Return the rows of a row group."""
    path, number = group
    with pq.ParquetFile(path) as file:
        rows: list[Row] = file.read_row_group(number, use_threads=False).to_pylist()
    return rows


def to_arrays(rows: list[Row]) -> Batch:
    """Return features, `(B, 4) float64` with a column of ones, and prices, `(B,) float64`."""
    features = np.array([(row["size"], row["age"], row["distance"], 1.0) for row in rows])
    return features, np.array([row["price"] for row in rows])


def make_pipeline(groups: list[RowGroup], threads: int) -> Pipeline[Batch]:
    """Return the stages from row groups to batches."""
    return (
        Pipeline(groups, seed=1)
        .shuffle(len(groups))
        .map(read, concurrency=threads)
        .unbatch()
        .shuffle(BUFFER_SIZE)
        .batch(BATCH_SIZE)
        .map(to_arrays)
        .prefetch(4)
    )


def train(
    pipeline: Pipeline[Batch], weights: NDArray[np.float64], num_before: int = 0, stop_after: int | None = None
) -> int:
    """Change the weights by a step of gradient descent for each batch. Return how many rows the batches had.

    Args:
        pipeline: Gives the batches.
        weights: Of the model, `(4,) float64`.
        num_before: How many rows of the epoch it has learned from.
        stop_after: How many batches. None: to the end of the epoch.
    """
    num_rows = 0
    with Progress() as progress:
        bar = progress.add_task("rows", total=NUM_ROWS, completed=num_before)
        for number, (features, prices) in enumerate(pipeline, 1):
            weights -= LEARNING_RATE * features.T @ (features @ weights - prices) / len(prices)
            num_rows += len(prices)
            progress.advance(bar, len(prices))
            if number == stop_after:
                break
    return num_rows


def main() -> None:
    """Write the files, and train on them."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--save", type=Path, metavar="FILE", help="save weights and place there at the end")
    parser.add_argument("--stop-after", type=int, metavar="N", help="stop after so many batches")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue a saved run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        run(arguments, row_groups(Path(folder)))


def run(arguments: argparse.Namespace, groups: list[RowGroup]) -> None:
    """Train for an epoch, or for what is left of it, and print the weights."""
    pipeline = make_pipeline(groups, arguments.threads)
    weights, num_before = np.zeros(4), 0
    if arguments.resume:
        saved: dict[str, Any] = json.loads(arguments.resume.read_text(encoding="utf-8"))
        pipeline.load_state_dict(saved["pipeline"])
        pipeline.set_epoch(saved["pipeline"]["epoch"])  # even if nothing is left of it
        weights, num_before = np.array(saved["weights"]), saved["num_rows"]
    num_rows = num_before + train(pipeline, weights, num_before, arguments.stop_after)
    state = pipeline.state_dict()
    if arguments.save:
        place = {"pipeline": state, "weights": weights.tolist(), "num_rows": num_rows % NUM_ROWS}
        arguments.save.write_text(json.dumps(place), encoding="utf-8")
    if arguments.resume and state["epoch"] == 1:  # the first epoch is over
        whole = np.zeros(4)
        train(make_pipeline(groups, arguments.threads), whole)
        if not np.array_equal(weights, whole):
            raise SystemExit(f"the resumed run has the weights {weights}; a run that wasn't stopped has {whole}")
    size, age, distance, rest = weights
    print(f"price = {size:.9f} size {age:+.9f} age {distance:+.9f} distance {rest:+.9f}")


if __name__ == "__main__":
    main()
