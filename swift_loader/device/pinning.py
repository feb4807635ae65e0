"""Page-locked host memory: what a GPU reads by itself, while the loop goes on.

Segments are page-locked in the trainer when they are mapped, by the thread that takes in their announcement, and
unlocked before they are unmapped, by the thread that drops the last batch in them. That may be after the workers'
death. Page-locking costs about as much as writing the memory once, and segments are recycled.

CUDA refuses to page-lock memory while any thread captures a graph in global mode, the default, and the refused call
ends that capture. So each call is made in relaxed mode, which exempts the thread that makes it. CUDA's driver keeps
that mode for each thread. It is set in the driver itself, because torch doesn't expose the call of the runtime, and
that may be linked into torch without a name. If the driver lacks the call, page-locking during a capture fails as
before, and is tried again when the memory is used next.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from swift_loader.transport.segments import Segment

if TYPE_CHECKING:
    import torch

__all__ = ["CudaRegistry", "PageLock", "Registry", "cuda_page_lock", "relaxed_capture"]

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for all devices."""

_ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""

_NOT_REGISTERED = 713
"""cudaErrorHostMemoryNotRegistered."""

_NOT_DURING_CAPTURE = 900
"""cudaErrorStreamCaptureUnsupported: somebody is recording a CUDA graph just now."""

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""

Notify = Callable[[str], None]


class Registry(Protocol):
    """Who page-locks memory; the CUDA runtime, or a test's fake."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-lock a range; return what is wrong, or nothing; None if it can't be done now, but perhaps later."""
        ...

    def unregister(self, address: int) -> bool:
        """Take it back; return whether the range isn't page-locked any more. Never raises."""
        ...


class CudaRegistry:
    """cudaHostRegister and cudaHostUnregister of the runtime that torch uses, for one device."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        # Threads of ours have no device yet: without this, each trainer would open a context on the first GPU.
        self._on_device: Callable[[], AbstractContextManager[Any]] = lambda: torch.cuda.device(index)
        self._touch: Callable[[], Any] = lambda: torch.zeros(1, device=torch.device("cuda", index))
        self._exchange = _find_exchange()

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-lock a range; return the runtime's message, nothing, or None while a graph is being recorded."""
        try:
            code = self._call(lambda: self._cudart.cudaHostRegister(address, nbytes, _PORTABLE))
            if int(code) == _ALREADY_REGISTERED:
                # As what was mapped here before. The device still reads the pages of then.
                self._call(lambda: self._cudart.cudaHostUnregister(address))
                code = self._call(lambda: self._cudart.cudaHostRegister(address, nbytes, _PORTABLE))
            if int(code) == _NOT_DURING_CAPTURE:
                return None
            return str(self._cudart.cudaGetErrorString(code)) if int(code) else ""
        except RuntimeError as error:  # of something that happened on the device before
            return str(error)

    def unregister(self, address: int) -> bool:
        """Take it back; return whether the range isn't page-locked any more.

        It may be at the interpreter's end, when the runtime is gone.
        """
        try:
            code = self._call(lambda: self._cudart.cudaHostUnregister(address))
            return int(code) in (0, _NOT_REGISTERED)
        except Exception:
            return False

    def _call(self, call: Callable[[], Any]) -> Any:
        """Make a call; return its error code."""
        with relaxed_capture(self._exchange), self._on_device():
            code = call()
            if int(code) not in (0, _NOT_DURING_CAPTURE):
                with suppress(RuntimeError):
                    # The runtime keeps an error for whoever asks next, and torch asks after each kernel: this one is
                    # told, and the user's isn't.
                    self._touch()
            return code


@contextmanager
def relaxed_capture(exchange: Callable[[Any], Any]) -> Iterator[None]:
    """Exempt this thread from what CUDA forbids during another thread's capture, within the context.

    Args:
        exchange: Swaps the thread's capture mode with the one that a pointer to an int points to.
    """
    mode = ctypes.c_int(_RELAXED)
    try:
        exchange(ctypes.byref(mode))
        yield
    finally:
        if mode.value != _RELAXED:  # else it was in this mode before, or an interrupt came before the exchange
            exchange(ctypes.byref(mode))


def _find_exchange() -> Callable[[Any], Any]:
    """Return the driver's cuThreadExchangeStreamCaptureMode; if there is none, what leaves the mode as it is."""
    try:
        exchange: Callable[[Any], Any] = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # another driver
        return lambda _: 0
    return exchange


class PageLock:
    """Page-locks segments as long as that works."""

    def __init__(self, registry: Registry, notify: Notify) -> None:
        """Get ready; `notify` takes what the user is to be told, once, if it fails."""
        self._registry = registry
        self._notify = notify
        self._owner_pid = os.getpid()
        self._works = True

    def lock(self, segment: Segment) -> None:
        """Page-lock a segment until it is unmapped, if it isn't yet.

        To be called again with each batch in it: the first time may have been during the capture of a graph. Any
        thread, but one at a time for each segment. Blocks for about as long as writing the segment would take.
        """
        if not self._works or segment.has_last_step:
            return
        # The undo comes first. An interrupt between the two would leave memory page-locked that is then unmapped, and
        # the device would read its old pages when something else is mapped there.
        segment.before_unmapping(self._undo_of(segment.address))
        wrong = self._registry.register(segment.address, segment.nbytes)
        if wrong == "":
            return
        segment.before_unmapping(None)
        if wrong is not None:
            self._works = False
            self._notify(
                f"page-locking {segment.nbytes} bytes of shared memory failed ({wrong}): copies to the GPU take the "
                f"slower path through a buffer of its driver. The reason may be too little free memory, the memory "
                f"limit of a container or virtual machine, or a sandbox; NVIDIA's driver doesn't obey ulimit -l. "
                f"Lower batch_size or data_queue_size"
            )

    def _undo_of(self, address: int) -> Callable[[], bool]:
        """Return what unlocks a segment, which mustn't keep it; it returns whether the address may be used again."""
        registry, owner_pid, getpid = self._registry, self._owner_pid, os.getpid  # at exit, the module may be gone

        def unlock() -> bool:
            # A fork of the trainer has the mapping, but not the device. Where it can't be taken back, at exit, say, the
            # address must not be used again: the device would still see the old memory there.
            return getpid() != owner_pid or registry.unregister(address)

        return unlock

    def __repr__(self) -> str:
        return f"<PageLock {'works' if self._works else 'failed'}>"


def cuda_page_lock(device: torch.device, notify: Notify) -> PageLock:
    """Return what page-locks memory that a CUDA device reads."""
    return PageLock(CudaRegistry(device), notify)
