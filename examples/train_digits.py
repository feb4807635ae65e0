"""Train a small CNN on scikit-learn's handwritten digits, with batches from worker processes.

    pip install -r examples/requirements.txt .
    python examples/train_digits.py

Takes well under a minute on two cores, and uses a GPU if there is one. Draws loss and accuracy in digits.png. The last
line says whether data or the model was the limit. Ends with status 1 if the model has not learned.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from curves import Curves, check_plot, draw_curves
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from swift_loader import SwiftLoader

NUM_HELD_OUT = 360
"""A fifth of the 1,797 digits."""

IMAGE_SIZE = 8
MAX_SHIFT = 1
"""In pixels."""

PEAK_LEARNING_RATE = 1e-2
"""Reached after 30 % of the steps. The rate then falls to nearly 0, so the weights settle before the last epoch."""
LABEL_SMOOTHING = 0.1
"""Saves about one held-out error in three. With it, the loss can't fall below 0.50."""


class Digits:
    """The training part of the digits, shifted at random by up to a pixel, or the held-out part, as it is.

    Lives in the workers. They get this class by value and don't run the script; as it uses only NumPy and scikit-learn,
    they never import torch.
    """

    def __init__(self, *, train: bool) -> None:
        digits: Any = load_digits()
        pixels, labels = digits.data, digits.target
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
            # The loader seeds this generator before each sample. One made in __init__ would be the same in all workers.
            row, column = np.random.randint(0, 2 * MAX_SHIFT + 1, size=2)  # noqa: NPY002
        image = self._padded_images[index, :, row : row + IMAGE_SIZE, column : column + IMAGE_SIZE]
        return image, self._labels[index]


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
    """Return a CNN of 68,000 parameters: `(B, 1, 8, 8)` to the logits `(B, 10)`."""

    def layer(num_in: int, num_out: int) -> list[nn.Module]:
        return [nn.Conv2d(num_in, num_out, 3, padding=1), nn.BatchNorm2d(num_out), nn.ReLU()]

    body = [*layer(1, 32), *layer(32, 32), nn.MaxPool2d(2), *layer(32, 64), *layer(64, 64), nn.MaxPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * (IMAGE_SIZE // 4) ** 2, 10))


def train_epoch(model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, loader: SwiftLoader) -> float:
    """Train for one pass over the loader's batches, `(B, 1, 8, 8) float32` and `(B,) int64`; return the mean loss."""
    model.train()
    num_samples, total_loss = 0, 0.0
    for images, labels in loader:
        loss = functional.cross_entropy(model(images), labels, label_smoothing=LABEL_SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        num_samples += len(labels)
        total_loss += loss.item() * len(labels)
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


def parse_arguments() -> argparse.Namespace:
    """Return what the command line says; end with status 2 if it can't be done."""
    parser = argparse.ArgumentParser(description="Train a small CNN on scikit-learn's handwritten digits.")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training data, 1 or more")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2, help="processes that build training batches; 0 for none")
    # Layers this small only lose by more threads, above all where workers want the cores, too.
    parser.add_argument("--threads", type=int, default=1, help="that torch computes with")
    parser.add_argument("--seed", type=int, default=0, help="base of all randomness but the split")
    parser.add_argument("--required-accuracy", type=float, default=0.97, help="on the held-out digits, at the end")
    parser.add_argument("--plot", type=Path, default=Path("digits.png"), metavar="FILE.png", help="loss and accuracy")
    arguments = parser.parse_args()
    for name, least in (("epochs", 1), ("batch_size", 1), ("workers", 0), ("threads", 1)):
        value = getattr(arguments, name)
        if value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    try:
        check_plot(arguments.plot)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    return arguments


def train(arguments: argparse.Namespace) -> tuple[Curves, str]:
    """Train, evaluate after each epoch, and return the curves, and whether data or the model was the limit."""
    begin = perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    curves = Curves()
    with make_loader(arguments, train=True) as training, make_loader(arguments, train=False) as held_out:
        training.start(device=device)
        held_out.start(device=device)
        print(f"started in {perf_counter() - begin:.1f} s: {arguments.workers} workers, device {device}")
        schedule = OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=arguments.epochs * len(training))
        for epoch in range(1, arguments.epochs + 1):
            loss = train_epoch(model, optimizer, schedule, training)
            accuracy = measure_accuracy(model, held_out)
            print(f"epoch {epoch:2}: loss {loss:.4f}, held-out accuracy {accuracy:.2%}", flush=True)
            curves.losses.append(loss)
            curves.accuracies.append(accuracy)
        return curves, str(training.report().verdict)


def main() -> None:
    """Train, draw the curves, and say what the limit was."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    curves, verdict = train(arguments)
    accuracy = curves.accuracies[-1]
    title = f"A small CNN on handwritten digits, seed {arguments.seed}"
    draw_curves(arguments.plot, curves, title, arguments.required_accuracy)
    if accuracy < arguments.required_accuracy:
        sys.exit(f"held-out accuracy is {accuracy:.2%}, below the {arguments.required_accuracy:.2%} that are required")
    print(f"{accuracy:.2%} right, see {arguments.plot}; {verdict}")


if __name__ == "__main__":
    main()
