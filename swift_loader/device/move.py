"""Where a loader's batches go, and how they get there, whatever their structure. Runs in the trainer.

    decoded batch ──pack──► Parcel ──pinned──► in page-locked memory       on the thread that decodes
                              └──copied──► on the device                   on the loop's thread, a side stream

Imports torch only if it is needed.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.batch.tree import ATOMS, children, rebuilt
from swift_loader.device.accelerator import device_of, pinning_accelerator, streams_of
from swift_loader.device.pinning import CudaRegistry, PageLock, calling
from swift_loader.device.streams import AcceleratorStream, CopyStream, Transfer
from swift_loader.errors import warn
from swift_loader.transport.slots import Leased

if TYPE_CHECKING:
    import torch

_TENSOR_KINDS = frozenset("biufc")
"""NumPy dtypes that torch may have; text, times and objects stay arrays."""

_ALONE_NBYTES = 1 << 18
"""From this size on, a tensor is copied alone: copying takes longer than asking for it."""

_MAX_SPAN_NBYTES = 1 << 20
"""How much memory of small tensors is copied together, and stays as long as one of them does."""

_TINY_NBYTES = 1 << 12
"""Up to this size, tensors that lie apart are gathered before they are copied."""

_MAX_GAP_NBYTES = 1 << 12
"""How much memory between two tensors is copied with them."""


def to_device(batch: Any, device: torch.device | str | int, dtype: torch.dtype | None = None) -> Any:
    """Return the batch with all tensors and numeric arrays as tensors on `device`. The rest stays the same.

    list, tuple, dict, namedtuple, dataclass and Mapping keep their type, at any depth. An object with a `.to()` method
    moves itself. This doesn't wait for copies from page-locked memory to an accelerator with streams.

    Args:
        batch: What to move.
        device: The target.
        dtype: Floating-point tensors are converted to it on the device, as by `Module.to`. Others keep theirs.
    """
    import torch

    there = torch.device(device)
    is_async = streams_of(there.type) is not None

    def move(tensor: torch.Tensor) -> torch.Tensor:
        # Not to MPS, and not from a GPU to the CPU: nothing tells when such a copy is over.
        return _converted(tensor.to(there, non_blocking=is_async), dtype)

    return _Walk("to", move, partial(_move_object, device=there, is_async=is_async))(batch)


def pin(batch: Any) -> Any:
    """Return the batch with all tensors and numeric arrays as tensors in memory that torch has page-locked.

    Copies them there. Unlike a slot, that memory isn't written again before torch's copies from it to a device are
    over. So the user may drop the batch at any time.
    """
    return _Walk("pin_memory", lambda tensor: tensor.pin_memory(), lambda pinnable: pinnable.pin_memory())(batch)


def as_tensors(batch: Any) -> Any:
    """Return the batch with all numeric arrays as tensors, as `pin` does, but in the same memory."""
    return _Walk("pin_memory", lambda tensor: tensor, lambda pinnable: pinnable)(batch)


def owned(batch: Any, transfer: Transfer, device: torch.device) -> Any:
    """Return the batch with copies of the tensors that are on this kind of device already."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return transfer.own(tensor) if tensor.device.type == device.type else tensor

    if not transfer.wait_for(batch, device.type):
        return batch
    return _Walk("to", own, lambda movable: movable, with_arrays=False)(batch)


