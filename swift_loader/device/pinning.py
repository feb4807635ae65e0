"""Page-locked host memory: what a GPU reads by itself, while the loop goes on.

Segments are page-locked in the trainer when they are mapped, by the thread that takes in their announcement, and
unlocked before they are unmapped, by the thread that drops the last batch in them. That may be after the workers'
death. Page-locking costs about as much as writing the memory once, and segments are recycled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from swift_loader.transport.segments import Segment

if TYPE_CHECKING:
    import torch

__all__ = ["CudaRegistry", "PageLock", "Registry", "cuda_page_lock"]

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for all devices."""

_NOT_DURING_CAPTURE = 900
"""cudaErrorStreamCaptureUnsupported: somebody is recording a CUDA graph just now."""

Notify = Callable[[str], None]


class Registry(Protocol):
    """Who page-locks memory; the CUDA runtime, or a test's stand-in."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-lock a range; return what is wrong, or nothing; None if it can't be done now, but perhaps later."""
        ...

    def unregister(self, address: int) -> bool:
        """Take it back; return whether that was done. Never raises."""
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

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-lock a range; return the runtime's message, nothing, or None while a graph is being recorded."""
        try:
            return self._call(lambda: self._cudart.cudaHostRegister(address, nbytes, _PORTABLE))
        except RuntimeError as error:  # of something that happened on the device before
            return str(error)

    def unregister(self, address: int) -> bool:
        """Take it back; return whether that was done: not at the interpreter's end, when the runtime may be gone."""
        try:
            return self._call(lambda: self._cudart.cudaHostUnregister(address)) == ""
        except Exception:
            return False

    def _call(self, call: Callable[[], Any]) -> str | None:
        with self._on_device():
            code = call()
            if not int(code):
                return ""
            if int(code) == _NOT_DURING_CAPTURE:
                return None
            text = str(self._cudart.cudaGetErrorString(code))
            with suppress(RuntimeError):
                # The runtime keeps an error for whoever asks next, and torch asks after each kernel: this one is told,
                # and the user's isn't.
                self._touch()
            return text


class PageLock:
    """Page-locks segments as long as that works."""

    def __init__(self, registry: Registry, notify: Notify) -> None:
        """Get ready; `notify` takes what the user is to be told, once, if it fails."""
        self._registry = registry
        self._notify = notify
        self._owner_pid = os.getpid()
        self._works = True

    def lock(self, segment: Segment) -> None:
        """Page-lock a segment until it is unmapped. Any thread; blocks for about as long as writing it would take."""
        if not self._works:
            return
        address = segment.address
        wrong = self._registry.register(address, segment.nbytes)
        if wrong:
            self._works = False
            self._notify(
                f"page-locking {segment.nbytes} bytes of shared memory failed ({wrong}): copies to the GPU take the "
                f"slower path through a buffer of its driver. The system may limit locked memory; see ulimit -l, or "
                f"lower batch_size or data_queue_size"
            )
        if wrong != "":
            return
        registry, owner_pid, getpid = self._registry, self._owner_pid, os.getpid  # at exit, the module may be gone

        def unlock() -> bool:
            # A fork of the trainer has the mapping, but not the device. Where it can't be taken back, while a graph is
            # being recorded, say, the address must not be used again: the device would still see the old memory there.
            return getpid() != owner_pid or registry.unregister(address)

        segment.before_unmapping(unlock)

    def __repr__(self) -> str:
        return f"<PageLock {'works' if self._works else 'failed'}>"


def cuda_page_lock(device: torch.device, notify: Notify) -> PageLock:
    """Return what page-locks memory that a CUDA device reads."""
    return PageLock(CudaRegistry(device), notify)
