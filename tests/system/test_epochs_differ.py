"""Random draws differ from epoch to epoch, also in workers that stay."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from swift_loader.dataloader.dataloader import DataLoader


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), torch.rand(()).item()]


class Draws(Dataset[list[float]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[float]:
        return draw()


class DrawsStream(IterableDataset[list[float]]):
    def __iter__(self) -> Iterator[list[float]]:
        for _ in range(4):
            yield draw()


@pytest.mark.parametrize("rng", ["sample", None])
@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("dataset", [Draws(), DrawsStream()])
def test_no_draw_comes_twice(dataset: Any, persistent_workers: bool, rng: str | None) -> None:
    loader: DataLoader[Any] = DataLoader(
        dataset,
        collate_fn=list,
        num_workers=2,
        persistent_workers=persistent_workers,
        multiprocessing_context="fork",
        rng=rng,
    )
    drawn = [number for _ in range(3) for batch in loader for sample in batch for number in sample]
    assert len(set(drawn)) == len(drawn)
