"""Shared by the framework examples: 1,797 real handwritten digits, a small model and the command line.

Nothing here depends on swift_loader. The dataset uses the global random generators, as most augmentations do.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

NUM_HELD_OUT = 359
"""A fifth of scikit-learn's digits. An odd number, so two ranks can't split them evenly."""


class Images:
    """Samples are `{"images": (1, H, W) float32, "labels": int}`. Training shifts them and changes the brightness."""

    def __init__(self, images: NDArray[Any], labels: NDArray[Any], *, train: bool) -> None:
        self.images, self.labels, self.train = images, labels, train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self.images[index].astype(np.float32)
        if self.train:
            shift = np.random.randint(-1, 2, size=2)  # noqa: NPY002 - the generator that most datasets use
            image = np.roll(image, shift, axis=(0, 1)) * np.float32(random.uniform(0.8, 1.2))  # noqa: S311
        return {"images": image[None], "labels": int(self.labels[index])}


class Digits(Images):
    """scikit-learn's digits, 8 by 8."""

    def __init__(self, *, train: bool) -> None:
        digits: Any = load_digits()
        pixels, labels = digits.data, digits.target
        order = np.random.default_rng(0).permutation(len(labels))
        chosen = order[NUM_HELD_OUT:] if train else order[:NUM_HELD_OUT]
        super().__init__(pixels[chosen].reshape(-1, 8, 8) / 16, labels[chosen], train=train)


class Mnist(Images):
    """MNIST, 28 by 28, from the files that torchvision saves in `folder`."""

    def __init__(self, folder: Path, *, train: bool) -> None:
        prefix = Path(folder, "MNIST", "raw", "train" if train else "t10k")
        images, labels = _read_idx(f"{prefix}-images-idx3-ubyte"), _read_idx(f"{prefix}-labels-idx1-ubyte")
        super().__init__(images / np.float32(255), labels, train=train)


def _read_idx(path: str) -> NDArray[np.uint8]:
    """Read a file of MNIST: two zero bytes, the type, the number of axes, the shape in big-endian int32, the data."""
    content = Path(path).read_bytes() if Path(path).exists() else gzip.decompress(Path(f"{path}.gz").read_bytes())
    num_axes = content[3]
    shape = np.frombuffer(content, ">i4", num_axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes).reshape(shape)


def make_model(image_size: int = 8) -> Any:
    """Return a small CNN with the same weights each time: `(B, 1, image_size, image_size)` to logits `(B, 10)`."""
    import torch  # not at the top: the workers import this module too, and don't need torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads slow down layers this small, and take cores from the workers
    blocks = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    blocks += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * (image_size // 4) ** 2, 10))


def count_right(model: Any, batch: Mapping[str, Any], num_padding: int) -> tuple[int, int]:
    """Return how many samples of a batch the model gets right and the number of samples, without the padding."""
    num_samples = len(batch["labels"]) - num_padding
    right = model(batch["images"]).argmax(dim=1) == batch["labels"]
    return int(right[:num_samples].sum()), num_samples


def result(model: Any, num_right: float, num_samples: float, *, samples: str = "digits") -> str:
    """Return the last line of an example's output; `samples` names them. Equal digests mean bit-identical weights."""
    digest = hashlib.sha256(b"".join(weights.numpy(force=True).tobytes() for weights in model.parameters()))
    accuracy = num_right / num_samples
    return f"test accuracy {accuracy:.2%} of {num_samples:.0f} {samples}, weights {digest.hexdigest()[:16]}"


def checkpoint_path(arguments: argparse.Namespace, num_steps: int, state: Mapping[str, int]) -> Path | None:
    """Return the checkpoint's path, named after the loader's state; None if this step isn't to be saved."""
    if arguments.save is None or num_steps % arguments.save_every:
        return None
    arguments.save.mkdir(parents=True, exist_ok=True)
    return Path(arguments.save, f"epoch-{state['epoch']}-sample-{state['position']}")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the examples' common command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per batch and rank")
    parser.add_argument("--workers", type=int, default=2, help="worker processes per rank")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="save checkpoints here (default: don't save)")
    parser.add_argument("--save-every", type=int, default=10, metavar="N", help="steps between checkpoints")
    parser.add_argument("--stop-after", type=int, metavar="N", help="stop after N steps, as if interrupted")
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="resume from this checkpoint")
    return parser
