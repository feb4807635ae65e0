"""Reducers for objects of scripts that pickle refuses or gets wrong.

Behind each reducer is the function that undoes it; the pickles call it by name.

Locks and bounded semaphores arrive unlocked, because the threads that hold them aren't sent. A plain semaphore keeps
its counter. Reducers run in the sender, mostly the trainer.
"""

from __future__ import annotations

import copyreg
import ctypes
import dataclasses
import functools
import io
import mmap
import operator
import os
import queue
import struct
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import partial
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np

from swift_loader.transport.by_value import Definitions, is_importable, travels_by_value, update_attributes
from swift_loader.transport.channel import duplicate
from swift_loader.transport.segments import Segment

Reduced = tuple[Any, ...]


@functools.cache
def reducers() -> dict[type, Callable[[Any], Any]]:
    """Return a table from exact type to reducer, with those of copyreg and cloudpickle."""
    import cloudpickle

    table: dict[type, Callable[[Any], Any]] = {
        **copyreg.dispatch_table,
        **cloudpickle.Pickler.dispatch_table,
        type(threading.Lock()): lambda _: (threading.Lock, ()),
        type(threading.RLock()): lambda _: (threading.RLock, ()),
        threading.Condition: lambda condition: (threading.Condition, (condition._lock,)),  # noqa: SLF001
        threading.BoundedSemaphore: lambda limit: (threading.BoundedSemaphore, (limit._initial_value,)),  # noqa: SLF001
        queue.SimpleQueue: _reduce_queue,
        type(dataclasses.MISSING): lambda _: (getattr, (dataclasses, "MISSING")),
        type(dataclasses.KW_ONLY): lambda _: (getattr, (dataclasses, "KW_ONLY")),
        type(dataclasses._HAS_DEFAULT_FACTORY): lambda _: (getattr, (dataclasses, "_HAS_DEFAULT_FACTORY")),  # type: ignore[attr-defined]  # noqa: SLF001
        functools._lru_cache_wrapper: _reduce_cache,  # noqa: SLF001
        weakref.ref: lambda ref: (_new_ref, (ref(),)),
        weakref.WeakKeyDictionary: lambda weak: (weakref.WeakKeyDictionary, (dict(weak),)),
        weakref.WeakValueDictionary: lambda weak: (weakref.WeakValueDictionary, (dict(weak),)),
        ContextVar: _reduce_context_var,
        io.TextIOWrapper: _reduce_stream,
        struct.Struct: lambda packer: (struct.Struct, (packer.format,)),
        memoryview: _reduce_view,
        ctypes.CDLL: _refuse_library,
        typing.NewType: lambda new: _reduce_variable(new, (new.__supertype__,), {}),
    }
    for name in ("ParamSpec", "TypeVarTuple"):  # TypeVarTuple is new in Python 3.11
        if hasattr(typing, name):
            table[getattr(typing, name)] = lambda variable: _reduce_variable(variable, (), {})
    if new_handle := getattr(threading, "_ThreadHandle", None):  # of a thread, from Python 3.13 on
        table[new_handle] = lambda _: (new_handle, ())
    if hasattr(typing, "TypeAliasType"):
        table[typing.TypeAliasType] = _reduce_alias
    return table


def _new_ref(target: Any) -> Any:
    """Return a weak reference to `target`; a dead one if `target` is None."""
    return weakref.ref(set() if target is None else target)  # nothing else holds the set


def _reduce_queue(simple: queue.SimpleQueue[Any]) -> Reduced:
    if not simple.empty():
        raise TypeError("a SimpleQueue that isn't empty can't be sent: its items can't be read; use queue.Queue")
    return queue.SimpleQueue, ()


def _reduce_cache(cached: Any) -> Reduced | str:
    if is_importable(cached):
        return str(cached.__qualname__)
    options = cached.cache_parameters()
    return _new_cache, (cached.__wrapped__, options["maxsize"], options["typed"]), vars(cached)


def _new_cache(function: Any, maxsize: int | None, typed: bool) -> Any:
    """Return `function`, wrapped in an empty `lru_cache`."""
    return functools.lru_cache(maxsize, typed)(function)


def _reduce_context_var(variable: ContextVar[Any]) -> Reduced:
    """Reduce a context variable. If it has a value, that is the default of the receiver's."""
    try:
        return partial(ContextVar, variable.name, default=variable.get()), ()
    except LookupError:  # it has neither a value nor a default
        return ContextVar, (variable.name,)


def _reduce_stream(stream: io.TextIOWrapper) -> Reduced:
    for name in ("stdout", "stderr", "stdin"):
        if stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            return getattr, (sys, name)
    raise TypeError(f"the open file {getattr(stream, 'name', '')!r} can't be sent; open it in the process that uses it")


def _reduce_view(view: memoryview) -> Reduced:
    data: bytes | bytearray = view.tobytes()
    return _new_view, (data if view.readonly else bytearray(data), view.format, view.shape)


def _new_view(data: bytes | bytearray, form: str, shape: tuple[int, ...]) -> memoryview:
    """Return a memoryview of `data` with this format and shape."""
    view = memoryview(data)
    return view if form == "B" and len(shape) == 1 else view.cast(form, shape)  # type: ignore[call-overload]


