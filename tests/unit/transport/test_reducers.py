"""Objects that pickle refuses or gets wrong, and what arrives in their place."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import io
import pickle
import queue
import struct
import sys
import threading
import types
import typing
import weakref
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swift_loader.transport.reducers import reduce_ctype, reduce_local, reduce_member, reduce_memmap, reducers


def carried(thing: Any) -> Any:
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5)
    pickler.dispatch_table = reducers()
    pickler.dump(thing)
    return pickle.loads(stream.getvalue())


def rebuilt(reduced: Any) -> Any:
    """Return what an unpickler makes of a reduced object."""
    function, args, state, _, _, update = (*reduced, *[None] * 6)[:6]
    made = function(*args)
    if state is not None:
        update(made, state)
    return made


def double(x: int) -> int:
    return 2 * x


def test_locks_arrive_unlocked() -> None:
    for make in (threading.Lock, threading.RLock, threading.Condition):
        lock = make()
        with lock:
            assert carried(lock).acquire(blocking=False)


def test_a_bounded_semaphore_arrives_free_and_an_event_as_it_is() -> None:
    semaphore = threading.BoundedSemaphore(2)
    semaphore.acquire()
    arrived = carried(semaphore)
    assert [arrived.acquire(blocking=False) for _ in range(3)] == [True, True, False]
    event = threading.Event()
    assert not carried(event).is_set()
    event.set()
    assert carried(event).is_set()


def test_a_queue_arrives_empty_or_not_at_all() -> None:
    simple: queue.SimpleQueue[int] = queue.SimpleQueue()
    assert carried(simple).empty()
    simple.put(3)
    with pytest.raises(TypeError, match="a SimpleQueue that isn't empty"):
        carried(simple)


def test_a_cache_arrives_empty_with_its_options() -> None:
    cached = functools.lru_cache(7, typed=True)(double)
    cached(3)
    function, args, _ = reducers()[type(cached)](cached)
    arrived = function(*args)
    assert arrived(4) == 8
    assert arrived.cache_parameters() == {"maxsize": 7, "typed": True}
    assert arrived.cache_info().currsize == 1


@pytest.mark.parametrize("name", ["MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY"])
def test_the_marks_of_dataclasses_stay_themselves(name: str) -> None:
    mark = getattr(dataclasses, name)
    assert carried(mark) is mark


def test_weak_containers_hold_what_they_held() -> None:
    key = value = threading.Event
    values: Any = weakref.WeakValueDictionary({"a": value})
    keys: Any = weakref.WeakKeyDictionary({key: 1})
    assert dict(carried(values)) == {"a": value}
    assert dict(carried(keys)) == {key: 1}
    assert carried(weakref.ref(value))() is value


def test_a_dead_reference_arrives_dead() -> None:
    dead = weakref.ref(threading.Event())
    assert dead() is None
    assert carried(dead)() is None


def test_a_context_variable_has_its_value_as_default() -> None:
    variable: ContextVar[int] = ContextVar("variable")
    with pytest.raises(LookupError):
        carried(variable).get()
    variable.set(5)
    assert (carried(variable).get(), carried(variable).name) == (5, "variable")


def test_standard_streams_arrive_and_files_do_not(tmp_path: Path) -> None:
    assert carried(sys.__stdout__) in (sys.stdout, sys.__stdout__)
    with (tmp_path / "notes").open("w") as file, pytest.raises(TypeError, match="the open file"):
        carried(file)


@pytest.mark.parametrize("writable", [False, True])
def test_a_memoryview_keeps_form_and_writability(writable: bool) -> None:
    data = bytearray(struct.pack("6i", *range(6)))
    view = memoryview(data if writable else bytes(data)).cast("i", (2, 3))
    arrived = carried(view)
    assert (arrived.tolist(), arrived.format, arrived.readonly) == ([[0, 1, 2], [3, 4, 5]], "i", not writable)


def test_a_struct_and_code_arrive() -> None:
    assert carried(struct.Struct("<IQ")).size == 12
    assert types.FunctionType(carried(double.__code__), {})(4) == 8


def test_type_variables_keep_name_and_bounds() -> None:
    bound, constrained = typing.TypeVar("bound", bound=int), typing.TypeVar("constrained", int, str)
    assert (carried(bound).__name__, carried(bound).__bound__) == ("bound", int)
    assert carried(constrained).__constraints__ == (int, str)
    new = typing.NewType("new", int)
    assert (carried(new).__name__, carried(new).__supertype__) == ("new", int)
    assert carried(typing.ParamSpec("parameters")).__name__ == "parameters"


def test_a_library_keeps_its_functions_types() -> None:
    library = ctypes.CDLL(None)
    library.abs.restype, library.abs.argtypes = ctypes.c_long, (ctypes.c_int,)
    arrived = carried(library)
    assert (arrived.abs.restype, tuple(arrived.abs.argtypes), arrived.abs(-3)) == (ctypes.c_long, (ctypes.c_int,), 3)


@pytest.mark.parametrize(
    "kind",
    [
        ctypes.c_int * 3,
        ctypes.POINTER(ctypes.c_double),
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p),
        type(ctypes.Structure),
    ],
)
def test_a_type_that_ctypes_made_is_the_same_type(kind: type) -> None:
    reduced = reduce_ctype(kind)
    assert reduced is not None
    assert rebuilt(reduced) is kind


def test_other_types_are_left_to_pickle() -> None:
    assert reduce_ctype(int) is None
    assert reduce_ctype(ctypes.c_int) is None


def test_this_threads_attributes_of_a_local_arrive() -> None:
    local = threading.local()
    local.x = [1]
    assert vars(rebuilt(reduce_local(local))) == {"x": [1]}


def test_a_member_is_made_without_its_class_being_complete() -> None:
    import enum

    class Color(int, enum.Enum):
        RED = 3

    made = rebuilt(reduce_member(Color.RED))
    assert (type(made), made._name_, made._value_, int(made)) == (Color, "RED", 3, 3)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_mapped_array_arrives_as_a_mapping_of_the_same_file(mode: Any, tmp_path: Path) -> None:
    file = tmp_path / "data"
    np.arange(100, dtype=np.int32).tofile(file)
    mapped = np.memmap(file, np.int32, mode, offset=40, shape=(9, 10))[2:5, ::3]
    arrived = rebuilt(reduce_memmap(mapped))
    assert isinstance(arrived, np.memmap)
    assert (arrived == mapped).all()
    assert arrived.flags.writeable == (mode == "r+")


def test_a_mapped_array_whose_file_is_another_now_is_not_sent_by_name(tmp_path: Path) -> None:
    file = tmp_path / "data"
    np.arange(100, dtype=np.int32).tofile(file)
    mapped, private = np.memmap(file, np.int32, "r"), np.memmap(file, np.int32, "c")
    assert reduce_memmap(private) is None
    file.unlink()
    np.zeros(100, np.int32).tofile(file)
    assert reduce_memmap(mapped) is None
