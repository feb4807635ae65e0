"""The drop-in class does what torch's does: the same constructions with both, over generated grids of arguments.

Every cell is compared in its batches, lengths, errors, warnings, attributes and in what becomes of the generators.
"""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_sharer
from pathlib import Path

import pytest
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import _utils

from swift_loader.dataloader.dataloader import DataLoader
from tests.support.helpers import exhaustive_unless
from tests.support.like_torch import grids
from tests.support.like_torch.comparing import differences
from tests.support.like_torch.observing import Cell

pytestmark = pytest.mark.skipif(
    "in_order" not in inspect.signature(TorchDataLoader.__init__).parameters,
    reason="the class does as torch 2.13's; before 2.6 torch has no in_order, and warns of pin_memory in other cases",
)

INLINE: dict[str, Callable[[], list[Cell]]] = {
    "arguments": grids.arguments,
    "maps": grids.inline_maps,
    "streams": grids.inline_streams,
}
WITH_WORKERS: dict[str, Callable[[], list[Cell]]] = {
    "maps": grids.worker_maps,
    "streams": grids.worker_streams,
    "failures": grids.worker_failures,
}

NUM_PARTS_WITH_THREADS = 8
"""One of them is quick. torch's side has processes."""

NUM_PARTS = 20
"""One of them is quick."""

NUM_PARTS_WITH_WORKERS = 40
"""One of them is quick. Each cell starts two or three times one to three processes."""


@pytest.mark.parametrize("part", exhaustive_unless([0], range(NUM_PARTS)))
@pytest.mark.parametrize("name", INLINE)
def test_without_workers_everything_is_as_with_torch(name: str, part: int) -> None:
    told = differences(DataLoader, INLINE[name]()[part::NUM_PARTS])
    assert not told, told


@pytest.fixture
def torch_notices_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's iterators wait less for workers that have failed: 5 s each otherwise."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.5)


@pytest.fixture
def torch_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the thread that serves tensors to other processes, if torch has started it, and say where its socket is."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(tmp_path))  # type: ignore[attr-defined]
    yield
    resource_sharer.stop(timeout=20)


@pytest.mark.usefixtures("torch_notices_soon", "torch_leaves_nothing")
@pytest.mark.parametrize("part", exhaustive_unless([0], range(NUM_PARTS_WITH_WORKERS)))
@pytest.mark.parametrize("name", WITH_WORKERS)
def test_with_workers_everything_is_as_with_torch(name: str, part: int) -> None:
    # Most of the streams are the same in all workers. With torch, and only so with this class, they are repeated.
    loader_class = partial(DataLoader, shard_stream=False) if name == "streams" else DataLoader
    told = differences(loader_class, WITH_WORKERS[name]()[part::NUM_PARTS_WITH_WORKERS])
    assert not told, told


@pytest.mark.usefixtures("torch_notices_soon", "torch_leaves_nothing")
@pytest.mark.parametrize("part", exhaustive_unless([0], range(NUM_PARTS_WITH_THREADS)))
def test_with_worker_threads_everything_is_as_with_torch(part: int) -> None:
    told = differences(partial(DataLoader, worker_type="thread"), grids.threads()[part::NUM_PARTS_WITH_THREADS])
    assert not told, told
