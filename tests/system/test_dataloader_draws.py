"""The indices of an epoch are drawn when torch draws them, as far as a program can notice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Sampler, SubsetRandomSampler

from swift_loader.dataloader.dataloader import DataLoader
from tests.support import datasets
from tests.support.helpers import exhaustive, exhaustive_unless
from tests.support.like_torch.options import ORDERS

NUM_SAMPLES = 60
DATASET: Any = list(range(NUM_SAMPLES))

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning", "ignore:.*multi-threaded.*fork:DeprecationWarning"
)

ALWAYS = ("more", "drawing", "own batches")
TENSORS = {"tensors"}
"""They start a thread of torch's."""

ERRORS = {"bare", "letters", "lists", "outside", "unusable", "empty batches", "failing", "failing batches"}
"""They raise errors, for all batches or some. A sampler's error comes after the batches that were drawn before it."""


def seen(loader_class: Any, order: str, options: dict[str, Any], num_batches: int) -> list[Any]:
    """Return the batches of two epochs, and what the loop draws after each from generators that the sampler may use."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4)
    dataset = list(range(NUM_SAMPLES + 5))
    loader = loader_class(dataset, generator=generator, **ORDERS[order](NUM_SAMPLES, generator), **options)
    found: list[Any] = []
    for _ in range(2):
        iterator = iter(loader)
        found.append(drawn_by_loop(generator))
        for batch in islice(iterator, num_batches):
            found += [batch.tolist(), drawn_by_loop(generator)]
        del iterator
    return found


def drawn_by_loop(generator: torch.Generator) -> list[float]:
    """Draw from all generators."""
    from_torch = torch.rand((), dtype=torch.float64), torch.rand((), dtype=torch.float64, generator=generator)
    return [random.random(), float(np.random.random()), *map(float, from_torch)]


@pytest.mark.parametrize("order", exhaustive_unless(ALWAYS, sorted(set(ORDERS) - TENSORS - ERRORS)))
def test_a_loop_that_draws_from_the_samplers_generators_gets_torchs_numbers(order: str) -> None:
    for num_workers, prefetch_factor, num_batches in ((2, None, 99), (1, 3, 4)):
        options = {"num_workers": num_workers, "prefetch_factor": prefetch_factor, "multiprocessing_context": "fork"}
        expected = seen(TorchDataLoader, order, options, num_batches)
        assert seen(DataLoader, order, options, num_batches) == expected


def test_each_worker_fetches_what_torchs_does_in_the_same_order(tmp_path: Path) -> None:
    dataset: Any = datasets.Numbered(200, path=str(tmp_path / "fetches"))
    expected = list(TorchDataLoader[Any](dataset, 50, num_workers=2, multiprocessing_context="fork"))
    found = list(DataLoader[Any](dataset, 50, num_workers=2))
    assert [batch["call"].tolist() for batch in found] == [batch["call"].tolist() for batch in expected]
    assert sorted(map(int, (tmp_path / "fetches").read_text().split())) == sorted([*range(200), *range(200)])


class Noting(Sampler[int]):
    """Notes how many indices were drawn."""

    def __init__(self) -> None:
        self.num_drawn = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        for index in range(NUM_SAMPLES):
            self.num_drawn += 1
            yield index


@pytest.mark.parametrize("prefetch_factor", [None, exhaustive(1), exhaustive(4)])
def test_a_sampler_is_drawn_as_far_ahead_as_torch_draws_it(prefetch_factor: int | None) -> None:
    found = []
    for loader_class in (TorchDataLoader, DataLoader):
        sampler = Noting()
        options: Any = {"num_workers": 2, "prefetch_factor": prefetch_factor, "multiprocessing_context": "fork"}
        loader: Any = loader_class(DATASET, sampler=sampler, **options)
        iterator = iter(loader)
        found.append([sampler.num_drawn, *(sampler.num_drawn for _ in iterator)])
    assert found[1] == found[0]


class Dice:
    """Each sample is drawn from a generator that the worker's copy has for itself."""

    def __init__(self) -> None:
        self.generator = random.Random(5)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return info.id, self.generator.randrange(1000)


@pytest.mark.parametrize("num_workers", [2, exhaustive(3)])
def test_a_generator_of_the_dataset_gives_torchs_numbers(num_workers: int) -> None:
    found, dataset = [], cast("Any", Dice())
    for loader_class in (TorchDataLoader, DataLoader):
        options: Any = {"num_workers": num_workers, "batch_size": 4, "multiprocessing_context": "fork"}
        loader: Any = loader_class(dataset, **options)
        found.append([[part.tolist() for part in batch] for batch in loader])
    assert found[1] == found[0]


class OneList(Sampler[list[int]]):
    """Yields the same list each time."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(NUM_SAMPLES):
            batch.append(index)
            if len(batch) == 3:
                yield batch
                batch.clear()


def test_a_batch_sampler_may_yield_one_list_again_and_again() -> None:
    loader: Any = DataLoader(DATASET, batch_sampler=OneList(), num_workers=2)
    assert [batch.tolist() for batch in loader] == [[index, index + 1, index + 2] for index in range(0, NUM_SAMPLES, 3)]


@pytest.mark.parametrize("order", ["in order", "shuffle", "subset"])
def test_what_the_loop_changes_counts_from_the_next_batch_on_without_workers(order: str) -> None:
    found = []
    for loader_class in (TorchDataLoader, DataLoader):
        torch.manual_seed(1)
        sampler = SubsetRandomSampler(list(range(9))) if order == "subset" else None
        loader: Any = loader_class(DATASET, batch_size=2, shuffle=order == "shuffle", sampler=sampler)
        batches: list[Any] = []
        for batch in loader:
            batches.append(batch.tolist())
            loader.batch_sampler.batch_size = 1 + len(batches) % 3
            if sampler is not None:
                sampler.indices = [10 * len(batches) + index for index in range(9)]
        found.append(batches)
    assert found[1] == found[0]
