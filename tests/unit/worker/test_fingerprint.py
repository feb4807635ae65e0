from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.transport.by_value import Definitions
from swift_loader.worker import fingerprint
from swift_loader.worker.fingerprint import check_samples, chosen_indices
from tests.support import datasets


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_BUDGET_S", 5.0)


def look(dataset: Any) -> Any:
    return check_samples(dataset, chosen_indices(len(dataset)), Definitions())


@given(num_samples=st.integers(0, 2**62))
def test_the_samples_are_within_the_dataset_few_and_always_the_same(num_samples: int) -> None:
    chosen = chosen_indices(num_samples)
    assert all(0 <= index < num_samples for index in chosen)
    assert len(chosen) == len(set(chosen)) <= 6
    assert bool(chosen) == bool(num_samples)
    assert chosen == chosen_indices(num_samples)


def test_another_value_another_dtype_and_another_type_look_different() -> None:
    variants: list[Any] = [1, 2, 1.0, "1", np.int64(1), np.ones(3), np.ones(3, np.float32), np.ones((3, 1)), [1], (1,)]
    looks = [look(datasets.Values([value] * 5)).checksums for value in variants]
    assert len({str(one) for one in looks}) == len(variants)


@pytest.mark.parametrize("value", ["<object at {address}>", "/tmp/{name}/x", "worker-{pid}"])
def test_what_differs_between_processes_by_chance_does_not_count(value: str) -> None:
    class Tells(datasets.Counting):
        def __init__(self) -> None:
            super().__init__()
            name = "tmp" + "".join(random.Random().choices("abcdefgh0123_", k=8))
            address = hex(0x7F0000000000 + random.Random().getrandbits(32))
            self.text = value.format(address=address, name=name, pid=os.getpid())

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"id": index, "text": self.text}

    assert look(Tells()) == look(Tells())


@pytest.mark.parametrize("number", [3, 677, 70_000])
@pytest.mark.parametrize("make", [int, str, "image_{}.jpg".format])
def test_a_sample_that_holds_the_id_of_a_process_by_chance_is_not_compared(
    make: Callable[[int], Any], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = datasets.Values([make(number)] * 6 + [make(number + 1)])
    elsewhere = dict(look(dataset).checksums)
    monkeypatch.setattr(os, "getpid", lambda: number)
    here = dict(look(dataset).checksums)
    assert here == {index: checksum for index, checksum in elsewhere.items() if index == 6}
    assert here != elsewhere


def test_a_sample_that_changes_from_fetch_to_fetch_does_not_count() -> None:
    class Clock(datasets.Counting):
        def __getitem__(self, index: int) -> Any:
            return time.perf_counter_ns() if index == chosen_indices(100)[0] else index

    assert [index for index, _ in look(Clock()).checksums] == chosen_indices(100)[1:]
