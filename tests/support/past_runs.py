"""A dataset that draws from everything, and loaders of a run that is rebuilt later."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from swift_loader import SwiftLoader, sample_rng

NUM_SAMPLES = 1000
BATCH_SIZE = 7
WORLD_SIZE = 2
FAULTY = 5
"""The dataset index of a sample with a NaN."""


class Augmented:
    """Samples that draw from `random`, NumPy, torch and `sample_rng`."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples
        self.offset = random.random()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = np.random.rand(3, 4, 4).astype(np.float32)
        if random.random() < 0.5:
            image = image[:, :, ::-1].copy()
        noise = torch.randn(5) + self.offset
        if index == FAULTY:
            noise[2] = torch.nan
        return {"image": image, "noise": noise, "extra": sample_rng().random(), "id": index}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Mix the images of a batch, as MixUp does."""
    share = np.random.beta(0.5, 0.5)
    images = torch.from_numpy(np.stack([sample["image"] for sample in samples]))
    return {
        "image": share * images + (1 - share) * images[torch.randperm(len(samples))],
        "noise": torch.stack([sample["noise"] for sample in samples]),
        "extra": np.array([sample["extra"] for sample in samples]),
        "id": [sample["id"] for sample in samples],
    }


def make_loader(num_workers: int = 0, **options: Any) -> SwiftLoader:
    """Return a loader of the run, with two ranks."""
    return SwiftLoader(
        Augmented,
        batch_size=BATCH_SIZE,
        nb_consumer=WORLD_SIZE,
        worker_per_consumer=num_workers,
        collate_fn=collate,
        seed=11,
        **options,
    )


def make_dataset() -> Augmented:
    return Augmented()


def make_small() -> Augmented:
    """Return a dataset of another length."""
    return Augmented(NUM_SAMPLES - 1)


def fail() -> Any:
    """Raise, as a dataset does whose files are gone."""
    raise RuntimeError("no\ndisk")
