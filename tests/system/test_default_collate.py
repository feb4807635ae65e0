"""Calls of torch's `default_collate` in the user's functions, in the workers of a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from swift_loader.dataloader.dataloader import DataLoader
from tests.support.helpers import exhaustive


class Box:
    """A type that torch doesn't collate."""

    def __init__(self, content: Any) -> None:
        self.content = content


def collate_boxes(batch: Sequence[Box], *, collate_fn_map: Any = None) -> Box:
    return Box(collate([box.content for box in batch], collate_fn_map=collate_fn_map))


def collate_larger_boxes(batch: Sequence[Box], *, collate_fn_map: Any = None) -> Box:
    return Box(collate([box.content for box in batch], collate_fn_map=collate_fn_map) + 1)


class Samples(torch.utils.data.Dataset[Any]):
    """Samples of all kinds of leaves, of which one leaf is large."""

    def __init__(self, *, has_boxes: bool = False) -> None:
        self.has_boxes = has_boxes

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        sample = {"x": torch.full((3, 40, 40), index), "y": (np.ones(2), index, 0.5)}
        return {**sample, "box": Box(torch.full((4,), index))} if self.has_boxes else sample


def num_shared_files() -> int:
    return sum("/dev/shm" in line or "/torch_" in line for line in Path("/proc/self/maps").read_text().splitlines())


def collate_and_look(samples: Sequence[Any]) -> tuple[Any, int, bool]:
    """Return a batch, and whether it is in shared memory of torch's."""
    before = num_shared_files()
    batch = default_collate(samples)  # type: ignore[arg-type]
    return batch, num_shared_files() - before, batch["x"].is_shared()


@pytest.fixture
def functions() -> Iterator[dict[Any, Any]]:
    """torch's map of collate functions, which is as before after the test."""
    before = dict(default_collate_fn_map)
    yield default_collate_fn_map
    default_collate_fn_map.clear()
    default_collate_fn_map.update(before)


def loader_of(dataset: Any, collate_fn: Any = None, context: str | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 4, num_workers=1, collate_fn=collate_fn, multiprocessing_context=context, **options)


@pytest.mark.parametrize("context", ["fork", exhaustive(None), exhaustive("spawn")])
def test_a_call_in_a_worker_makes_no_files_and_gives_what_torch_gives(context: str | None) -> None:
    dataset = Samples()
    found = list(loader_of(dataset, collate_and_look, context))
    expected = [default_collate([dataset[number] for number in range(first, first + 4)]) for first in range(0, 20, 4)]
    assert len(found) == len(expected)
    for (batch, num_files, is_shared), wanted in zip(found, expected, strict=True):
        assert (num_files, is_shared) == (0, False)
        torch.testing.assert_close(batch, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("collate_fn", [None, collate_and_look])
@pytest.mark.parametrize("context", ["fork", exhaustive(None), exhaustive("spawn")])
def test_a_registered_type_is_collated_in_a_worker(context: str | None, collate_fn: Any, functions: Any) -> None:
    functions[Box] = collate_boxes
    for given in loader_of(Samples(has_boxes=True), collate_fn, context):
        batch = given if collate_fn is None else given[0]
        assert type(batch["box"]) is Box
        assert torch.equal(batch["box"].content[:, 0], batch["y"][1])


def test_a_function_that_is_registered_between_two_epochs_counts(functions: Any) -> None:
    functions[Box] = collate_boxes
    loader = loader_of(Samples(has_boxes=True), context="fork")
    for added, function in enumerate((collate_boxes, collate_larger_boxes)):
        functions[Box] = function
        batch = next(iter(loader))
        assert torch.equal(batch["box"].content[:, 0], batch["y"][1] + added)


def test_the_trainers_own_map_stays_as_it_is(functions: Any) -> None:
    before = dict(functions)
    for num_workers in (0, 1):
        list(DataLoader(Samples(), num_workers=num_workers, multiprocessing_context="fork" if num_workers else None))
        assert functions == before