def _refuse_library(library: ctypes.CDLL) -> Reduced:
    raise TypeError(f"the C library {library._name!r} can't be sent; load it in the process that uses it")  # noqa: SLF001


def _reduce_ctype(kind: type) -> Reduced | None:
    """Reduce a ctypes type without an importable name to the call that returns it from ctypes's cache; else None."""
    metaclass = type(kind)
    if metaclass is type and issubclass(kind, type):  # a metaclass itself
        bases = (ctypes.Structure, ctypes.Union, ctypes.Array, ctypes._Pointer, ctypes._SimpleCData, ctypes._CFuncPtr)  # type: ignore[attr-defined]  # noqa: SLF001
        return next(((type, (base,)) for base in bases if type(base) is kind), None)
    made: Any = kind
    if metaclass is type(ctypes.Array) and hasattr(kind, "_length_"):
        args: tuple[Any, ...] = (made._type_, made._length_)
        return (operator.mul, args) if operator.mul(*args) is kind else None
    if metaclass is type(ctypes._Pointer) and hasattr(kind, "_type_"):  # noqa: SLF001
        return (ctypes.POINTER, (made._type_,)) if ctypes.POINTER(made._type_) is kind else None
    if metaclass is type(ctypes._CFuncPtr) and hasattr(kind, "_argtypes_"):  # type: ignore[attr-defined]  # noqa: SLF001
        args = (made._restype_, *made._argtypes_)
        return (ctypes.CFUNCTYPE, args) if ctypes.CFUNCTYPE(*args) is kind else None
    return None


