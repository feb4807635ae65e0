"""Datasets for `create_loader` whose targets are the dataset indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

_SIDE = 40


class Numbered(Dataset[Any]):
    """Random pictures."""

    transform: Any = None

    def __init__(self, num_samples: int = 30) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        pixels = np.random.default_rng(index).integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)
        image = Image.fromarray(pixels)
        return (image if self.transform is None else self.transform(image)), index


class NumberedStream(IterableDataset[Any]):
    """The same pictures, shared out over the workers. The first one is another one in each epoch."""

    transform: Any = None

    def __init__(self, num_samples: int = 30) -> None:
        self.num_samples = num_samples
        self.epoch = 0
        self.num_workers = -1

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        info: Any = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        pictures = Numbered(self.num_samples)
        pictures.transform = self.transform
        for number in range(first, self.num_samples, step):
            yield pictures[(number + self.epoch) % self.num_samples]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def set_loader_cfg(self, num_workers: int) -> None:
        self.num_workers = num_workers
