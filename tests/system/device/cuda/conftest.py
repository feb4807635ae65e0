"""Each test of this folder finds a warm device, and leaves it idle."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator

import pytest
import torch

from swift_loader.device.move import Target
from swift_loader.device.pinning import PageLock
from tests.system.device.cuda.images import EACH_GPU, GPUS, POOL_SIZE, Gpu, make_segment

collect_ignore = [] if "sim" in GPUS else ["test_integrity.py"]


@pytest.fixture(scope="session", autouse=True)
def gpu_is_warm() -> None:
    """Have CUDA open what it opens once (files, contexts), before a test is held to leave nothing behind."""
    gpu = next(iter(GPUS.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the machine, not about us
        for _ in range(POOL_SIZE):
            with torch.Stream(gpu.device):
                gpu.stall(0.5)
                torch.ones(1 << 16).pin_memory().to(gpu.device, non_blocking=True).sum().item()
    segment = make_segment()
    gpu.registry().register(segment.address, segment.nbytes)
    gpu.registry().unregister(segment.address)


@pytest.fixture(autouse=True)
def device_is_idle() -> Iterator[None]:
    yield
    torch.accelerator.synchronize()


@pytest.fixture(params=EACH_GPU)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU. The loader page-locks memory for the simulated one as it does for CUDA, if that is what it tries."""
    gpu = GPUS[request.param]

    def make_page_lock(self: Target, notices: deque[str]) -> PageLock | None:
        return None if self._device is None else PageLock(gpu.registry(), notices)

    if request.param == "sim":
        monkeypatch.setattr(Target, "make_page_lock", make_page_lock)
    return gpu
