"""Measures how well batches are mixed and how that affects a model: SwiftLoader's shuffles beside torch's.

    python benchmarks/mixing.py [--seeds 10] [--epochs 2] [--batch-size 32] [--json FILE]

The data are scikit-learn's 1,438 training digits, each shifted by up to two pixels in all 25 ways: 35,950 samples. They
are sorted by class, then by digit, so neighbours are nearly the same. Figures per system, over the seeds:

- variance: variance of the class counts in a batch, relative to drawing without replacement.
- successors: percentage of samples whose successor in the dataset is in the same batch.
- near: percentage of samples with another sample less than 16 positions away in the same batch.
- accuracy: accuracy of a small CNN on the 359 held-out digits, in percent. The seed sets both model and order.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from common.report import Result, describe_machine, format_machine, format_table, write_json
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn

from swift_loader import SwiftLoader

NUM_HELD_OUT = 359
SHIFTS = [(rows, columns) for rows in range(-2, 3) for columns in range(-2, 3)]
NEAR = 16

Batches = Iterable[tuple[Any, Any, Any]]


class ShiftedDigits:
    """Samples are `(image (1, 8, 8) float32, label, index)`."""

    def __init__(self) -> None:
        images, labels, _, _ = load()
        by_class = np.argsort(labels, kind="stable")
        self.images, self.labels = images[by_class], labels[by_class]

    def __len__(self) -> int:
        return len(self.labels) * len(SHIFTS)

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int, int]:
        digit, shift = divmod(index, len(SHIFTS))
        return np.roll(self.images[digit], SHIFTS[shift], axis=(1, 2)), int(self.labels[digit]), index


def load() -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Return images and labels for training, then the held-out ones."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(labels))
    held_out, training = order[:NUM_HELD_OUT], order[NUM_HELD_OUT:]
    return images[training], labels[training], images[held_out], labels[held_out]


def swift(nearby: Callable[[int], int | None]) -> Callable[[Any, int, int, int], Batches]:
    """Return a system whose `nearby_shuffle` depends on the batch size."""

    def epochs_of(dataset: Any, batch_size: int, seed: int, num_epochs: int) -> Batches:
        window = nearby(batch_size)
        with SwiftLoader(
            dataset=dataset, batch_size=batch_size, worker_per_consumer=0, seed=seed, nearby_shuffle=window, rng=None
        ) as loader:
            for _ in range(num_epochs):
                yield from ((torch.from_numpy(images), torch.from_numpy(labels), ids) for images, labels, ids in loader)

    return epochs_of


def torchs(dataset: Any, batch_size: int, seed: int, num_epochs: int) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    loader = torch.utils.data.DataLoader(dataset, batch_size, shuffle=True, generator=generator)
    for _ in range(num_epochs):
        yield from ((images, labels, ids.numpy()) for images, labels, ids in loader)


SYSTEMS: dict[str, Callable[[Any, int, int, int], Batches]] = {
    "torch": torchs,
    "nearby_shuffle=0": swift(lambda _: 0),
    "default": swift(lambda _: None),
    "nearby_shuffle=5 batches": swift(lambda batch_size: 5 * batch_size),
}


def mixing_of(batches: list[NDArray[np.int64]], labels: NDArray[np.int64]) -> tuple[float, float, float]:
    """Return variance, successors and near for batches of one size."""
    ordered = np.sort(np.stack(batches), axis=1)
    num_batches, batch_size = ordered.shape
    shares = np.bincount(labels) / len(labels)
    counts = np.stack([(labels[ordered] == label).sum(axis=1) for label in range(len(shares))], axis=1)
    expected = batch_size * shares * (1 - shares) * (len(labels) - batch_size) / (len(labels) - 1)
    variance = ((counts - batch_size * shares) ** 2).mean() / expected.mean()
    distances = np.diff(ordered, axis=1)
    nothing = np.zeros((num_batches, 1), bool)
    close = distances < NEAR
    near = np.hstack([close, nothing]) | np.hstack([nothing, close])
    return float(variance), 100 * float((distances == 1).sum() / ordered.size), 100 * float(near.mean())


def make_model() -> nn.Module:
    blocks = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    blocks += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128, 10))


def run(system: str, dataset: ShiftedDigits, seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one training."""
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    seen = []
    for images, labels, ids in SYSTEMS[system](dataset, arguments.batch_size, seed, arguments.epochs):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        seen.append(np.array(ids))
    _, _, images, labels = load()
    with torch.inference_mode():
        right = (model(torch.from_numpy(images)).argmax(dim=1).numpy() == labels).mean()
    whole = [ids for ids in seen if len(ids) == arguments.batch_size]
    variance, successors, near = mixing_of(whole, np.repeat(dataset.labels, len(SHIFTS)))
    return {"variance": variance, "successors": successors, "near": near, "accuracy": 100 * float(right)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="trainings of each system (default: 10)")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of each training (default: 2)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per batch (default: 32)")
    parser.add_argument("--json", metavar="FILE", help="write all samples there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe_machine()
    print(format_machine(machine), flush=True)
    dataset = ShiftedDigits()
    results: list[Result] = []
    for system in SYSTEMS:
        runs = [run(system, dataset, seed, arguments) for seed in range(arguments.seeds)]
        results += [Result(name, system, "", [figures[name] for figures in runs]) for name in runs[0]]
    rows = [
        [
            result.system,
            result.case,
            f"{statistics.mean(result.samples):.2f}",
            f"{statistics.stdev(result.samples) if len(result.samples) > 1 else 0:.2f}",
        ]
        for result in results
    ]
    print(format_table(["system", "figure", "mean", "deviation"], rows))
    if arguments.json:
        options = {name: getattr(arguments, name) for name in ("seeds", "epochs", "batch_size")}
        write_json(arguments.json, machine, options, results)


if __name__ == "__main__":
    main()
