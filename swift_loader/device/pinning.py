"""Page-locks host memory, so that a GPU can read it without the CPU.

The trainer page-locks a segment when it is mapped, and unlocks it before it is unmapped. The thread that receives a
segment page-locks it. The thread that drops its last batch unlocks it, maybe after the worker's death. Page-locking
costs about as much as writing the memory once, and segments are recycled.

While any thread captures a graph in global mode, the default, CUDA refuses to page-lock memory, and to tell whether an
event has passed. The refused call also ends that capture. So such calls are made in relaxed mode, which exempts the
calling thread. CUDA's driver keeps that mode
per thread. It is set in the driver itself: torch doesn't expose the runtime's function, and may link it statically
without a symbol. If the driver lacks the function, page-locking during a capture fails. It is tried again when the
memory is used next.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from swift_loader.device.accelerator import current, device_of
from swift_loader.runtime import ProcessOwner
from swift_loader.transport.segments import Segment
from swift_loader.worker.torch_worker import limited_threads

if TYPE_CHECKING:
    import torch

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for all devices."""

_ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""

_NOT_REGISTERED = 713
"""cudaErrorHostMemoryNotRegistered."""

_NOT_DURING_CAPTURE = 900
"""cudaErrorStreamCaptureUnsupported: a thread captures a CUDA graph now."""

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


@cache
def _exchange_mode() -> Callable[[Any], object] | None:
    """Return the driver's function that swaps the thread's capture mode; None: there is none."""
    try:
        exchange: Callable[[Any], object] = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # another driver
        return None
    return exchange


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Return a context in which CUDA accepts this thread's calls while another thread captures a graph."""
    exchange, mode = _exchange_mode(), ctypes.c_int(_RELAXED)
    if exchange is None:
        yield
        return
    try:
        exchange(ctypes.byref(mode))
        yield
    finally:
        if mode.value != _RELAXED:  # else this was the mode before, or an interrupt came before the exchange
            exchange(ctypes.byref(mode))


@contextmanager
def calling(device: torch.device) -> Iterator[None]:
    """Return a context in which any thread of the loader may call an accelerator.

    It is the current one of its kind, as these threads have none, and each rank would open a context on the first one.
    """
    with relaxed_capture() if device.type == "cuda" else nullcontext(), current(device):
        yield


@contextmanager
def pinning(device: torch.device) -> Iterator[None]:
    """Return a context in which a thread that receives batches copies them to torch's page-locked memory.

    With one of torch's threads, as torch does it: else each such thread would start its own team.
    """
    with calling(device), limited_threads(1):
        yield


class CudaRegistry:
    """cudaHostRegister and cudaHostUnregister of the runtime that torch uses, for one device."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch = torch
        self._cudart: Any = torch.cuda.cudart()
        self._device = device_of(device)

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-lock a range. Return the runtime's message, "" on success, or None during a graph capture."""
        try:
            code = self._call("cudaHostRegister", address, nbytes, _PORTABLE)
            if int(code) == _ALREADY_REGISTERED:
                # An earlier mapping was registered at this address. The device still reads its old pages.
                self._call("cudaHostUnregister", address)
                code = self._call("cudaHostRegister", address, nbytes, _PORTABLE)
            if int(code) == _NOT_DURING_CAPTURE:
                return None
            return str(self._cudart.cudaGetErrorString(code)) if int(code) else ""
        except RuntimeError as error:  # from earlier work on the device
            return str(error)

    def unregister(self, address: int) -> bool:
        """Unlock a range. Return whether it isn't page-locked any more.

        May run while the interpreter exits, when the runtime is gone.
        """
        try:
            code = self._call("cudaHostUnregister", address)
            return int(code) in (0, _NOT_REGISTERED)
        except Exception:
            return False

    def _call(self, function: str, *arguments: int) -> Any:
        """Call a function of the runtime; return its error code."""
        with calling(self._device):
            code = getattr(self._cudart, function)(*arguments)
            if int(code) not in (0, _NOT_DURING_CAPTURE):
                with suppress(RuntimeError):
                    # CUDA keeps the last error, and torch raises it after the next kernel. Clear it here, because it is
                    # reported already.
                    self._torch.zeros(1, device=self._device)
            return code


class PageLock:
    """Page-locks segments until that fails once."""

    def __init__(self, registry: CudaRegistry, notices: deque[str] | list[str]) -> None:
        """`notices` get a message for the user if page-locking fails."""
        self._registry = registry
        self._notices = notices
        self._process = ProcessOwner()
        self._works = True

    def lock(self, segment: Segment) -> None:
        """Page-lock a segment until it is unmapped, if it isn't page-locked yet.

        Call it again for each batch: an earlier call may have come during a graph capture. Any thread, but one at a
        time per segment. Blocks for about as long as writing the segment would take.
        """
        if not self._works or segment.before_unmapping is not None:
            return
        # Set the undo first. Else an interrupt between the two calls would let page-locked memory be unmapped, and the
        # device would read the old pages of a later mapping at this address.
        segment.before_unmapping = partial(_unlock, self._registry, self._process, segment.address)
        wrong = self._registry.register(segment.address, segment.nbytes)
        if wrong == "":
            return
        segment.before_unmapping = None
        if wrong is not None:
            self._works = False
            self._notices.append(
                f"page-locking {segment.nbytes} bytes of shared memory failed ({wrong}). Copies to the GPU are slower "
                f"now. Possible reasons: too little free memory, the memory limit of a container or virtual machine, a "
                f"sandbox. `ulimit -l` doesn't matter for NVIDIA's driver. Lower batch_size or data_queue_size "
                f"(DataLoader: prefetch_factor)"
            )

    def __repr__(self) -> str:
        return f"<PageLock {'works' if self._works else 'failed'}>"


def _unlock(registry: CudaRegistry, process: ProcessOwner, address: int) -> bool:
    """Unlock a segment, to which it doesn't refer. Return whether the address may be used again.

    A fork of the trainer has the mapping, but not the device. If unlocking fails, for example at exit, the address must
    not be used again: the device would still read the old memory there.
    """
    return not process.is_here() or registry.unregister(address)
