"""The GPUs of these tests, loaders of images on them, and checks of their batches.

A process has NVIDIA's GPU. One that `tests.device.simulated` was loaded in has the simulated one instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from swift_loader import SwiftLoader
from swift_loader.device.pinning import CudaRegistry
from swift_loader.transport.segments import Segment
from tests.support import datasets
from tests.support.helpers import make_loader

BATCH_SIZE = 8
SIDE = 16
POOL_SIZE = 32
"""Streams that torch makes at once, and hands out in turn."""


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU, or the simulated one. torch.accelerator does the rest."""

    device: torch.device
    stall: Callable[[float], None]
    """Keeps the current stream busy for so many milliseconds; returns at once."""
    registry: Callable[[], Any]
    """Makes what page-locks memory."""
    is_registered: bool
    """Whether the loader page-locks its slots. Else it copies batches to memory that torch has page-locked."""
    first_line: str = ""
    """Of scripts that use it."""


CUDA = torch.device("cuda", 0)

NEEDS_GPU = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def _stall_cuda(ms: float) -> None:
    cycles_per_ms = 2_000_000  # roughly
    torch.cuda._sleep(int(ms * cycles_per_ms))


def _find_gpus() -> dict[str, Gpu]:
    simulated = sys.modules.get("tests.device.simulated")
    if simulated is None:
        return {"cuda": Gpu(CUDA, _stall_cuda, lambda: CudaRegistry(CUDA), is_registered=True)}
    sim = Gpu(torch.device("sim", 0), simulated.stall, simulated.Registry, True, "import tests.device.simulated")
    return {"sim": sim, "sim-not-registered": replace(sim, is_registered=False)}


GPUS = _find_gpus()
EACH_GPU = [pytest.param(name, marks=NEEDS_GPU if name == "cuda" else ()) for name in GPUS]

on_one_gpu = pytest.mark.parametrize("gpu", EACH_GPU[:1], indirect=True)
"""For tests of page-locking, and for those to which it makes no difference."""


def make_segment(nbytes: int = 1 << 20) -> Segment:
    segment, descriptor = Segment.create(nbytes)
    os.close(descriptor)
    return segment


def image_loader(num_batches: int = 12, **options: Any) -> SwiftLoader:
    """Return a loader whose batch `k` is `expected_images(k)`."""
    kwargs = {"num_samples": num_batches * BATCH_SIZE, "side": SIDE}
    return make_loader(datasets.Images, kwargs=kwargs, batch_size=BATCH_SIZE, shuffle=False, **options)


def expected_images(step: int) -> torch.Tensor:
    numbers = torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE) % 251
    return numbers.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, SIDE, SIDE)


def check_all(gpu: Gpu, batches: Iterable[torch.Tensor], num_batches: int, stall_ms: float = 0) -> None:
    """Copy all batches on the device, on the current stream. Wait for it only at the end, and compare then."""
    seen = torch.zeros((num_batches, BATCH_SIZE, 3, SIDE, SIDE), dtype=torch.uint8, device=gpu.device)
    step = 0
    for batch in batches:  # no enumerate(), which would hold the batch while the next one is fetched
        if stall_ms:
            gpu.stall(stall_ms)
        assert batch.device == gpu.device
        seen[step].copy_(batch)
        step += 1
        del batch
    assert step == num_batches
    expected = torch.stack([expected_images(step) for step in range(num_batches)])
    wrong = (seen.cpu() != expected).flatten(1).sum(1)
    assert not wrong.any(), f"wrong bytes by batch: {wrong.tolist()}"


class LateMove:
    """A `to_device` whose copies come late; notes what it ran on and what it was given."""

    def __init__(self, gpu: Gpu, stall_ms: float) -> None:
        self.streams: list[Any] = []
        self.were_pinned: list[bool] = []
        self._gpu = gpu
        self._stall_ms = stall_ms

    def __call__(self, batch: NDArray[Any], device: torch.device) -> torch.Tensor:
        host = torch.from_numpy(batch)
        self.streams.append(torch.accelerator.current_stream(device))
        self.were_pinned.append(host.is_pinned())
        if self._stall_ms:
            self._gpu.stall(self._stall_ms)
        return host.to(device, non_blocking=True)
