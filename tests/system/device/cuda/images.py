"""Loaders of images on a GPU, and checks of their batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from swift_loader import SwiftLoader
from swift_loader.transport.segments import Segment
from tests.support import datasets
from tests.support.helpers import make_loader

NEEDS_GPU = [
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
