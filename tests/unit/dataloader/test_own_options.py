from __future__ import annotations

from typing import Any

import pytest

from swift_loader import SwiftLoader
from swift_loader.dataloader.dataloader import DataLoader
from swift_loader.dataloader.own_options import OwnOptions
from swift_loader.dataloader.workers import Marks, WorkerStart
from swift_loader.options import WorkerType
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import StartMethod


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(range(7), **options)  # type: ignore[arg-type]


def start_of(given: DataLoader[Any]) -> WorkerStart:
    return WorkerStart.of(given, Marks.of(given), rng=Rng.NONE, snapshot_every=1)


WRONG: list[dict[str, Any]] = [
    {"worker_type": "fiber"},
    {"worker_type": None},
    {"start_method": "forkserver"},
    {"worker_restarts": -1},
    {"worker_restarts": "3"},
    {"worker_restarts": None},
    {"stall_warning": -0.5},
    {"stall_warning": "soon"},
]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", WRONG, ids=str)
def test_a_wrong_value_gets_the_error_of_the_native_loader(options: dict[str, Any], num_workers: int) -> None:
    with pytest.raises((TypeError, ValueError)) as expected:
        SwiftLoader(dataset=range(7), **options)
    with pytest.raises(expected.type) as caught:
        loader(num_workers=num_workers, **options)
    assert str(caught.value) == str(expected.value)


def test_the_options_reach_the_workers() -> None:
    own = {"start_method": "spawn", "worker_restarts": 5, "stall_warning": 2}
    start = start_of(loader(num_workers=2, **own))
    assert start.worker_options.start_method is StartMethod.SPAWN
    assert (start.delivery.max_restarts, start.delivery.stall_warning_s) == (5, 2.0)
    assert start.delivery.worker_type is WorkerType.PROCESS


def test_without_them_workers_are_as_the_native_loaders_are() -> None:
    found, native = start_of(loader(num_workers=2)).delivery, SwiftLoader(dataset=range(7))._options.delivery
    names = ("worker_type", "max_restarts", "stall_warning_s")
    assert [getattr(found, name) for name in names] == [getattr(native, name) for name in names]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, StartMethod.TEMPLATE),
        ({"multiprocessing_context": "fork"}, StartMethod.FORK),
        ({"multiprocessing_context": "spawn"}, StartMethod.SPAWN),
        ({"multiprocessing_context": "forkserver"}, StartMethod.TEMPLATE),
        ({"start_method": "portable"}, StartMethod.PORTABLE),
        ({"start_method": "fork"}, StartMethod.FORK),
    ],
)
def test_the_start_method_is_its_own_option_or_that_of_the_context(
    options: dict[str, Any], expected: StartMethod
) -> None:
    given = loader(num_workers=1, **options)
    assert OwnOptions.of(given).start_method_for(given.multiprocessing_context) is expected


def test_a_start_method_and_a_context_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="start_method='spawn' and multiprocessing_context were both given"):
        loader(num_workers=1, start_method="spawn", multiprocessing_context="fork")


def test_an_attribute_that_is_set_later_counts() -> None:
    given = loader(num_workers=1)
    given.worker_restarts = 0
    assert start_of(given).delivery.max_restarts == 0
    given.worker_restarts = -1
    with pytest.raises(ValueError, match="worker_restarts=-1 is too small"):
        start_of(given)
