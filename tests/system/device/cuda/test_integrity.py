"""On the simulated GPU only: late copies, workers that are killed, and broken loaders, which are to be seen."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swift_loader import DataLoader, SwiftLoader
from swift_loader.device.streams import AcceleratorStream, CopiesInFlight
from tests.device import simulated
from tests.support import datasets
from tests.support.helpers import make_loader, worker_processes
from tests.system.device.cuda.images import BATCH_SIZE, SIDE, Gpu, check_all, image_loader, make_segment, on_one_gpu


@pytest.fixture(autouse=True)
def copies_are_late() -> Iterator[None]:
    """They read wrong bytes if their slot is written early, and write over others if their target is used early."""
    simulated.set_copy_delay(0.5)
    yield
    simulated.set_copy_delay(0)
    gc.collect()
    torch.accelerator.synchronize()
    assert simulated.num_registered() == 0


@pytest.fixture
def all_is_read_in_time() -> Iterator[None]:
    before = simulated.counts()["violations"]
    yield
    assert simulated.counts()["violations"] == before


@pytest.mark.usefixtures("all_is_read_in_time")
@pytest.mark.parametrize("stall_ms", [0, 0.8])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_nb_batch_on_device": 8}, {"worker_type": "thread"}, {"workers": 0}, {"start_method": "fork"}],
    ids=str,
)
def test_late_copies_and_a_lagging_loop_give_each_batch_once(
    gpu: Gpu, options: dict[str, Any], stall_ms: float
) -> None:
    with image_loader(300, data_queue_size=4, **options) as loader:
        loader.start(device=gpu.device)
        check_all(gpu, loader, 300, stall_ms)


@pytest.mark.usefixtures("all_is_read_in_time")
@pytest.mark.parametrize(
    "options",
    [{}, {"persistent_workers": True, "max_nb_batch_on_device": 4}, {"worker_type": "thread"}, {"num_workers": 0}],
    ids=str,
)
def test_a_data_loader_gives_each_batch_once_in_each_epoch(gpu: Gpu, options: dict[str, Any]) -> None:
    images: Any = datasets.Images(100 * BATCH_SIZE, SIDE)
    loader: Any = DataLoader(images, BATCH_SIZE, **{"num_workers": 2, "device": gpu.device, **options})
    for _ in range(3):
        check_all(gpu, loader, 100, 0.4)


def test_copies_read_page_locked_memory_and_the_loop_waits_for_none(gpu: Gpu) -> None:
    before = simulated.counts()
    with make_loader(datasets.Counting) as loader:
        loader.start(device=gpu.device)
        assert all(batch["x"].device == gpu.device for batch in loader)
    after = simulated.counts()
    assert after["direct"] > before["direct"]
    assert {**after, "direct": 0} == {**before, "direct": 0}


def _drop_at_once(self: CopiesInFlight) -> None:
    self._in_flight.clear()


def _forget_the_loops_stream(self: AcceleratorStream, parts: Any, event: Any) -> None:
    self._loop_stream().wait_event(event)


def _never_wait(self: AcceleratorStream, parts: Any, event: Any) -> None:
    for part in parts:
        part.record_stream(self._loop_stream())


@on_one_gpu  # pinned memory has a guard of its own
@pytest.mark.parametrize(
    ("owner", "name", "broken", "stall_ms"),
    [
        (CopiesInFlight, "drop_finished", _drop_at_once, 0),
        (AcceleratorStream, "hand_over", _forget_the_loops_stream, 2),
        (AcceleratorStream, "hand_over", _never_wait, 0),
    ],
)
def test_a_loader_that_is_broken_is_seen(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Any, stall_ms: float
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with image_loader(300, data_queue_size=4, max_nb_batch_on_device=4) as loader:
        loader.start(device=gpu.device)
        with pytest.raises(AssertionError, match="wrong bytes"):
            check_all(gpu, loader, 300, stall_ms)
        torch.accelerator.synchronize()


@on_one_gpu
def test_memory_that_is_unregistered_while_a_copy_reads_it_is_seen(gpu: Gpu) -> None:
    before, segment = simulated.counts()["violations"], make_segment()
    assert gpu.registry().register(segment.address, segment.nbytes) == ""
    torch.from_numpy(segment.array()).to(gpu.device, non_blocking=True)
    assert gpu.registry().unregister(segment.address)
    assert simulated.counts()["violations"] == before + 1
    torch.accelerator.synchronize()


@pytest.mark.usefixtures("all_is_read_in_time")
@pytest.mark.filterwarnings("ignore:.*was ended by SIGKILL")
def test_workers_that_are_killed_while_copies_are_late_leave_no_trace(gpu: Gpu) -> None:
    num_batches = 400

    def killing(loader: SwiftLoader) -> Iterator[Any]:
        for step, batch in enumerate(loader):
            if step % 20 == 19:
                workers = worker_processes()
                os.kill(workers[step % len(workers)].pid, signal.SIGKILL)
            yield batch

    with image_loader(num_batches, data_queue_size=4, max_nb_batch_on_device=4, worker_restarts=1000) as loader:
        loader.start(device=gpu.device)
        check_all(gpu, killing(loader), num_batches, 0.8)
