from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler
from torch.utils.data import DataLoader as TorchDataLoader

from swift_loader.dataloader.conversion import converted
from swift_loader.dataloader.dataloader import DataLoader


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(7))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 2, "shuffle": True, "drop_last": True},
        {"batch_size": None},
        {"batch_sampler": BatchSampler(RandomSampler(range(7)), 3, drop_last=False)},
        {"dataset": Numbers(), "batch_size": 2, "drop_last": True},
        {"collate_fn": tuple, "generator": torch.Generator(), "timeout": 0},
    ],
    ids=lambda options: ", ".join(options) or "defaults",
)
def test_a_converted_loader_gives_the_same_batches(options: dict[str, Any]) -> None:
    options = {"dataset": range(7), **options}
    generator = options.get("generator", torch.default_generator)

    def batches_of(loader: Any) -> str:
        generator.manual_seed(3)
        return str(list(loader))

    found = converted(TorchDataLoader(**options))
    assert type(found) is DataLoader
    assert batches_of(found) == batches_of(TorchDataLoader(**options))


def test_options_that_torch_does_not_have_come_from_another_loader() -> None:
    like: Any = DataLoader(range(7), snapshot_every_n_steps=5)  # type: ignore[arg-type]
    loader: Any = TorchDataLoader(range(7))  # type: ignore[arg-type]
    assert converted(loader, like).snapshot_every_n_steps == 5
    assert converted(loader).snapshot_every_n_steps == 1


def test_workers_and_what_belongs_to_them_are_kept() -> None:
    loader: Any = TorchDataLoader(
        range(7),  # type: ignore[arg-type]
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    found = converted(loader)
    assert (found.num_workers, found.prefetch_factor, found.persistent_workers) == (2, 3, True)
    assert found.multiprocessing_context is loader.multiprocessing_context


def test_attributes_can_be_listed_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "accelerate.accelerator", raising=False)
    loader: Any = DataLoader(range(7))  # type: ignore[arg-type]

    assert dict(inspect.getmembers(loader))["_is_accelerate_prepared"] is False
