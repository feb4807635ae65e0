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


class Drawing:
    """An iterator of draws, whose state is that of the generator."""

    def __init__(self) -> None:
        self.num_left = 5

    def __iter__(self) -> Drawing:
        return self

    def __next__(self) -> int:
        if not self.num_left:
            raise StopIteration
        self.num_left -= 1
        return int(torch.randint(1000, ()))

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.num_left, "generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_left = state["left"]
        torch.set_rng_state(state["generator"])


class DrawingStream(IterableDataset[int]):
    def __iter__(self) -> Drawing:
        return Drawing()


def _persistent() -> DataLoader[Any]:
    return DataLoader(
        DrawingStream(),
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
        snapshot_every_n_steps=4,
        generator=torch.Generator().manual_seed(2),
    )


def test_generators_go_on_after_a_resume_between_epochs_as_without_it() -> None:
    loader = _persistent()
    list(loader)
    state = loader.state_dict()
    expected = [int(number) for number in loader]
    resumed = _persistent()
    resumed.load_state_dict(state)
    assert [int(number) for number in resumed] == expected
