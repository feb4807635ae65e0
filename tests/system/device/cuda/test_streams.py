"""Streams, and memory that is used again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from swift_loader import DevicePrefetcher
from tests.support import datasets
from tests.support.helpers import ROOT, make_loader, run_script
from tests.system.device.cuda.images import (
    BATCH_SIZE,
    SIDE,
    Gpu,
    LateMove,
    check_all,
    expected_images,
    image_loader,
    on_one_gpu,
)


@pytest.mark.parametrize("depth", [1, 4])
def test_batches_arrive_as_they_are_on_the_host(gpu: Gpu, depth: int) -> None:
    with make_loader(datasets.Counting) as loader:
        expected = list(loader)
    with make_loader(datasets.Counting, max_nb_batch_on_device=depth) as loader:
        loader.start(device=gpu.device)
        for batch, on_host in zip(loader, expected, strict=True):
            for name in ("id", "x"):
                assert batch[name].device == gpu.device
                np.testing.assert_array_equal(batch[name].cpu().numpy(), on_host[name])


def test_floating_point_tensors_are_converted_on_the_device_and_others_are_not(gpu: Gpu) -> None:
    with make_loader(datasets.Counting, kwargs={"num_samples": 1000}, shuffle=False) as loader:
        loader.start(device=gpu.device, dtype=torch.bfloat16)
        for step, batch in enumerate(loader):
            numbers = torch.arange(8 * step, 8 * (step + 1))
            assert batch["x"].dtype is torch.bfloat16
            assert batch["x"][:, 0].tolist() == numbers.to(torch.bfloat16).tolist()
            assert batch["id"].dtype is torch.int64
            assert batch["id"].tolist() == numbers.tolist()


def test_a_batch_is_handed_over_while_the_loops_stream_is_busy_and_used_when_it_is_there(gpu: Gpu) -> None:
    with image_loader() as loader:
        loader.start(device=gpu.device)
        batches = iter(loader)
        next(batches)
        torch.accelerator.synchronize()
        gpu.stall(1000)
        second = next(batches)
        is_busy = not torch.accelerator.current_stream().query()
        copy = second.clone()
        assert is_busy, "the loop waited for its own stream"
        assert torch.equal(copy.cpu(), expected_images(1))


@pytest.mark.parametrize("lagging", ["nothing", "the loop", "the loop on a stream of its own", "the copies"])
def test_no_memory_is_written_before_it_was_read(gpu: Gpu, lagging: str) -> None:
    num_batches, ms = 1000, 0.1
    to_device = LateMove(gpu, ms) if lagging == "the copies" else None
    context = torch.Stream(gpu.device) if lagging == "the loop on a stream of its own" else nullcontext()
    with image_loader(num_batches, data_queue_size=4) as loader, context:
        loader.start(device=gpu.device, to_device=to_device)
        check_all(gpu, loader, num_batches, ms if "loop" in lagging else 0)


def test_a_loop_that_never_waits_for_the_device_needs_no_more_of_its_memory_with_time(gpu: Gpu) -> None:
    nbytes, num_steps = 1 << 22, 1000  # above 1 MB, torch's allocator doesn't share a block among tensors
    ends = torch.zeros((num_steps, 2), dtype=torch.uint8, device=gpu.device)

    def sources() -> Iterator[torch.Tensor]:
        page_locked = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
        for number in range(num_steps):
            page_locked.fill_(number % 251)
            yield page_locked

    most = 0
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_reserved()
    for step, batch in enumerate(DevicePrefetcher(sources(), gpu.device)):
        gpu.stall(0.5)
        ends[step, 0].copy_(batch[0])
        ends[step, 1].copy_(batch[-1])
        most = max(most, torch.accelerator.memory_reserved() - before)
    assert ends.tolist() == [[number % 251] * 2 for number in range(num_steps)]
    assert most <= 15 * nbytes, "it grows"  # 6 are needed, and CUDA's allocator reserves 5 at a time


def test_a_batch_that_is_moved_ahead_in_inference_mode_is_one_that_autograd_takes(gpu: Gpu) -> None:
    weight = torch.ones(4, device=gpu.device, requires_grad=True)
    batches = iter(DevicePrefetcher([torch.ones(4)] * 5, gpu.device, max_nb_batch_on_device=3))
    with torch.inference_mode():
        next(batches)
    for batch in batches:
        (batch * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0] * 4


def test_a_function_of_ones_own_runs_on_a_side_stream_with_page_locked_memory(gpu: Gpu) -> None:
    move = LateMove(gpu, 0)
    with image_loader() as loader:
        loader.start(device=gpu.device, to_device=move)
        outside = torch.accelerator.current_stream(gpu.device)
        check_all(gpu, loader, 12)
        assert torch.accelerator.current_stream(gpu.device) == outside
    assert move.were_pinned == [gpu.is_registered] * 12
    assert set(move.streams) == {move.streams[0]}
    assert move.streams[0] != outside


def test_closing_waits_for_copies_under_way_and_batches_stay_valid(gpu: Gpu) -> None:
    move = LateMove(gpu, 50)
    loader = image_loader()
    loader.start(device=gpu.device, to_device=move)
    batch = next(iter(loader))
    loader.close()
    assert move.streams[0].query()
    assert torch.equal(batch.cpu(), expected_images(0))


def test_a_pass_that_was_left_with_copies_under_way_spoils_nothing(gpu: Gpu) -> None:
    with image_loader(300, data_queue_size=4) as loader:
        loader.start(device=gpu.device, to_device=LateMove(gpu, 0.5))
        for batch in loader:
            first = batch
            break
        check_all(gpu, loader, 300)
        assert torch.equal(first.cpu(), expected_images(0))


def test_another_device_than_the_current_one_works_and_the_current_one_stays(gpu: Gpu) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device(gpu.device.type, 1)
    with image_loader() as loader:
        loader.start(device=other)
        for step, batch in enumerate(loader):
            assert batch.device == other
            assert torch.equal(batch.cpu(), expected_images(step))
            assert torch.accelerator.current_device_index() == 0


@pytest.mark.filterwarnings("ignore:.*pin.memory:DeprecationWarning", "ignore:.*pin.memory:UserWarning")  # torch's own
@pytest.mark.parametrize("stall_ms", [0, 0.1])
def test_the_batches_of_a_torch_loader_are_moved_ahead(gpu: Gpu, stall_ms: float) -> None:
    images = datasets.Images(500 * BATCH_SIZE, SIDE)
    source = DataLoader(images, BATCH_SIZE, pin_memory=True)  # type: ignore[arg-type, var-annotated]
    check_all(gpu, DevicePrefetcher(source, gpu.device, max_nb_batch_on_device=2), 500, stall_ms)


@on_one_gpu
@pytest.mark.parametrize("deed", ["loader.close()", "del loader, batches", "del ahead, moved", "pass"])
def test_a_fork_does_not_touch_the_device(gpu: Gpu, deed: str, tmp_path: Path) -> None:
    code = f"""
        {gpu.first_line}
        import gc, os, sys, warnings
        import torch
        from swift_loader import DevicePrefetcher
        from tests.support import datasets
        from tests.support.helpers import make_loader

        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a process with threads forks
        loader = make_loader(datasets.Images, shuffle=False)
        loader.start(device="{gpu.device}")
        batches = iter(loader)
        next(batches)
        ahead = DevicePrefetcher([torch.ones(1000).pin_memory()] * 5, "{gpu.device}")
        moved = iter(ahead)
        next(moved)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 2)
            {deed}
            gc.collect()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        print(len(list(batches)), sum(int(ones.sum()) for ones in moved))
        loader.close()
    """
    environment = {"PYTHONPATH": str(ROOT)}
    printed = run_script(code, str(tmp_path / "errors"), folder=tmp_path, environment=environment)
    assert printed.split() == ["7", "4000"]
    assert "Traceback" not in (tmp_path / "errors").read_text()
