from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from swift_loader.collate import default_collate

from swift_loader.worker.generators import preserved_generators
from swift_loader.worker.seeding import Rng
from swift_loader.worker.setup import DatasetSource, length_of
from tests import datasets
from tests.worker.test_build import SETUP


def drawn() -> float:
    return random.random()


def test_an_instance_is_given_as_it_is() -> None:
    instance = [1, 2]
    assert DatasetSource(instance).make(Rng.SAMPLE) is instance


def test_a_factory_gets_its_arguments() -> None:
    assert DatasetSource(factory=dict, kwargs={"a": 1}).make(Rng.SAMPLE) == {"a": 1}
    assert DatasetSource(factory=dict).make(Rng.SAMPLE) == {}


@pytest.mark.parametrize(("rng", "is_same"), [(Rng.SAMPLE, True), (Rng.WORKER, True), (Rng.NONE, False)])
def test_a_factory_draws_the_same_each_time_unless_nothing_is_seeded(rng: Rng, is_same: bool) -> None:
    with preserved_generators():
        first, second = (DatasetSource(factory=drawn).make(rng) for _ in range(2))
    assert (first == second) is is_same


def test_the_modules_are_those_that_can_be_imported() -> None:
    def local(batch: Any) -> bytes:
        return bytes(batch)

    source = DatasetSource(factory=datasets.Counting)
    setup = replace(SETUP, source=source, collate_fn=default_collate, batch_encoder=local)
    assert setup.modules == ("tests.datasets", "swift_loader.collate")
    assert replace(SETUP, source=DatasetSource(datasets.Counting())).modules == ("tests.datasets",)


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


class NoItems:
    def __len__(self) -> int:
        return 3


class BulkOnly(NoItems):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def test_the_length_is_the_datasets() -> None:
    assert length_of([1, 2, 3]) == 3
    assert length_of(BulkOnly()) == 3


@pytest.mark.parametrize(
    ("dataset", "text"),
    [(NoLength(), "a NoLength, has no length"), (NoItems(), "the dataset is a NoItems without __getitem__")],
)
def test_what_is_no_map_style_dataset_is_named(dataset: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        length_of(dataset)
