"""What only a GPU can tell: streams, memory that is used again, page-locking. Each test leaves the device idle."""

from __future__ import annotations

import mmap
import os
import resource
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from swift_loader import DevicePrefetcher, SwiftLoader, SwiftLoaderWarning
from swift_loader.device.pinning import CudaRegistry, PageLock
from swift_loader.executors.process import lease
from swift_loader.transport.segments import Segment
from tests import datasets
from tests.helpers import make_loader, run_script

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CUDA = torch.device("cuda", 0)
BATCH_SIZE = 8
SIDE = 16
MILLISECOND = 2_000_000
"""In cycles of a GPU, roughly."""
POOL_SIZE = 32
"""Streams that torch makes at once, and hands out in turn."""

cuda: Any = torch.cuda  # only partly typed
stall: Callable[[int], None] = cuda._sleep
"""Keeps the current stream busy for so many cycles; returns at once."""


@pytest.fixture(scope="session", autouse=True)
def cuda_is_warm() -> None:
    """Have CUDA open what it opens once (files, contexts), before a test is held to leave nothing behind."""
    if not torch.cuda.is_available():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the machine, not about us
        for _ in range(POOL_SIZE):
            with cuda.stream(cuda.Stream(CUDA)):
                stall(1000)
                torch.ones(1 << 16).pin_memory().to(CUDA, non_blocking=True).sum().item()
    segment = make_segment()
    CudaRegistry(CUDA).register(segment.address, segment.nbytes)
    CudaRegistry(CUDA).unregister(segment.address)


@pytest.fixture(autouse=True)
def device_is_idle() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def make_segment(nbytes: int = 1 << 20) -> Segment:
    segment, descriptor = Segment.create(nbytes)
    os.close(descriptor)
    return segment


def image_loader(num_batches: int = 12, **options: Any) -> SwiftLoader:
    """Return a loader whose batch `k` is `expected_images(k)`."""
    kwargs = {"num_samples": num_batches * BATCH_SIZE, "side": SIDE}
    return make_loader(datasets.Images, kwargs=kwargs, batch_size=BATCH_SIZE, shuffle=False, **options)


def expected_images(step: int, device: torch.device = CUDA) -> torch.Tensor:
    numbers = torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE, device=device) % 251
    return numbers.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, SIDE, SIDE)


def check_all(batches: Iterable[torch.Tensor], num_batches: int, stall_cycles: int = 0) -> None:
    """Compare all batches on the device, on the current stream; wait for the device only at the end."""
    wrong = torch.zeros(num_batches, dtype=torch.int64, device=CUDA)
    step = 0
    for batch in batches:  # no enumerate(), which would hold the batch while the next one is fetched
        if stall_cycles:
            stall(stall_cycles)
        assert batch.device == CUDA
        wrong[step] = (batch != expected_images(step)).sum()
        step += 1
        del batch
    assert step == num_batches
    assert not wrong.any().item(), f"wrong bytes by batch: {wrong.tolist()}"


class LateMove:
    """A `to_device` whose copies come late; notes what it ran on and what it was given."""

    def __init__(self, cycles: int) -> None:
        self.streams: list[Any] = []
        self.were_pinned: list[bool] = []
        self._cycles = cycles

    def __call__(self, batch: NDArray[Any], device: torch.device) -> torch.Tensor:
        host = torch.from_numpy(batch)
        self.streams.append(cuda.current_stream(device))
        self.were_pinned.append(host.is_pinned())
        if self._cycles:
            stall(self._cycles)
        return host.to(device, non_blocking=True)


# Page-locking ---------------------------------------------------------------------------------------------------------


def test_a_segment_is_page_locked_until_it_is_unmapped() -> None:
    notices: list[str] = []
    page_lock = PageLock(CudaRegistry(CUDA), notices.append)
    for _ in range(3):  # as a rule, at the same address
        segment = make_segment()
        page_lock.lock(segment)
        assert torch.from_numpy(segment.array()).is_pinned()
        assert torch.from_numpy(segment.array()[4096:8192]).is_pinned()
        del segment
    assert notices == []


