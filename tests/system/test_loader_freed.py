"""What is left of a loader that is gone: nothing, also if its workers failed, and without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from swift_loader import DataLoader, SwiftLoader
from tests.support.datasets import Counting
from tests.support.helpers import loader_processes, wait_until


def fail(worker_id: int) -> None:
    raise ValueError(f"worker {worker_id} can't begin")


def _failed() -> weakref.ref[Any]:
    loader: DataLoader[Any] = DataLoader(
        Counting(9),  # type: ignore[arg-type]
        num_workers=2,
        worker_init_fn=fail,
        multiprocessing_context="fork",
    )
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(ValueError, match="can't begin"):
            next(iterator)
    return weakref.ref(iterator)


def test_an_error_of_all_workers_comes_again_and_ends_them() -> None:
    iterator = _failed()
    assert not loader_processes()
    gc.collect()
    assert iterator() is None


FORK: dict[str, Any] = {"multiprocessing_context": "fork"}
LOADERS: dict[str, Callable[[Any], Any]] = {
    "fork": lambda dataset: DataLoader(dataset, num_workers=1, **FORK),
    "persistent": lambda dataset: DataLoader(dataset, num_workers=1, persistent_workers=True, **FORK),
    "forkserver": lambda dataset: DataLoader(dataset, num_workers=1, multiprocessing_context="forkserver"),
    "threads": lambda dataset: DataLoader(dataset, num_workers=1, worker_type="thread"),
    "SwiftLoader": lambda dataset: SwiftLoader(dataset=dataset, worker_per_consumer=1),
    "SwiftLoader, no workers": lambda dataset: SwiftLoader(dataset=dataset, worker_per_consumer=0),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_dataset_is_freed_with_its_loader_without_the_garbage_collector(name: str) -> None:
    gc.collect()
    gc.disable()
    try:
        loader = LOADERS[name](Counting(3))
        dataset = weakref.ref(loader.dataset)
        list(loader)
        del loader
        wait_until(lambda: dataset() is None, "the dataset is freed")
    finally:
        gc.enable()


def test_handles_of_processes_need_no_garbage_collector() -> None:
    def num_handles() -> int:
        return sum(type(one).__name__ in {"Process", "Server", "Channel"} for one in gc.get_objects())

    list(SwiftLoader(dataset=Counting(9), worker_per_consumer=2))  # the root has some
    gc.collect()
    before = num_handles()
    gc.disable()
    try:
        for method in ("template", "fork", "spawn"):
            loader = SwiftLoader(dataset=Counting(9), worker_per_consumer=2, start_method=method)
            list(loader)
            del loader
        wait_until(lambda: num_handles() <= before, "all handles are gone")
    finally:
        gc.enable()
