"""What the programs with one changed import have in common: a dataset, a loss, and how they make their loader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

from swift_loader.dataloader.dataloader import DataLoader

BATCH_SIZE = 4
NUM_EPOCHS = 3
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
NUM_SAMPLES = 18 if NUM_RANKS == 1 else 37
NUM_STEPS = 5
"""Of an epoch, on each rank; the last one is partial."""

CLASSES: dict[str, Any] = {"torch": TorchDataLoader, "swift": DataLoader}

Seen = list[list[int]]
"""The numbers of the samples, batch by batch."""


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Sample i has the number i and an input made of it."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"number": torch.tensor(index), "x": torch.full((3,), float(index))}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The same samples one after the other. It can say where it is.

    An even number, since Accelerate repeats samples of the first batch that it sees, which is another one in a resumed
    run, to make the ranks' last batches equal.
    """

    def __init__(self, num_samples: int = NUM_SAMPLES // 2 * 2) -> None:
        self.samples = Numbers(num_samples)
        self.index = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.index < len(self.samples):
            self.index += 1
            yield self.samples[self.index - 1]
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


@dataclass(frozen=True, slots=True)
class Program:
    """How a program makes its loader."""

    name: str
    """Which class: a key of `CLASSES`."""
    num_workers: int = 0

    def loader(self, dataset: Any = None, **options: Any) -> Any:
        """Return a shuffled loader. The same order each time."""
        generator = torch.Generator().manual_seed(7)
        options = {"batch_size": BATCH_SIZE, "shuffle": True, "generator": generator} | options
        return CLASSES[self.name](dataset or Numbers(), num_workers=self.num_workers, **options)


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    predicted: torch.Tensor = model(batch["x"] / 100)
    return (predicted**2).mean()
