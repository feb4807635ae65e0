"""Epochs differ: in their random draws, also in workers that stay, and in what new workers have of the program."""

from __future__ import annotations

import io
import os
import random
import sys
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

from swift_loader import DatasetMismatch, SwiftLoader, SwiftLoaderWarning
from swift_loader.dataloader.dataloader import DataLoader
from tests.support.helpers import exhaustive, set_environ, slow


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
def test_no_draw_comes_twice(dataset: Any, persistent_workers: bool, rng: Any) -> None:
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


class Epochs:
    """Gives its epoch."""

    def __init__(self) -> None:
        self.length, self.epoch = 12, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return self.epoch


@pytest.mark.parametrize("workers", [{"worker_per_consumer": 0}, {"worker_type": "thread"}, {}])
def test_a_change_of_the_dataset_that_workers_do_not_see_is_heard(workers: Any) -> None:
    dataset, before = Epochs(), 0
    with SwiftLoader(dataset=dataset, batch_size=2, data_queue_size=2, **workers) as loader:
        for epoch in (0, 7, 7):
            dataset.set_epoch(epoch)
            warns: Any = pytest.warns(SwiftLoaderWarning, match="set_epoch was called since the loader started, but")
            with nullcontext() if workers or epoch == before else warns:
                list(loader)
            before = epoch
        dataset.length += 1
        with pytest.raises(DatasetMismatch, match=r"has 13 samples now, but had 12 .* make a new loader, as"):
            next(iter(loader))


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


SETTING = "0"


class Changing(Dataset[str]):
    """Shows what it holds, and in a fork what is around it. All of it changes in place."""

    def __init__(self) -> None:
        self.looks_around = False
        self.generator = random.Random(1)
        self.draw = self.generator.random
        self.transform = [0].count
        self.recent, self.numbers = deque([0, 0], maxlen=2), {0}
        self.objects, self.bytes, self.integers = np.array([0], object), bytearray(1), array("i", [0])
        self.file, self.long, self.tensor = io.BytesIO(), dict.fromkeys(range(1000), 0), torch.zeros(2)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        around = (os.environ.get("SURROUNDINGS"), os.getcwd(), torch.is_grad_enabled(), SETTING)
        held = (self.recent, self.numbers, self.objects, self.bytes, self.integers, self.file.getvalue(), self.tensor)
        return repr((self.draw(), self.transform(0), held, self.long[777], around if self.looks_around else ()))

    def change(self, epoch: int) -> None:
        self.transform.__self__.append(0)  # type: ignore[attr-defined]
        self.recent.append(epoch)
        self.numbers.add(epoch)
        self.objects[0] = self.bytes[0] = self.integers[0] = self.long[777] = epoch
        self.file.write(b"x")
        self.tensor.numpy()[0] = self.tensor.data[1] = epoch


@pytest.mark.parametrize("context", ["fork", slow("forkserver"), slow("spawn")])
def test_new_workers_have_the_program_as_it_is(context: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[list[list[str]]] = []
    for loader_class, method in ((TorchDataLoader, "fork"), (DataLoader, context)):
        dataset = Changing()
        dataset.looks_around = context == "fork"
        loader: Any = loader_class(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
        found.append([])
        for epoch in range(3):
            set_environ(monkeypatch, "SURROUNDINGS", str(epoch))
            monkeypatch.chdir(tmp_path if epoch % 2 else tmp_path.parent)
            monkeypatch.setattr(sys.modules[__name__], "SETTING", str(epoch))
            with torch.set_grad_enabled(epoch == 1):
                found[-1].append(list(loader))
            dataset.change(epoch + 1)
    assert found[1] == found[0]
    assert len({str(epoch) for epoch in found[0]}) == 3
