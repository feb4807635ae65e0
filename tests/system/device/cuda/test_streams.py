"""What only a GPU can tell about streams, and about memory that is used again."""

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
from tests.support.helpers import make_loader, run_script
from tests.system.device.cuda.images import (
    BATCH_SIZE,
    CUDA,
    MILLISECOND,
    NEEDS_GPU,
    SIDE,
    LateMove,
    check_all,
    cuda,
    expected_images,
    image_loader,
    stall,
)

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("depth", [1, 4])
def test_batches_arrive_as_they_are_on_the_host(depth: int) -> None:
    with make_loader(datasets.Counting) as loader:
        expected = list(loader)
    with make_loader(datasets.Counting, max_nb_batch_on_device=depth) as loader:
        loader.start(device=CUDA)
        for batch, on_host in zip(loader, expected, strict=True):
            for name in ("id", "x"):
                assert batch[name].device == CUDA
                np.testing.assert_array_equal(batch[name].cpu().numpy(), on_host[name])


def test_floating_point_tensors_are_converted_on_the_device_and_others_are_not() -> None:
    with make_loader(datasets.Counting, kwargs={"num_samples": 1000}, shuffle=False) as loader:
        loader.start(device=CUDA, dtype=torch.bfloat16)
        for step, batch in enumerate(loader):
            numbers = torch.arange(8 * step, 8 * (step + 1))
            assert batch["x"].dtype is torch.bfloat16
            assert batch["x"][:, 0].tolist() == numbers.to(torch.bfloat16).tolist()
            assert batch["id"].dtype is torch.int64
            assert batch["id"].tolist() == numbers.tolist()


def test_a_batch_is_handed_over_while_the_loops_stream_is_busy_and_used_when_it_is_there() -> None:
    with image_loader() as loader:
        loader.start(device=CUDA)
        batches = iter(loader)
        next(batches)
        torch.cuda.synchronize()
        stall(1000 * MILLISECOND)
        second = next(batches)
        is_busy = not cuda.current_stream().query()
        copy = second.clone()
        assert is_busy, "the loop waited for its own stream"
        assert torch.equal(copy, expected_images(1))


@pytest.mark.parametrize("lagging", ["nothing", "the loop", "the loop on a stream of its own", "the copies"])
def test_no_memory_is_written_before_it_was_read(lagging: str) -> None:
    num_batches, cycles = 3000, MILLISECOND // 5
    to_device = LateMove(cycles) if lagging == "the copies" else None
    context = cuda.stream(cuda.Stream(CUDA)) if lagging == "the loop on a stream of its own" else nullcontext()
    with image_loader(num_batches, data_queue_size=4) as loader, context:
        loader.start(device=CUDA, to_device=to_device)
        check_all(loader, num_batches, cycles if "loop" in lagging else 0)


def test_a_loop_that_never_waits_for_the_device_needs_no_more_of_its_memory_with_time() -> None:
    nbytes, num_steps = 1 << 22, 1000  # above 1 MB, torch's allocator doesn't share a block among tensors
    sums = torch.zeros(num_steps, dtype=torch.int64, device=CUDA)

    def sources() -> Iterator[torch.Tensor]:
        page_locked = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
        for number in range(num_steps):
            page_locked.fill_(number % 251)
            yield page_locked

    peaks: list[int] = []
    cuda.empty_cache()
    before = cuda.memory_reserved(CUDA)
    for step, batch in enumerate(DevicePrefetcher(sources(), CUDA)):
        stall(MILLISECOND)
        sums[step] = batch[0].long() + batch[-1].long()
        peaks.append(cuda.memory_reserved(CUDA) - before)
    assert sums.tolist() == [2 * (number % 251) for number in range(num_steps)]
    assert peaks[-1] == peaks[100], "it grows"
    assert max(peaks) <= 10 * nbytes + (64 << 20)  # and what the sums need


def test_a_batch_that_is_moved_ahead_in_inference_mode_is_one_that_autograd_takes() -> None:
    weight = torch.ones(4, device=CUDA, requires_grad=True)
    batches = iter(DevicePrefetcher([torch.ones(4)] * 5, CUDA, max_nb_batch_on_device=3))
    with torch.inference_mode():
        next(batches)
    for batch in batches:
        (batch * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0] * 4


def test_a_function_of_ones_own_runs_on_a_side_stream_with_page_locked_memory() -> None:
    move = LateMove(0)
    with image_loader() as loader:
        loader.start(device=CUDA, to_device=move)
        outside = cuda.current_stream(CUDA)
        check_all(loader, 12)
        assert cuda.current_stream(CUDA) == outside
    assert move.were_pinned == [True] * 12
    assert set(move.streams) == {move.streams[0]}
    assert move.streams[0] != outside


def test_closing_waits_for_copies_under_way_and_batches_stay_valid() -> None:
    move = LateMove(100 * MILLISECOND)
    loader = image_loader()
    loader.start(device=CUDA, to_device=move)
    batch = next(iter(loader))
    loader.close()
    assert move.streams[0].query()
    assert torch.equal(batch, expected_images(0))


def test_a_pass_that_was_left_with_copies_under_way_spoils_nothing() -> None:
    with image_loader(300, data_queue_size=4) as loader:
        loader.start(device=CUDA, to_device=LateMove(MILLISECOND))
        for batch in loader:
            first = batch
            break
        check_all(loader, 300)
        assert torch.equal(first, expected_images(0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one_works_and_the_current_one_stays() -> None:
    other = torch.device("cuda", 1)
    with image_loader() as loader:
        loader.start(device=other)
        for step, batch in enumerate(loader):
            assert batch.device == other
            assert torch.equal(batch, expected_images(step, other))
            assert torch.cuda.current_device() == 0


@pytest.mark.filterwarnings("ignore:.*pin.memory:DeprecationWarning", "ignore:.*pin.memory:UserWarning")  # torch's own
@pytest.mark.parametrize("stall_cycles", [0, MILLISECOND // 5])
def test_the_batches_of_a_torch_loader_are_moved_ahead(stall_cycles: int) -> None:
    images = datasets.Images(500 * BATCH_SIZE, SIDE)
    source = DataLoader(images, BATCH_SIZE, pin_memory=True)  # type: ignore[arg-type, var-annotated]
    check_all(DevicePrefetcher(source, CUDA, max_nb_batch_on_device=2), 500, stall_cycles)


@pytest.mark.parametrize("deed", ["loader.close()", "del loader, batches", "del ahead, moved", "pass"])
def test_a_fork_does_not_touch_the_device(deed: str, tmp_path: Path) -> None:
    code = f"""
        import gc, os, sys, warnings
        import torch
        from swift_loader import DevicePrefetcher
        from tests.support import datasets
        from tests.support.helpers import make_loader

        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a process with threads forks
        loader = make_loader(datasets.Images, shuffle=False)
        loader.start(device="cuda")
        batches = iter(loader)
        next(batches)
        ahead = DevicePrefetcher([torch.ones(1000).pin_memory()] * 5, "cuda")
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
    printed = run_script(code, str(tmp_path / "errors"), folder=tmp_path)
    assert printed.split() == ["7", "4000"]
    assert "Traceback" not in (tmp_path / "errors").read_text()
