"""What a DataLoader says to a pool, before any process starts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from swift_loader import DataLoader, LoaderClosed, WorkerPool
from swift_loader.dataloader.dataloader import DataLoader as _Class
from swift_loader.dataloader.pool import usable

NUMBERS: Any = list(range(8))


def test_the_number_of_workers_is_the_pools() -> None:
    pool = WorkerPool(2)
    for loader in (DataLoader(NUMBERS, workers=pool), DataLoader(NUMBERS, num_workers=2, workers=pool)):
        assert (loader.num_workers, loader.workers) == (2, pool)


def test_another_number_of_workers_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"num_workers=1 was given with a WorkerPool of 2; leave num_workers out"):
        DataLoader(NUMBERS, num_workers=1, workers=WorkerPool(2))


@pytest.mark.parametrize(
    "other", [{"multiprocessing_context": "fork"}, {"start_method": "spawn"}, {"worker_type": "thread"}]
)
def test_another_kind_of_worker_is_an_error(other: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(other))}.* was given with a WorkerPool"):
        DataLoader(NUMBERS, workers=WorkerPool(2), **other)


def test_a_number_is_no_pool() -> None:
    with pytest.raises(TypeError, match="workers=2 is a int; give a WorkerPool"):
        DataLoader(NUMBERS, workers=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "error"), [(0, ValueError), (5000, ValueError), ("2", TypeError)])
def test_a_pool_has_a_number_of_processes(number: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_workers="):
        WorkerPool(number)


def test_a_closed_pool_gives_no_workers() -> None:
    with WorkerPool(2) as pool:
        loader = DataLoader(NUMBERS, workers=pool)
    with pytest.raises(LoaderClosed, match="the WorkerPool was closed"):
        iter(loader)


def test_a_copy_of_a_pool_is_the_pool_and_a_pickled_one_is_like_it() -> None:
    pool = WorkerPool(2)
    assert copy.copy(pool) is copy.deepcopy([pool])[0] is pool
    assert pickle.loads(pickle.dumps(pool)).num_workers == 2
    assert repr(pool) == "WorkerPool(num_workers=2)"


def test_elsewhere_than_on_linux_each_loader_has_workers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkerPool(2)
    assert usable(pool) is pool
    monkeypatch.setattr("swift_loader.executors.processes.PLATFORM", "darwin")
    assert usable(pool) is None


def test_a_pool_keeps_no_loader_alive() -> None:
    pool = WorkerPool(2)
    loader: _Class[Any] = DataLoader(NUMBERS, workers=pool)
    assert len(pool._loaders) == 1
    del loader
    assert not pool._loaders
