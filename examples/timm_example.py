"""Train on a folder of images with timm's datasets and transforms, and resume a stopped run.

    pip install timm torchvision  # with a CPU build of torch, see docs/images.md
    python examples/timm_example.py
    python examples/timm_example.py --save /tmp/digits-timm --stop-after 25
    python examples/timm_example.py --resume /tmp/digits-timm/epoch-0-sample-640
    python examples/timm_example.py --root /data/imagenette2-320

With `--root`, the images are the photos in that folder: the model sees them in grey, 16 by 16 pixels. Without it, they
are scikit-learn's handwritten digits, written to a temporary folder. Uses a GPU if there is one.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from digits import Digits, checkpoint_path, count_right, make_model, make_parser, result
from PIL import Image
from timm.data.dataset import ImageDataset
from torch import nn
from torch.nn.functional import cross_entropy

from swift_loader.vision import PrefetchLoader, create_loader

IMAGE_SIZE = 16
NUM_CLASSES = 10
"""Of the digits, and of imagenette."""


def write_digits(folder: Path) -> None:
    """Write the digits as `train/CLASS/NUMBER.png` and `val/CLASS/NUMBER.png`, 8 by 8 pixels of grey."""
    for part in ("train", "val"):
        digits = Digits(train=part == "train")
        for label in range(NUM_CLASSES):
            (folder / part / str(label)).mkdir(parents=True)
        for number, (image, label) in enumerate(zip(digits.images, digits.labels, strict=True)):
            pixels = (image * 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / part / str(label) / f"{number}.png")


def make_loader(arguments: Namespace, folder: Path, part: str) -> Any:
    """Return a loader of one part of the folder; starts nothing."""
    dataset = ImageDataset(folder / part, input_img_mode="L")
    return create_loader(
        dataset,
        (1, IMAGE_SIZE, IMAGE_SIZE),
        arguments.batch_size,
        is_training=part == "train",
        scale=(0.7, 1.0),
        hflip=0.0,
        re_prob=0.25,
        re_mode="pixel",
        crop_pct=1.0,
        mean=(0.5,),
        std=(0.5,),
        num_workers=arguments.workers,
        seed=0,
    )


def train(arguments: Namespace, model: nn.Module, parts: dict[str, Any], num_steps: int) -> bool:
    """Train up to the last epoch; return False if that was to be broken off before. Some steps are done already."""
    loader, optimizer = parts["loader"], parts["optimizer"]
    for epoch in range(loader.state_dict()["epoch"], arguments.epochs):
        loader.set_epoch(epoch)  # in the epoch of a checkpoint, this keeps the position
        for images, targets in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), targets).backward()
            optimizer.step()
            num_steps += 1
            position = (num_steps - epoch * len(loader)) * arguments.batch_size
            path = checkpoint_path(arguments, num_steps, {"epoch": epoch, "position": position})
            if path:
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save({"num_steps": num_steps, **states}, path)
            if num_steps == arguments.stop_after:
                return False
    return True


@torch.inference_mode()
def evaluate(model: nn.Module, loader: PrefetchLoader) -> list[int]:
    """Return how many of the images the model gets right, and of how many."""
    counts = [count_right(model, {"images": images, "labels": targets}, 0) for images, targets in loader]
    return [sum(column) for column in zip(*counts, strict=True)]


def main() -> None:
    """Train, and evaluate on the part `val`."""
    parser = make_parser(__doc__)
    parser.add_argument("--root", type=Path, metavar="FOLDER", help="with train/CLASS/ and val/CLASS/, of ten classes")
    arguments = parser.parse_args()
    with TemporaryDirectory() if arguments.root is None else nullcontext(arguments.root) as folder:
        if arguments.root is None:
            write_digits(Path(folder))
        with (
            make_loader(arguments, Path(folder), "train") as training,
            make_loader(arguments, Path(folder), "val") as held_out,
        ):
            model = make_model(IMAGE_SIZE).to(training.device)
            optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
            parts, num_steps = {"model": model, "optimizer": optimizer, "loader": training}, 0
            if arguments.resume:
                saved = torch.load(arguments.resume, map_location=training.device, weights_only=True)
                for name, part in parts.items():
                    part.load_state_dict(saved[name])
                num_steps = saved["num_steps"]
            if train(arguments, model, parts, num_steps):
                samples = "digits" if arguments.root is None else "photos"
                print(result(model, *evaluate(model, held_out), samples=samples))


if __name__ == "__main__":
    main()
