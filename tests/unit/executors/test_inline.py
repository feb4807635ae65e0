from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers import make_loader


def local_classes() -> tuple[type, type]:
    @dataclass
    class Sample:
        x: int

    class Failed(Exception):
        pass

    return Sample, Failed


def test_samples_of_classes_that_cannot_be_imported_arrive_as_these() -> None:
    sample_class, other_class = local_classes()

    class Data:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return {"sample": sample_class(index), "class": other_class}

    with make_loader(Data, workers=0, batch_size=4) as loader:
        for batch in loader:
            assert type(batch["sample"]) is sample_class
            assert batch["class"] == [other_class] * 4


@pytest.mark.filterwarnings("ignore:epoch 0:swift_loader.SwiftLoaderWarning")
def test_an_exception_that_cannot_be_imported_arrives_as_itself_in_the_list_of_failures() -> None:
    _, failed_class = local_classes()

    class Data:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise failed_class("three")
            return index

    with make_loader(Data, workers=0, batch_size=4, on_error="skip") as loader:
        for _ in loader:
            continue
        assert [type(failure.exception) for failure in loader.failures] == [failed_class]


def test_what_is_made_anew_for_each_sample_is_not_kept() -> None:
    made: list[weakref.ref[Callable[[], int]]] = []

    class Data:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Callable[[], int]:
            function = lambda: index  # noqa: E731
            made.append(weakref.ref(function))
            return function

    with make_loader(Data, workers=0, batch_size=4, shuffle=False, validate=False) as loader:
        for number, batch in enumerate(loader):
            assert batch[0]() == 4 * number
            gc.collect()
            assert sum(ref() is not None for ref in made) <= 12
