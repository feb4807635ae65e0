from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from swift_loader.executors.ray import memory as module
from swift_loader.executors.ray.memory import MAX_INLINE_BYTES, MAX_SMALL_BYTES, ArrivalStore
from swift_loader.transport.messages import Batch
from swift_loader.transport.segments import Segment
from tests.support.forked import run_in_fork

LARGE = 2 * MAX_INLINE_BYTES


@pytest.fixture(autouse=True)
def _every_address_is_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_writable_store_at", lambda address: (address, address + (1 << 40)))


def arrived(nbytes: int, value: int = 7) -> NDArray[np.uint8]:
    """Return an array as Ray gives it."""
    array = np.full(nbytes, value, np.uint8)
    array.flags.writeable = False
    return array


def announcement(nbytes: int, slot: int = 0) -> Batch:
    return Batch(1, 0, slot, 1, b"", 0, 0, 1, 0, 0, 0, used_nbytes=nbytes)


def store(max_viewed: int = 10 * LARGE, max_free: int = 2, **options: Any) -> ArrivalStore:
    return ArrivalStore(max_viewed, max_free, options.get("on_segment"))


def test_a_large_batch_is_a_writable_view_of_the_object_store() -> None:
    source = arrived(LARGE)
    kept = store().keep(source)
    kept[3] = 1
    assert source[3] == 1
    assert kept.ctypes.data == source.ctypes.data


@pytest.mark.parametrize("nbytes", [MAX_SMALL_BYTES, MAX_INLINE_BYTES])
def test_a_batch_that_comes_with_the_answer_is_copied(nbytes: int) -> None:
    source = arrived(nbytes)
    kept = store().keep(source)
    kept[3] = 1
    assert source[3] == 7


def test_the_object_is_kept_as_long_as_a_view_of_a_view_exists() -> None:
    source = arrived(LARGE)
    references = _count(source)
    part = store().keep(source)[10:20].view(np.int8)[::2]
    assert _count(source) > references
    del part
    assert _count(source) == references


def _count(array: object) -> int:
    gc.collect()
    return len(gc.get_referrers(array))


def test_views_hold_a_part_of_the_object_store_and_further_batches_are_copied() -> None:
    arrivals = store(max_viewed=2 * LARGE)
    sources = [arrived(LARGE, value) for value in range(3)]
    kept = [arrivals.keep(source) for source in sources]
    assert [a.ctypes.data == b.ctypes.data for a, b in zip(kept, sources, strict=True)] == [True, True, False]
    assert [int(one[0]) for one in kept] == [0, 1, 2]
    del kept[0]
    assert arrivals.keep(sources[0]).ctypes.data == sources[0].ctypes.data


def test_for_a_device_batches_are_copied_into_recycled_slots_that_it_is_told_of() -> None:
    told: list[Segment] = []
    arrivals = store(on_segment=told.append)
    first = arrivals.keep(arrived(LARGE, 1))
    second = arrivals.keep(arrived(LARGE, 2))
    assert [int(first[0]), int(second[0])] == [1, 2]
    address = first.ctypes.data
    del first
    third = arrivals.keep(arrived(LARGE, 3))
    assert third.ctypes.data == address
    assert len(told) == 3
    assert told[2] is told[0]
    assert int(second[0]) == 2


@pytest.mark.processes
def test_a_fork_frees_no_object_of_the_trainer() -> None:
    source = arrived(LARGE)
    kept = [store().keep(source)]

    def drop() -> None:
        kept.clear()
        assert module._FROM_FORKS[0] is source

    assert run_in_fork(drop) == 0
