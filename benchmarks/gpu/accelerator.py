"""The device that the figures are of, and its clock: a GPU, or the CPU in its place, to try the machinery out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from swift_loader.device.pinning import CudaRegistry

_CALIBRATION_CYCLES = 20_000_000
"""About 10 ms."""


class Accelerator(Protocol):
    """A device with a stream of work of its own."""

    device: torch.device
    is_gpu: bool
    dtype: torch.dtype
    """What models are trained in there."""

    def describe(self) -> str:
        """Return what a figure depends on."""
        ...

    def synchronize(self) -> None:
        """Block until all work that was queued is done."""
        ...

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Run something that queues work; block until it is done, and return how long it took by the device's clock."""
        ...

    def stall(self, seconds: float) -> None:
        """Keep the current stream busy for about so long; returns at once."""
        ...

    def copy_aside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy from the host on a stream of its own; the current stream goes on after it."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return `(nbytes,) uint8` in memory that torch has page-locked."""
        ...

    def registry(self) -> CudaRegistry:
        """Return what page-locks other memory."""
        ...


class Gpu:
    """A CUDA device; makes it the current one."""

    is_gpu = True

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)
        self._side = torch.cuda.Stream()
        # Cards before Ampere have no bfloat16 arithmetic; float16 is as fast on all that have tensor cores.
        self.dtype = torch.bfloat16 if torch.cuda.get_device_capability(index) >= (8, 0) else torch.float16
        for _ in range(2):  # the first time, the clock isn't up yet
            seconds = self.seconds_of(lambda: _busy(_CALIBRATION_CYCLES))
        self._cycles_per_s = _CALIBRATION_CYCLES / seconds

    def describe(self) -> str:
        """Return name, memory and the runtime's version."""
        memory = torch.cuda.get_device_properties(self.device).total_memory
        return f"{torch.cuda.get_device_name(self.device)}, {memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"

    def synchronize(self) -> None:
        """Block until all streams are done."""
        torch.cuda.synchronize(self.device)

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Return the time between two events on the current stream."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000

    def stall(self, seconds: float) -> None:
        """Queue a kernel that only counts cycles."""
        if seconds:
            _busy(int(seconds * self._cycles_per_s))

    def copy_aside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy beside what the current stream has queued; that waits for the copy."""
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().wait_event(self._side.record_event())

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return memory of torch's own page-locking allocator."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def registry(self) -> CudaRegistry:
        """Return the runtime's."""
        return CudaRegistry(self.device)


class Cpu:
    """The CPU in place of a GPU, to test the benchmark itself."""

    is_gpu = False
    dtype = torch.float32

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def describe(self) -> str:
        """Say what the figures are worth."""
        return "cpu, not a measurement of a GPU"

    def synchronize(self) -> None:
        """Do nothing."""

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Return what the clock on the wall says."""
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    def stall(self, seconds: float) -> None:
        """Do nothing."""

    def copy_aside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy at once."""
        target.copy_(source)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return ordinary memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def registry(self) -> CudaRegistry:
        """Return one that page-locks nothing."""
        return _NoRegistry()


class _NoRegistry(CudaRegistry):
    def __init__(self) -> None:
        pass

    def register(self, address: int, nbytes: int) -> str:  # noqa: ARG002
        """Find nothing wrong."""
        return ""

    def unregister(self, address: int) -> bool:  # noqa: ARG002
        """Do nothing."""
        return True


def _busy(cycles: int) -> None:
    sleep: Any = torch.cuda._sleep  # noqa: SLF001 - torch's own tests have no other way to keep a stream busy
    sleep(cycles)
