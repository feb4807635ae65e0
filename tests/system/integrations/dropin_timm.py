"""Makes loaders as timm's train.py does: timm's, on the drop-in class, and of `vision`. Takes a folder of images."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import timm.data
import torch

from swift_loader.dataloader.dataloader import DataLoader
from swift_loader.integrations.timm import create_loader
from swift_loader.vision import create_loader as create_vision_loader
from tests.system.integrations.ranks import run_rank

CPU = torch.device("cpu")

CASES: dict[str, dict[str, Any]] = {
    "training": {"is_training": True, "re_prob": 0.5},
    "without prefetcher": {"is_training": True, "use_prefetcher": False},
    "repeated": {"is_training": True, "distributed": True, "num_aug_repeats": 3},
    "scheduled sizes": {"is_training": True, "input_size_choices": [32, 24], "batch_size_choices": [4, 6]},
    "evaluation": {},
}


def batches_of(make: Any, photos: str, num_workers: int, options: dict[str, Any]) -> tuple[list[Any], bool]:
    """Return shapes and targets of two epochs, and sums of the images, and whether the loader is of our class."""
    torch.manual_seed(5)
    random.seed(5)
    dataset = timm.data.create_dataset("", root=photos)
    loader = make(dataset, input_size=(3, 32, 32), batch_size=4, num_workers=num_workers, device=CPU, **options)
    found = []
    for epoch in range(2):
        for sampler in (loader.sampler, loader.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        found += [[list(images.shape), targets.tolist(), float(images.double().sum())] for images, targets in loader]
    return found, isinstance(getattr(loader, "loader", loader), DataLoader)


def study(folder: Path) -> dict[str, Any]:
    """Return by case what both give."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
    num_workers, photos = int(sys.argv[3]), sys.argv[4]
    return {
        name: {
            "timm": batches_of(timm.data.create_loader, photos, num_workers, options)[0],
            "swift": batches_of(create_loader, photos, num_workers, options),
            "vision": batches_of(create_vision_loader, photos, num_workers, options)[0],
        }
        for name, options in CASES.items()
        if not num_workers or name == "repeated"
    }


if __name__ == "__main__":
    run_rank(study)