def _converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a tensor that is on its device with this dtype, if it has another one of floating point."""
    # Not in one step with the move: it would run on the CPU, before the copy.
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _move_object(movable: Any, device: torch.device, *, is_async: bool) -> Any:
    """Return what an object's `.to()` returns. It needn't wait for its copies, if it can be told so."""
    if is_async:
        with suppress(TypeError):  # it takes no such argument
            return movable.to(device, non_blocking=True)
    return movable.to(device)


class _Walk:
    """Returns a batch with its tensors, numeric arrays and the objects that have a method replaced.

    A class, because a function that calls itself refers to itself: what it holds would stay until the garbage collector
    runs, the batch on the device, too.
    """

    def __init__(
        self,
        method: str,
        on_tensor: Callable[[torch.Tensor], Any],
        on_object: Callable[[Any], Any],
        *,
        with_arrays: bool = True,
    ) -> None:
        import torch

        self._torch = torch
        self._method = method
        self._on_tensor = on_tensor
        self._on_object = on_object
        self._with_arrays = with_arrays

    def __call__(self, part: Any) -> Any:
        kind = type(part)
        if kind in ATOMS or (kind is tuple and ATOMS.issuperset(map(type, part))):
            return part
        if kind is list and ATOMS.issuperset(map(type, part)):
            return part.copy()
        if kind in (np.ndarray, np.memmap):
            array = _plain(part) if self._with_arrays else None
            return part if array is None else self._on_tensor(self._torch.from_numpy(array))
        if isinstance(part, self._torch.Tensor):
            return self._on_tensor(part)
        if not isinstance(part, type) and callable(getattr(part, self._method, None)):
            return self._on_object(part)
        if kind is dict:  # the usual one: 0.3 us instead of 1.4 us
            return {key: self(value) for key, value in part.items()}
        values = children(part)
        return part if values is None else rebuilt(part, [self(value) for value in values])


def _plain(array: NDArray[Any]) -> NDArray[Any] | None:
    """Return the array in a form that torch accepts: writable, with plain strides. None: torch lacks its dtype."""
    dtype = array.dtype
    if dtype.kind not in _TENSOR_KINDS or not dtype.isnative or dtype.char in "gG":  # long doubles
        return None
    if dtype.kind in "iu":
        array = array.view(np.dtype(f"{dtype.kind}{dtype.itemsize}"))  # torch takes no `long long`
    is_odd = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    return array.copy() if is_odd or not array.flags.writeable else array


class Parcel:
    """A batch whose tensors are copied together: a span of memory for all small ones that lie beside each other.

    A batch of 30 labels and masks is then copied by a call or two.
    """

    __slots__ = ("_apart", "_together", "batch", "spans")

    def __init__(
        self, batch: Any, spans: list[torch.Tensor], together: list[tuple[int, Any, list[Any]]], apart: list[Any]
    ) -> None:
        self.batch = batch
        """With all tensors, in the memory of the spans."""
        self.spans = spans
        """What is copied: bytes in which several tensors lie, or a single tensor."""
        self._together = together
        """For each span of bytes and dtype: the numbers of its tensors, with their shapes, strides and offsets."""
        self._apart = apart
        """The numbers of all other tensors, each with the span that it is."""

    @classmethod
    def pack(cls, batch: Any, memory: NDArray[np.uint8] | None = None) -> Parcel:
        """Return a batch as a parcel. `memory`: one that most of its arrays lie in; None: none is known."""
        import torch

        tensors: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        packed = _Walk("to", note, lambda movable: movable)(batch)
        if len(tensors) < 2:  # noqa: PLR2004 - there is nothing to copy together
            return cls(packed, tensors, [], [*enumerate(range(len(tensors)))])
        address, nbytes = (0, 0) if memory is None else (memory.__array_interface__["data"][0], memory.nbytes)
        spans: list[torch.Tensor] = []
        places: dict[tuple[int, Any], list[Any]] = {}
        rest = dict.fromkeys(range(len(tensors)))

        def place(number: int, offset: int) -> None:
            tensor = tensors[number]
            del rest[number]
            where = (number, tensor.shape, tensor.stride(), offset // tensor.itemsize)
            places.setdefault((len(spans), tensor.dtype), []).append(where)

        for begin, end, run in _runs(tensors, address, nbytes):
            for number in run:
                place(number, tensors[number].data_ptr() - begin)
            spans.append(torch.frombuffer((ctypes.c_ubyte * (end - begin)).from_address(begin), dtype=torch.uint8))
        tiny = [number for number in rest if _is_small(tensors[number], _TINY_NBYTES)]
        if len(tiny) > 1:
            tiny.sort(key=lambda number: -tensors[number].itemsize)  # so each one's offset is a multiple of its size
            offset = 0
            for number in tiny:
                place(number, offset)
                offset += tensors[number].nbytes
            spans.append(torch.cat([tensors[number].reshape(-1).view(torch.uint8) for number in tiny]))
        apart = [*zip(rest, count(len(spans)), strict=False)]
        spans += [tensors[number] for number in rest]
        return cls(packed, spans, [(*key, where) for key, where in places.items()], apart)

    def copied(
        self,
        copy: Callable[[torch.Tensor], torch.Tensor],
        on_object: Callable[[Any], Any],
        finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Parcel:
        """Return the same parcel with a copy of each span, and what `finish` makes of each tensor."""
        spans = [copy(span) for span in self.spans]
        tensors = {number: spans[span] for number, span in self._apart}
        for span, dtype, places in self._together:
            whole = spans[span]
            typed = whole[: whole.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            for number, shape, strides, offset in places:
                # Without .data, autograd would take a write to one of them as a write to all.
                tensors[number] = typed.as_strided(shape, strides, offset).data
        if finish is not None:
            tensors = {number: finish(tensor) for number, tensor in tensors.items()}
        following = map(tensors.__getitem__, count())
        batch = _Walk("to", lambda _: next(following), on_object)(self.batch)
        return Parcel(batch, spans, self._together, self._apart)

    def pinned(self) -> Parcel:
        """Return the same parcel in memory that torch has page-locked. Copies it there."""
        return self.copied(lambda span: span.pin_memory(), pin)


def _runs(tensors: list[torch.Tensor], address: int, nbytes: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the runs of small tensors that lie beside each other in the same memory: where they begin and end, and
    their numbers.

    `address`, `nbytes`: a memory that is no storage of torch.
    """
    small = []
    for number, tensor in enumerate(tensors):
        if _is_small(tensor, _ALONE_NBYTES - 1):
            begin = tensor.data_ptr()
            owner = address if address <= begin < address + nbytes else tensor.untyped_storage().data_ptr()
            small.append((owner, begin, number))
    run: list[int] = []
    run_owner = run_begin = run_end = 0
    for owner, begin, number in sorted(small):
        end = begin + tensors[number].nbytes
        is_beside = owner == run_owner and begin - run_end <= _MAX_GAP_NBYTES
        if not is_beside or end - run_begin >= _MAX_SPAN_NBYTES:
            if len(run) > 1:
                yield run_begin, run_end, run
            run, run_owner, run_begin, run_end = [], owner, begin, begin
        # Else torch could make no view there, or a write to one would be a write to both.
        if (begin - run_begin) % tensors[number].itemsize == 0 and begin >= run_end:
            run.append(number)
            run_end = end
    if len(run) > 1:
        yield run_begin, run_end, run


