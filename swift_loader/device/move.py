"""Where a loader's batches go, and how they get there, whatever their structure. Runs in the trainer.

    decoded batch ──pack──► Parcel ──► in page-locked memory, if it isn't     on the thread that decodes it
                              └──copied──► on the device, on a side stream    on the thread that moves, or the loop's

Imports torch only if it is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swift_loader.batch.tree import ATOMS, children, rebuilt
from swift_loader.device.accelerator import device_of, pinning_accelerator, streams_of
from swift_loader.device.pinning import CudaRegistry, PageLock, pinning
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

_ALIGNMENT = 16
"""What kernels ask for, in bytes."""

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
        try:
            return movable.to(device, non_blocking=True)
        except TypeError as error:
            if "non_blocking" not in str(error):
                raise
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
        self.has_left = False
        """Whether a part was left as it is that may have memory of its own."""

    def __call__(self, part: Any) -> Any:
        kind = type(part)
        if kind in ATOMS or (kind is tuple and ATOMS.issuperset(map(type, part))):
            return part
        if kind is list and ATOMS.issuperset(map(type, part)):
            return part.copy()
        if kind in (np.ndarray, np.memmap):
            array = _plain(part) if self._with_arrays else None
            self.has_left |= array is None
            return part if array is None else self._on_tensor(self._torch.from_numpy(array))
        if isinstance(part, self._torch.Tensor):
            return self._on_tensor(part)
        if not isinstance(part, type) and callable(getattr(part, self._method, None)):
            self.has_left = True
            return self._on_object(part)
        if kind is dict:  # the usual one: 0.3 us instead of 1.4 us
            return {key: self(value) for key, value in part.items()}
        values = children(part)
        self.has_left |= values is None and not isinstance(part, np.generic)
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

    __slots__ = ("_places", "batch", "is_all_moved", "spans")

    def __init__(self, batch: Any, spans: list[torch.Tensor], places: list[Any], *, is_all_moved: bool) -> None:
        self.batch = batch
        """With all tensors, in the memory of the spans."""
        self.spans = spans
        """What is copied: bytes in which several tensors lie, or a single tensor."""
        self._places = places
        """For each tensor, in the order of the batch: its span, and its dtype, shape, strides and offset there, in
        elements. Without a dtype, the span is the tensor."""
        self.is_all_moved = is_all_moved
        """Whether nothing of the batch's memory is handed to the user, such as text or what an object keeps."""

    @classmethod
    def pack(cls, batch: Any, memory: NDArray[np.uint8] | None = None) -> Parcel:
        """Return a batch as a parcel. `memory`: one that most of its arrays lie in; None: none is known."""
        import torch

        tensors: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        walk = _Walk("to", note, lambda movable: movable)
        packed = walk(batch)
        spans: list[torch.Tensor] = []
        places: list[Any] = [None] * len(tensors)
        if len(tensors) > 1:
            address, nbytes = (0, 0) if memory is None else (memory.__array_interface__["data"][0], memory.nbytes)
            for owner, run in _runs(tensors, address, nbytes):
                begin, last = tensors[run[0]].data_ptr(), tensors[run[-1]]
                for number in run:
                    places[number] = _place(len(spans), tensors[number], tensors[number].data_ptr() - begin)
                first, end = begin - owner, last.data_ptr() + last.nbytes - owner
                if memory is not None and owner == address:
                    spans.append(torch.from_numpy(memory.view(np.ndarray)[first:end]))
                else:
                    whole = last.untyped_storage()
                    spans.append(torch.empty(0, dtype=torch.uint8).set_(whole, first, (end - first,), (1,)))
            tiny = [number for number, one in enumerate(tensors) if not places[number] and _is_small(one, _TINY_NBYTES)]
            if len(tiny) > 1:
                padding, pieces, offset = torch.zeros(_ALIGNMENT, dtype=torch.uint8), list[torch.Tensor](), 0
                for number in tiny:
                    tensor, num_more = tensors[number], -tensors[number].nbytes % _ALIGNMENT
                    places[number] = _place(len(spans), tensor, offset)
                    flat = tensor.as_strided((tensor.numel(),), (1,))  # one element may have any stride
                    pieces += (flat.view(torch.uint8), padding[:num_more])
                    offset += tensor.nbytes + num_more
                spans.append(torch.cat(pieces))
        for number, tensor in enumerate(tensors):
            if places[number] is None:
                places[number] = (len(spans), None, None, None, 0)
                spans.append(tensor)
        return cls(packed, spans, places, is_all_moved=not walk.has_left)

    def copied(
        self,
        spans: list[torch.Tensor],
        on_object: Callable[[Any], Any],
        finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Parcel:
        """Return the same parcel with these copies of its spans, and what `finish` makes of each tensor."""
        typed: dict[tuple[int, Any], torch.Tensor] = {}
        tensors: list[torch.Tensor] = []
        for number, dtype, shape, strides, offset in self._places:
            tensor = spans[number]
            if dtype is not None:
                whole = typed.get((number, dtype))
                if whole is None:
                    num_fitting = tensor.numel() // dtype.itemsize * dtype.itemsize
                    whole = typed[number, dtype] = tensor[:num_fitting].view(dtype)
                # Without .data, autograd would take a write to one of them as a write to all.
                tensor = whole.as_strided(shape, strides, offset).data
            tensors.append(tensor if finish is None else finish(tensor))
        following = iter(tensors)
        batch = _Walk("to", lambda _: next(following), on_object)(self.batch)
        return Parcel(batch, spans, self._places, is_all_moved=self.is_all_moved)


def _place(span: int, tensor: torch.Tensor, offset: int) -> tuple[Any, ...]:
    """Return a tensor's place at so many bytes in a span."""
    return span, tensor.dtype, tensor.shape, tensor.stride(), offset // tensor.itemsize


def _runs(tensors: list[torch.Tensor], address: int, nbytes: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the runs of small tensors that lie beside each other in the same memory: its address, and their numbers.

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
                yield run_owner, run
            run, run_owner, run_begin, run_end = [], owner, begin, begin
        # Else kernels would refuse it or be slow, or a write to one would be a write to both.
        if (begin - run_begin) % _ALIGNMENT == 0 and begin >= run_end:
            run.append(number)
            run_end = end
    if len(run) > 1:
        yield run_owner, run


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
        with pinning(self._pins_for):
            return pin(batch)

    def _packed(self, notices: deque[str], batch: Any, memory: NDArray[np.uint8], *, is_locked: bool) -> Parcel:
        parcel, device = Parcel.pack(batch, memory), self._pins_for
        if device is None or (is_locked and isinstance(memory, Leased)):
            return parcel
        with pinning(device):
            try:
                spans = [span.pin_memory() for span in parcel.spans]
            except RuntimeError as error:
                self._pins_for = None
                notices.append(
                    f"no page-locked memory for batches ({error}). Copies to {device} are slower now. Too little "
                    f"memory is free, or torch has none of this kind for the device"
                )
                return parcel
            return parcel.copied(spans, pin)

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
        spans = [copy(span) for span in parcel.spans]
        return parcel.copied(spans, move_object, None if dtype is None else finish).batch


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
