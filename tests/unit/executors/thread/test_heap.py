from __future__ import annotations

import gc
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from swift_loader.executors.thread.heap import RecycledHeap

MAX_FREE = 3


def lent(heap: RecycledHeap, nbytes: int, value: int) -> NDArray[np.uint8]:
    """Return the memory of a batch of these bytes, all with this value."""
    slot, memory = heap.take(nbytes)
    memory[:nbytes] = value
    return heap.lend(slot, nbytes)


@given(
    st.lists(
        st.tuples(st.integers(1, 40_000), st.integers(0, 7), st.sampled_from(["slice", "reshape", "frombuffer"])),
        min_size=1,
        max_size=60,
    )
)
@settings(deadline=None)
def test_a_slot_is_written_again_only_when_the_last_view_is_gone(steps: list[tuple[int, int, str]]) -> None:
    heap = RecycledHeap(MAX_FREE)
    kept: dict[int, tuple[int, NDArray[Any]]] = {}
    for number, (nbytes, place, how) in enumerate(steps):
        memory = lent(heap, nbytes, number)
        view: NDArray[Any] = memory.view(np.ndarray)[nbytes // 2 :]
        if how == "reshape":
            view = memory.view(np.ndarray).reshape(1, nbytes)[:, ::2]
        elif how == "frombuffer":
            view = np.frombuffer(view, np.uint8)
        kept[place] = number, view
        del memory, view
        for value, part in kept.values():
            assert (part == value % 256).all()
    kept.clear()
    heap.take(1)
    assert len(heap._memories) <= MAX_FREE + 1


def test_a_slot_is_used_again() -> None:
    heap = RecycledHeap(MAX_FREE)
    addresses = set()
    for _ in range(5):
        memory = lent(heap, 10_000, 1)
        addresses.add(memory.ctypes.data)
        del memory
        gc.collect()
    assert len(addresses) == 1


def test_a_batch_that_fills_little_of_its_slot_is_copied_out() -> None:
    heap = RecycledHeap(MAX_FREE)
    big = lent(heap, 1_000_000, 1)
    del big
    slot, memory = heap.take(100)
    memory[:100] = 7
    small = heap.lend(slot, 100)
    assert small.base is None
    memory[:] = 0
    assert (small == 7).all()