def _reduce_variable(variable: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Reduced | str:
    """Reduce a `ParamSpec`, a `TypeVarTuple` or a `NewType`."""
    if is_importable(variable):
        return str(variable.__name__)
    kind: Any = type(variable)
    return partial(kind, variable.__name__, *args, **options), (), (None, {"__module__": variable.__module__})


def _reduce_alias(alias: Any) -> Reduced | str:
    """Reduce what `type name = value` creates (Python 3.12 and later)."""
    if is_importable(alias):
        return str(alias.__name__)
    kind: Any = type(alias)
    return partial(kind, alias.__name__, alias.__value__, type_params=alias.__type_params__), ()


def _reduce_local(local: threading.local) -> Reduced:
    """Reduce a `threading.local`. This thread's attributes are sent; others call `__init__` when they use it."""
    return copyreg.__newobj__, (type(local),), dict(vars(local)), None, None, update_attributes  # type: ignore[attr-defined]


def _reduce_member(member: Any) -> Reduced:
    """Reduce a member of an Enum that is sent with its class: the receiver can't look it up in the class yet."""
    base = type(member)._member_type_
    args: tuple[Any, ...] = ()
    if base.__new__ is not object.__new__:
        get_args = getattr(base, "__getnewargs__", None)
        args = (member.value,) if get_args is None else get_args(member)
    return base.__new__, (type(member), *args), dict(vars(member)), None, None, update_attributes


def _reduce_memmap(array: Any) -> Reduced | None:
    """Reduce a mapped array to its file's path; None if the path is another file now, or lacks the array's content."""
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    mode = "r+" if array.mode == "w+" else array.mode
    is_mapped = isinstance(whole, np.memmap) and isinstance(whole.base, mmap.mmap)
    if not is_mapped or mode not in ("r", "r+") or array.filename is None or array.dtype.hasobject:
        return None  # in mode "c" the memory may differ from the file
    begin = whole.__array_interface__["data"][0]
    name = os.fspath(array.filename)
    if not _maps(name, begin):
        return None
    if mode == "r+":
        array.flush()
    start = array.__array_interface__["data"][0] - begin
    file = (os.path.abspath(name), mode, int(whole.offset), whole.nbytes)
    return _new_memmap, (file, array.dtype, array.shape, start, array.strides)


def _maps(name: str, address: int) -> bool:
    """Return whether this process has mapped the file of that name at an address."""
    try:
        there = Path(name).stat()
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                bounds, _, _, device, inode, *_ = line.split(maxsplit=5)
                first, last = (int(bound, 16) for bound in bounds.split("-"))
                if first <= address < last:
                    major, minor = (int(part, 16) for part in device.split(":"))
                    return (os.makedev(major, minor), int(inode)) == (there.st_dev, there.st_ino)
    except OSError:
        return False
    return False


def _new_memmap(
    file: tuple[str, str, int, int], dtype: np.dtype[Any], shape: tuple[int, ...], start: int, strides: tuple[int, ...]
) -> Any:
    """Return a `np.memmap` of the same file.

    `file`: path, mode, offset of the mapping in the file, and its length. `start`: offset of the array in the mapping.
    Offsets, length and strides are in bytes.
    """
    name, mode, offset, nbytes = file
    # Not Python's mmap: it keeps a descriptor (until Python 3.13), which would look like a file that forks share.
    descriptor = os.open(name, (os.O_RDONLY if mode == "r" else os.O_RDWR) | os.O_CLOEXEC)
    segment = Segment.map_file(descriptor, offset + nbytes, writes_through=mode != "r")
    array: Any = np.ndarray.__new__(np.memmap, shape, dtype, segment.memory, offset + start, strides)
    array._mmap, array.filename, array.offset, array.mode = None, Path(name), offset, mode  # noqa: SLF001
    array.flags.writeable = mode != "r"
    return array


_NAMES_OF_TYPES = {id(kind): name for name, kind in vars(types).items() if type(kind) is type}
"""id -> name in `types`, for types such as the one of functions: their `__module__` doesn't contain them."""


def reduce_special(obj: Any, kind: type, definitions: Definitions) -> Any:
    """Reduce an object that needs `isinstance` checks instead of a table by exact type; None if it needs none."""
    if isinstance(obj, Enum):
        return _reduce_member(obj) if travels_by_value(kind) and definitions.number_of(kind) is None else None
    if isinstance(obj, threading.local):
        return _reduce_local(obj)
    if isinstance(obj, np.memmap):
        return _reduce_memmap(obj)
    if isinstance(obj, threading.Thread) and obj.ident is not None:
        raise TypeError("a thread that has been started can't be sent; start it in the process that uses it")
    if isinstance(obj, type) and id(obj) in _NAMES_OF_TYPES:
        return getattr, (types, _NAMES_OF_TYPES[id(obj)])
    popen: Any = get_spawning_popen()
    if popen is not None and kind in ForkingPickler._extra_reducers:  # type: ignore[attr-defined]  # noqa: SLF001
        return _reduce_shared(obj, kind, popen)
    return _reduce_ctype(obj) if isinstance(obj, type) else None


# What multiprocessing hands over to a process that it spawns: locks, queues, connections, memory ---------------------


def _reduce_shared(obj: Any, kind: type, popen: Handover) -> Any:
    """Reduce an object as multiprocessing does while it spawns, or torch.multiprocessing; None if it isn't shared."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(obj, (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage)):
        try:
            is_tensor = isinstance(obj, torch.Tensor)
            storage = obj.untyped_storage() if is_tensor else getattr(obj, "_untyped_storage", obj)  # a typed one warns
            is_shared = storage.device.type == "cpu" and (
                storage.is_shared() or (popen.shares(storage) and getattr(obj, "grad_fn", None) is None)
            )
        except (NotImplementedError, RuntimeError):  # it has no storage, as a sparse one
            is_shared = False
    else:
        is_ctype = isinstance(obj, (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union))  # noqa: SLF001
        is_shared = hasattr(obj, "_wrapper") if is_ctype else kind is not partial and kind not in reducers()
    return ForkingPickler._extra_reducers[kind](obj) if is_shared else None  # type: ignore[attr-defined]  # noqa: SLF001


_MAX_SHARED = 256
"""How many tensors are moved into shared memory, by number of descriptors. Further ones are copied."""

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where torch makes it; nothing is made there here


class Inherited:
    """Stands for a descriptor in a pickle; see `multiprocessing.reduction.DupFd`."""

    received: tuple[int, ...] = ()
    """Those that came with the payload that this process reads. Its thread closes them once it has read it."""

    def __init__(self, place: tuple[int, int, int]) -> None:
        self._number, *self._file = place

    def detach(self) -> int:
        """Return a descriptor, which the caller owns."""
        return duplicate(self.received[self._number])


class Handover:
    """Collects the descriptors of what is pickled. Stands for the `Popen` of multiprocessing's, which would spawn."""

    DupFd = Inherited

    def __init__(self, *, shares_tensors: bool) -> None:
        """`shares_tensors`: move tensors into shared memory, as torch does while it spawns."""
        self._shares_tensors = shares_tensors
        self.descriptors: dict[int, int] = {}
        """Duplicates, by the descriptor in use. Owned."""

    def shares(self, storage: Any) -> bool:
        """Return whether a tensor's memory is to be moved. Each takes a descriptor, and these may run out."""
        if not self._shares_tensors or len(self.descriptors) >= _MAX_SHARED:
            return False
        there = os.statvfs(_SHARED_MEMORY)
        return bool(storage.nbytes() < there.f_bavail * there.f_frsize)

    def duplicate_for_child(self, descriptor: int) -> tuple[int, int, int]:
        """Return the number of a descriptor, and the file, which tells two pickles apart."""
        if descriptor not in self.descriptors:
            self.descriptors[descriptor] = duplicate(descriptor)
        status = os.fstat(descriptor)
        return list(self.descriptors).index(descriptor), status.st_dev, status.st_ino


@contextmanager
def handing_over(*, shares_tensors: bool = False) -> Iterator[Handover]:
    """Let this thread pickle what multiprocessing pickles only while it spawns. Closes descriptors that are left.

    `shares_tensors`: see `Handover`.
    """
    handover = Handover(shares_tensors=shares_tensors)
    set_spawning_popen(handover)  # type: ignore[arg-type]
    try:
        yield handover
    finally:
        set_spawning_popen(None)
        for descriptor in handover.descriptors.values():
            os.close(descriptor)
