from __future__ import annotations

import itertools
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from swift_loader.transport.arena import ALIGNMENT, MIN_FIRST_BYTES, Arena, Block

ARRAY_DTYPES = [np.dtype(dtype) for dtype in ("u1", "f8", "M8[s]", ">i4", "U5", [("a", "i1"), ("b", "f8")])]
TENSOR_DTYPES = [
    torch.uint8,
    torch.bool,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.complex128,
]


def memory_of(nbytes: int) -> NDArray[np.uint8]:
    return np.zeros(nbytes, np.uint8)


@given(capacity=st.integers(0, 1000), wanted=st.lists(st.integers(0, 400), max_size=12))
@settings(max_examples=200, deadline=None)
def test_blocks_are_aligned_and_never_overlap(capacity: int, wanted: list[int]) -> None:
    arena = Arena(memory_of(capacity))
    end = 0
    for nbytes in wanted:
        block = arena.allocate(nbytes)
        assert block.offset % ALIGNMENT == 0
        assert block.offset >= end
        assert len(block.memory) == nbytes
        end = block.offset + nbytes
        assert end <= arena.used < end + ALIGNMENT
    assert ALIGNMENT == 64


@given(capacity=st.integers(0, 1000), wanted=st.lists(st.integers(1, 400), max_size=12))
@settings(max_examples=100, deadline=None)
def test_what_fits_lies_in_the_memory_and_the_rest_elsewhere(capacity: int, wanted: list[int]) -> None:
    memory = memory_of(capacity)
    arena = Arena(memory)
    blocks = [arena.allocate(nbytes) for nbytes in wanted]
    inside = [block.offset + len(block.memory) <= capacity for block in blocks]
    assert [np.shares_memory(block.memory, memory) for block in blocks] == inside
    assert arena.fits == all(inside)


@given(
    capacity=st.integers(0, 1000),
    parts=st.lists(st.binary(max_size=400), max_size=12),
    spare=st.integers(0, 100),
)
@settings(max_examples=200, deadline=None)
def test_moving_to_a_larger_memory_keeps_contents_and_offsets(capacity: int, parts: list[bytes], spare: int) -> None:
    arena = Arena(memory_of(capacity))
    blocks = [arena.place(np.frombuffer(part, np.uint8)) for part in parts]
    larger = memory_of(arena.used + spare)
    arena.move_to(larger)
    assert arena.fits
    for part, block in zip(parts, blocks, strict=True):
        assert larger[block.offset : block.offset + len(part)].tobytes() == part


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (3, 0, 2)])
def test_an_array_has_the_shape_and_dtype_asked_for_and_is_found_again(
    shape: tuple[int, ...],
) -> None:
    for dtype, capacity in itertools.product(ARRAY_DTYPES, (0, 1024)):
        arena = Arena(memory_of(capacity))
        arena.allocate(3)
        array = arena.empty(shape, dtype)
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.flags.c_contiguous
        assert array.flags.writeable
        block = arena.find(array)
        assert block is not None
        assert len(block.memory) == array.nbytes
        assert not array.size or np.shares_memory(block.memory, array)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (3, 0, 2), (1,) * 40])
def test_a_tensor_has_the_shape_and_dtype_asked_for_and_is_found_again(
    shape: tuple[int, ...],
) -> None:
    for dtype, capacity in itertools.product(TENSOR_DTYPES, (0, 1024)):
        arena = Arena(memory_of(capacity))
        arena.allocate(3)
        tensor = arena.empty_tensor(shape, dtype)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        block = arena.find(tensor)
        assert block is not None
        assert len(block.memory) == tensor.nbytes
        assert not tensor.numel() or tensor.data_ptr() == block.memory.ctypes.data


def test_only_what_the_arena_made_is_found() -> None:
    arena = Arena(memory_of(1024))
    array = arena.empty((4,), "f4")
    assert isinstance(arena.find(array), Block)
    assert arena.find(array[:]) is None
    assert arena.find(np.empty(4, "f4")) is None
    assert arena.find(None) is None


@pytest.mark.parametrize("writeable", [True, False])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(3, 4),
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(12).reshape(3, 4)[:, ::2],
        np.array(5.0),
        np.empty((0, 3)),
        np.array([(1, 2.0)], "i4,f8"),
        np.array([1], "M8[s]"),
    ],
    ids=lambda array: f"{array.shape} {array.dtype}",
)
def test_what_is_copied_late_arrives_with_its_values(array: NDArray[Any], writeable: bool) -> None:
    array.flags.writeable = writeable
    order: Literal["C", "F"] = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    arena = Arena(np.empty(0, np.uint8), copies_late=True)
    block = arena.place_array(array, order)
    slot = np.empty(arena.used, np.uint8)
    arena.move_to(slot)
    arrived = np.ndarray(array.shape, array.dtype, slot, block.offset, None, order)
    assert arrived.tobytes() == array.tobytes()
    assert not arena.used or arena.used >= array.nbytes


def test_a_large_first_block_is_in_memory_that_is_asked_for_then() -> None:
    asked: list[int] = []

    def more(nbytes: int) -> NDArray[np.uint8]:
        asked.append(nbytes)
        return memory_of(nbytes + 100)

    arena = Arena(memory_of(0), more=more)
    first, second, third = (arena.allocate(nbytes) for nbytes in (MIN_FIRST_BYTES, 50, MIN_FIRST_BYTES))
    assert asked == [MIN_FIRST_BYTES]
    assert np.shares_memory(first.memory, second.memory.base if second.memory.base is not None else first.memory)
    assert not arena.fits
    assert third.offset == MIN_FIRST_BYTES + ALIGNMENT


def test_a_block_is_separate_if_there_is_no_more_memory() -> None:
    arena = Arena(memory_of(0), more=lambda _: None)
    arena.allocate(MIN_FIRST_BYTES)
    assert not arena.fits
    slot = memory_of(arena.used)
    arena.move_to(slot)
    assert arena.fits


@given(sizes=st.lists(st.integers(0, 300), max_size=10))
def test_pieces_are_what_is_moved(sizes: list[int]) -> None:
    arena = Arena(memory_of(0), copies_late=True)
    for number, size in enumerate(sizes):
        arena.place(np.full(size, number + 1, np.uint8))
    joined = np.concatenate([*arena.pieces()])
    moved = memory_of(arena.used)
    arena.move_to(moved)
    assert (joined == moved).all()
    assert len(joined) == arena.used