def test_page_locking_that_fails_says_why_and_does_not_poison_the_next_operation() -> None:
    assert CudaRegistry(CUDA).register(mmap.PAGESIZE, mmap.PAGESIZE)
    assert torch.ones(2, device=CUDA).sum().item() == 2


def test_memory_that_is_page_locked_already_is_page_locked_anew() -> None:
    registry, segment = CudaRegistry(CUDA), make_segment()
    assert registry.register(segment.address, mmap.PAGESIZE) == ""
    assert registry.register(segment.address, segment.nbytes) == ""
    assert torch.ones(2, device=CUDA).sum().item() == 2
    assert torch.from_numpy(segment.array()[-mmap.PAGESIZE :]).is_pinned()
    assert registry.unregister(segment.address)
    assert registry.unregister(segment.address), "it isn't page-locked, as was wanted"
    assert torch.ones(2, device=CUDA).sum().item() == 2


def test_a_ctrl_c_right_after_page_locking_leaves_nothing_page_locked_that_is_unmapped() -> None:
    class Interrupted(CudaRegistry):
        def register(self, address: int, nbytes: int) -> str | None:
            assert super().register(address, nbytes) == ""
            raise KeyboardInterrupt

    for number in range(3):  # as a rule, at the same address
        segment = make_segment()
        with pytest.raises(KeyboardInterrupt):
            PageLock(Interrupted(CUDA), print).lock(segment)
        segment.array()[:] = number
        assert torch.from_numpy(segment.array()).to(CUDA, non_blocking=True).eq(number).all().item()
        address = segment.address
        del segment
        assert int(CudaRegistry(CUDA)._cudart.cudaHostUnregister(address)), "it was page-locked still"
        with suppress(RuntimeError):
            torch.ones(2, device=CUDA)  # is told of that error


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_page_locking_does_not_end_the_capture_of_another_thread(mode: str) -> None:
    registry, segment, told = CudaRegistry(CUDA), make_segment(), list[Any]()
    values, graph = torch.zeros(8, device=CUDA), cuda.CUDAGraph()

    def lock_and_unlock() -> None:
        told.append(registry.register(segment.address, segment.nbytes))
        told.append(registry.unregister(segment.address))
        told.append(registry.register(segment.address, segment.nbytes))

    thread = threading.Thread(target=lock_and_unlock)
    torch.cuda.synchronize()
    with cuda.graph(graph, capture_error_mode=mode):
        values.add_(1)
        thread.start()
        thread.join()
        values.add_(1)
    assert told == ["", True, ""]
    assert torch.from_numpy(segment.array()).is_pinned()
    graph.replay()
    assert values.tolist() == [2] * 8
    assert registry.unregister(segment.address)


def test_the_limit_of_locked_memory_does_not_hold_for_the_driver() -> None:
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, limits[1]))
    try:
        registry, segment = CudaRegistry(CUDA), make_segment(1 << 26)
        assert registry.register(segment.address, segment.nbytes) == ""
        assert registry.unregister(segment.address)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


def test_large_batches_that_are_ready_stay_in_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "MAX_HELD_BYTES", 3 * BATCH_SIZE * 3 * SIDE * SIDE)
    move = LateMove(MILLISECOND // 5)
    with image_loader(300, data_queue_size=10) as loader:
        loader.start(device=CUDA, to_device=move)
        check_all(loader, 300, MILLISECOND // 5)
    assert all(move.were_pinned)


def test_batches_arrive_also_if_their_memory_cannot_be_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaRegistry, "register", lambda self, address, nbytes: "no luck")
    with image_loader() as loader:
        loader.start(device=CUDA)
        with pytest.warns(SwiftLoaderWarning, match="no luck"):
            check_all(loader, 12)


def test_pin_memory_without_a_device_gives_page_locked_tensors() -> None:
    with image_loader(300, pin_memory=True) as loader:
        moved = []
        for batch in loader:
            assert batch.device.type == "cpu"
            assert batch.is_pinned()
            moved.append(batch.to(CUDA, non_blocking=True))
            del batch
        check_all(moved, 300)


# Streams and memory ---------------------------------------------------------------------------------------------------


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


# Around ---------------------------------------------------------------------------------------------------------------


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
        from tests import datasets
        from tests.helpers import make_loader

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
