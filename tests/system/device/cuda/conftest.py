"""Each test of this folder finds a warm device, and leaves it idle."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from swift_loader.device.pinning import CudaRegistry
from tests.system.device.cuda.images import (
    CUDA,
    POOL_SIZE,
    cuda,
    make_segment,
    stall,
)


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
