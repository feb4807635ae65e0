"""The pool of processes, by itself."""

from __future__ import annotations

import pytest

from swift_loader import LoaderClosed, SwiftLoader
from swift_loader.executors.process.supervisor import Supervisor
from tests import datasets
from tests.helpers import make_loader


def pool_of(loader: SwiftLoader) -> Supervisor:
    return loader._make_pool()


def test_a_pool_that_was_closed_before_it_began_keeps_nothing() -> None:
    loader = make_loader(datasets.Counting)
    pool = pool_of(loader)
    pool.close()
    with pytest.raises(LoaderClosed):
        pool.begin()


def test_a_pool_whose_thread_has_failed_says_so_instead_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Supervisor) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Supervisor, "_look_after_template", fail)
    loader = make_loader(datasets.Counting)
    pool = pool_of(loader)
    try:
        with pytest.raises(ZeroDivisionError, match="planted"):
            start_it_often(pool)
    finally:
        pool.close()


def start_it_often(pool: Supervisor) -> None:
    for _ in range(3):
        pool.start_template()
        pool._thread.order(lambda: None).result(10)
