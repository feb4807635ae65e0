from __future__ import annotations

import random
from typing import Any

import pytest

from swift_loader.batch.collate import default_collate
from swift_loader.worker.generators import preserved_generators
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import StartMethod, length_of
from tests.support import datasets
from tests.support.specs import spec_of


def drawn() -> float:
    return random.random()


def test_an_instance_is_given_as_it_is() -> None:
    instance = [1, 2]
    assert spec_of(dataset=instance).options.make_dataset() is instance


def test_a_factory_gets_its_arguments() -> None:
    assert spec_of(dataset_class=dict, dataset_kwargs={"a": 1}).options.make_dataset() == {"a": 1}
    assert spec_of(dataset_class=dict).options.make_dataset() == {}


@pytest.mark.parametrize(("rng", "is_same"), [(Rng.SAMPLE, True), (Rng.WORKER, True), (Rng.NONE, False)])
def test_a_factory_draws_the_same_each_time_unless_nothing_is_seeded(rng: Rng, is_same: bool) -> None:
    with preserved_generators():
        first, second = (spec_of(dataset_class=drawn, rng=rng.value).options.make_dataset() for _ in range(2))
    assert (first == second) is is_same


def test_the_modules_are_those_that_can_be_imported() -> None:
    def local(batch: Any) -> bytes:
        return bytes(batch)

    spec = spec_of(
        dataset_class=datasets.Counting, collate_fn=default_collate, batch_encoder=local, batch_decoder=local
    )
    assert spec.modules == ("tests.support.datasets", "swift_loader.batch.collate")
    assert spec_of(dataset=datasets.Counting()).modules == ("tests.support.datasets",)


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


@pytest.mark.parametrize("method", StartMethod)
def test_elsewhere_than_on_linux_only_the_portable_start_method_is_used(method: StartMethod) -> None:
    assert method.on("linux") is method
    assert {method.on(platform) for platform in ("darwin", "win32", "freebsd14")} == {StartMethod.PORTABLE}