def _is_small(tensor: torch.Tensor, max_nbytes: int) -> bool:
    """Return whether a tensor is plain memory of the CPU, of so many bytes at most, and not empty."""
    import torch

    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.is_cpu:
        return False
    if not 0 < tensor.nbytes <= max_nbytes or tensor.is_nested or not tensor.is_contiguous():
        return False
    return not (tensor.requires_grad or tensor.is_quantized or tensor.is_neg() or tensor.is_conj())


class Target:
    """Where batches go, and how. Moves each host batch once, and records its tensors on the device."""

    def __init__(
        self, device: torch.device | None, custom: Callable[..., Any] | None, dtype: torch.dtype | None
    ) -> None:
        """Move batches to a device. `custom(batch, device)` does it instead, if it is given. None: pin them only.

        Raises `TypeError` if `custom` can't be called, or `dtype` isn't a floating-point dtype or comes with `custom`.
        """
        import torch

        if custom is not None and not callable(custom):
            raise TypeError(f"to_device is a {type(custom).__name__}, which can't be called; give a function, or None")
        if custom is not None and dtype is not None:
            raise TypeError("to_device and dtype were both given; give one: to_device converts by itself")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype={dtype!r} isn't a floating-point dtype of torch; give one, such as torch.bfloat16")
        self._device = device
        self._custom = custom
        self._dtype = dtype
        self._has_streams = device is not None and streams_of(device.type) is not None
        self._pins_for = device if self._has_streams else None
        """For which device batches are page-locked; None: for none."""
        if device is None and (kind := pinning_accelerator()) is not None:
            self._pins_for = device_of(kind)

    @property
    def moves(self) -> bool:
        """Whether batches are moved. Else they are only pinned when they arrive."""
        return self._device is not None

    @property
    def moves_in_background(self) -> bool:
        """Whether a thread of its own may move them."""
        return self._has_streams and self._custom is None

    # On the thread that decodes a batch -------------------------------------------------------------------------------

    def on_arrival(self, notices: deque[str], *, is_locked: bool) -> Callable[[Any, NDArray[np.uint8]], Any] | None:
        """Return what is done with a decoded batch and the memory that it lies in; None: nothing.

        `is_locked`: whether slots are page-locked. `notices` get a message for the user if no memory can be pinned.
        """
        if self._device is None:
            return self._pinned
        if self._custom is not None or not self._has_streams:
            return None
        return partial(self._packed, notices, is_locked=is_locked)

    def _pinned(self, batch: Any, _memory: NDArray[np.uint8]) -> Any:
        if self._pins_for is None:
            return as_tensors(batch)
        with calling(self._pins_for):
            return pin(batch)

    def _packed(self, notices: deque[str], batch: Any, memory: NDArray[np.uint8], *, is_locked: bool) -> Parcel:
        parcel = Parcel.pack(batch, memory)
        if self._pins_for is None or (is_locked and isinstance(memory, Leased)):
            return parcel
        try:
            with calling(self._pins_for):
                return parcel.pinned()
        except RuntimeError as error:
            self._pins_for = None
            notices.append(
                f"no page-locked memory for batches ({error}). Copies to {self._device} are slower now. Possible "
                f"reasons: too little free memory, or torch has none for this kind of device"
            )
            return parcel

    def make_page_lock(self, notices: deque[str]) -> PageLock | None:
        """Return the page-lock for the source memory, which reports failures in `notices`. None: none is needed."""
        if self._device is None or self._device.type != "cuda":
            return None
        return PageLock(CudaRegistry(self._device), notices)

    # On the thread that moves -----------------------------------------------------------------------------------------

    def make_stream(self) -> CopyStream:
        """Return the stream for the copies."""
        return AcceleratorStream(self._device) if self._device is not None and self._has_streams else CopyStream()

    def move(self, batch: Any, transfer: Transfer) -> Any:
        """Return a host batch, or a parcel, there."""
        device, custom, dtype = self._device, self._custom, self._dtype
        assert device is not None, "it moves batches"
        if not self._has_streams:
            return to_device(batch, device, dtype) if custom is None else custom(batch, device)
        if custom is not None:
            moved = custom(owned(batch, transfer, device), device)
            transfer.note(moved, device.type)  # it may have done anything, so its result is searched
            return moved
        kind = device.type

        def copy(span: torch.Tensor) -> torch.Tensor:
            if span.device.type == kind:
                span = transfer.own(span)
            copied = span.to(device, non_blocking=True)
            if dtype is None:
                transfer.note_tensor(copied, kind)
            return copied

        def finish(tensor: torch.Tensor) -> torch.Tensor:
            converted = _converted(tensor, dtype)
            transfer.note_tensor(converted, kind)
            return converted

        def move_object(movable: Any) -> Any:
            transfer.wait_for(movable, kind)
            there = _move_object(movable, device, is_async=True)
            transfer.note(there, kind)
            return there

        parcel = batch if isinstance(batch, Parcel) else Parcel.pack(batch)
        return parcel.copied(copy, move_object, None if dtype is None else finish).batch


def find_target(
    device: Any, custom: Callable[..., Any] | None, dtype: torch.dtype | None, *, pin_memory: bool
) -> Target | None:
    """Return where batches go. None: they stay the same.

    Raises `TypeError` if `custom` can't be called, or comes without a device, or with a dtype.
    """
    for name, value in (("to_device", custom), ("dtype", dtype)):
        if device is None and value is not None:
            raise TypeError(f"{name} was given without a device; give both, or neither")
    if device is not None:
        return Target(device_of(device), custom, dtype)
    if not pin_memory:
        return None
    if pinning_accelerator() is None:
        warn(
            "pin_memory=True has no effect except that arrays become tensors: torch finds no accelerator that reads "
            "page-locked memory. Leave pin_memory out"
        )
    return Target(None, None, None)
