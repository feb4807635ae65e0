"""Train a small CNN on scikit-learn's handwritten digits, with batches from worker processes.

    pip install -e '.[examples]'
    python examples/train_digits.py

Takes well under a minute on two cores, and uses a GPU if there is one. Ends with status 1 if the model has not learned.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from swift_loader import SwiftLoader

NUM_HELD_OUT = 360
"""A fifth of the 1,797 digits."""

IMAGE_SIZE = 8
MAX_SHIFT = 1
"""In pixels."""
LEARNING_RATE = 3e-3


class Digits:
    """The training part of the digits, shifted at random by up to a pixel, or the held-out part, as it is.

    Lives in the workers. They get this class by value and don't run the script; as it uses only NumPy and scikit-learn,
    they never import torch.
    """

    def __init__(self, *, train: bool) -> None:
        pixels, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))  # the same split, whatever --seed says
        chosen = order[NUM_HELD_OUT:] if train else order[:NUM_HELD_OUT]
        images = pixels[chosen].reshape(-1, 1, IMAGE_SIZE, IMAGE_SIZE).astype(np.float32) / 16  # now 0 to 1
        margin = (MAX_SHIFT, MAX_SHIFT)
        self._padded_images = np.pad(images, ((0, 0), (0, 0), margin, margin))
        self._labels = labels[chosen].tolist()
        self._train = train

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int]:
        row = column = MAX_SHIFT
        if self._train:
            # The loader seeds this generator before each batch. One made in __init__ would be the same in all workers.
            row, column = np.random.randint(0, 2 * MAX_SHIFT + 1, size=2)  # noqa: NPY002
        image = self._padded_images[index, :, row : row + IMAGE_SIZE, column : column + IMAGE_SIZE]
        return image, self._labels[index]


@dataclass(slots=True)
class Times:
    """Where the time of the training epochs went; evaluation isn't counted."""

    num_samples: int = 0
    training_s: float = 0.0
    """All of it, waiting included."""
    waiting_s: float = 0.0
    """Spent in `next`, before a batch was there."""


def make_loader(arguments: argparse.Namespace, *, train: bool) -> SwiftLoader:
    """Return a loader, not started yet, of one part of the digits; one worker is plenty for the held-out part."""
    return SwiftLoader(
        Digits,
        {"train": train},
        batch_size=arguments.batch_size,
        worker_per_consumer=arguments.workers if train else min(1, arguments.workers),
        shuffle=train,
        seed=arguments.seed,
    )


def make_model() -> nn.Module:
    """Return a CNN of 22,000 parameters: `(B, 1, 8, 8)` to the logits `(B, 10)`."""

    def block(num_in: int, num_out: int) -> list[nn.Module]:
        return [nn.Conv2d(num_in, num_out, 3, padding=1), nn.BatchNorm2d(num_out), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * (IMAGE_SIZE // 4) ** 2, 10)]
    return nn.Sequential(*block(1, 32), *block(32, 64), *head)


def timed(batches: Iterable[tuple[Tensor, Tensor]], times: Times) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches, `(B, 1, 8, 8) float32` and `(B,) int64`; add to `times` how long each was waited for."""
    iterator = iter(batches)
    while True:
        start = perf_counter()
        batch = next(iterator, None)
        times.waiting_s += perf_counter() - start
        if batch is None:
            return
        yield batch


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: SwiftLoader,
    progress: Progress,
    task: TaskID,
    times: Times,
) -> float:
    """Train for one pass over the loader; return the mean loss of its samples."""
    model.train()
    start = perf_counter()
    num_samples, total_loss = 0, 0.0
    for images, labels in timed(loader, times):
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        num_samples += len(labels)
        total_loss += loss.item() * len(labels)
        progress.update(task, advance=1, loss=total_loss / num_samples)
    times.training_s += perf_counter() - start
    times.num_samples += num_samples
    return total_loss / num_samples


@torch.inference_mode()
def measure_accuracy(model: nn.Module, loader: SwiftLoader) -> float:
    """Return the fraction of the loader's samples that the model gets right."""
    model.eval()
    num_right = num_samples = 0
    for images, labels in loader:
        num_right += int((model(images).argmax(dim=1) == labels).sum())
        num_samples += len(labels)
    return num_right / num_samples


def make_progress() -> Progress:
    """Return a bar that counts batches and shows the field `loss`."""
    loss = TextColumn("loss {task.fields[loss]:.4f}")
    return Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(), loss, TimeElapsedColumn())


def parse_arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description="Train a small CNN on scikit-learn's handwritten digits.")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training data, 1 or more")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2, help="processes that build training batches; 0 for none")
    parser.add_argument("--seed", type=int, default=0, help="base of all randomness but the split")
    parser.add_argument("--required-accuracy", type=float, default=0.97, help="on the held-out digits, at the end")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"--epochs is {arguments.epochs}; it must be at least 1")
    return arguments


def main() -> None:
    """Train, evaluate after each epoch, and say where the time went."""
    arguments = parse_arguments()
    begin = perf_counter()
    torch.set_num_threads(1)  # layers this small only lose by more, above all where workers want the cores, too
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    times, accuracy = Times(), 0.0
    with (
        make_loader(arguments, train=True) as training,
        make_loader(arguments, train=False) as held_out,
        make_progress() as progress,
    ):
        training.start(0, device)
        held_out.start(0, device)
        print_line = progress.console.print
        print_line(f"started in {perf_counter() - begin:.1f} s: {arguments.workers} workers, device {device}")
        task = progress.add_task("training", total=arguments.epochs * len(training), loss=float("nan"))
        for epoch in range(1, arguments.epochs + 1):
            loss = train_epoch(model, optimizer, training, progress, task, times)
            accuracy = measure_accuracy(model, held_out)
            print_line(f"epoch {epoch:2}: loss {loss:.4f}, held-out accuracy {accuracy:.2%}")

    print(f"total time: {perf_counter() - begin:.1f} s, of which training {times.training_s:.1f} s")
    print(f"speed: {times.num_samples / times.training_s:,.0f} samples/s")
    print(f"waited for data: {times.waiting_s:.2f} s, {times.waiting_s / times.training_s:.1%} of the training time")
    if accuracy < arguments.required_accuracy:
        sys.exit(f"held-out accuracy is {accuracy:.2%}, below the {arguments.required_accuracy:.2%} that are required")


if __name__ == "__main__":
    main()
