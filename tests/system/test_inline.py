"""Without workers the loop's thread builds the batches: nothing is sent, so nothing has to be sendable."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.helpers import make_loader


@pytest.mark.filterwarnings("ignore:epoch 0:swift_loader.SwiftLoaderWarning")
def test_samples_and_errors_of_classes_that_cannot_be_imported_arrive_as_these() -> None:
    @dataclass
    class Sample:
        x: int

    class Failed(Exception):
        pass

    class Data:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise Failed("three")
            return {"sample": Sample(index), "class": Failed}

    with make_loader(Data, workers=0, batch_size=4, on_error="skip") as loader:
        for batch in loader:
            assert type(batch["sample"]) is Sample
            assert batch["class"][0] is Failed
        assert [type(failure.exception) for failure in loader.failures] == [Failed]


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
