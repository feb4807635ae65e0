"""Random draws differ from epoch to epoch, also in workers that stay."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

from swift_loader.dataloader.dataloader import DataLoader
from tests.support.helpers import exhaustive, set_environ


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
@pytest.mark.parametrize("persistent_workers", [exhaustive(False), True])
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


class OwnGenerator(Draws):
    """Has a generator of its own."""

    def __init__(self) -> None:
        self.generator = random.Random(1)

    def __getitem__(self, index: int) -> list[float]:
        return [self.generator.random()]


def test_a_generator_of_the_dataset_begins_anew_in_each_epoch_as_with_torch() -> None:
    found = []
    for loader_class in (TorchDataLoader, DataLoader):
        options: Any = {"num_workers": 2, "multiprocessing_context": "fork"}
        loader: Any = loader_class(OwnGenerator(), **options)
        found.append([[float(batch[0]) for batch in loader] for _ in range(2)])
    assert found[1] == found[0]


class Surroundings(Draws):
    def __getitem__(self, index: int) -> Any:
        return os.environ.get("SURROUNDINGS", ""), str(Path.cwd()), str(torch.get_default_dtype())


@pytest.mark.slow
def test_workers_notice_a_changed_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loader: DataLoader[Any] = DataLoader(Surroundings(), batch_size=4, num_workers=1, collate_fn=list)
    before = Path.cwd()
    list(loader)
    set_environ(monkeypatch, "SURROUNDINGS", "other")
    assert next(iter(loader))[0] == ("other", str(before), "torch.float32")
    monkeypatch.chdir(tmp_path)
    assert next(iter(loader))[0] == ("other", str(tmp_path), "torch.float32")
