from __future__ import annotations

import gc
import os
import random
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from swift_loader.executors.process import lease as lease_module
from swift_loader.executors.process.forks import Forks
from swift_loader.executors.process.lease import LeaseBook
from swift_loader.transport.arena import Arena
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.codec import decode, encode
from swift_loader.transport.segments import Segment

Bytes = NDArray[np.uint8]


def segment_of(nbytes: int = 4096) -> Segment:
    segment, descriptor = Segment.create(nbytes)
    os.close(descriptor)
    return segment


VIEWS: dict[str, Callable[[Bytes], Any]] = {
    "slice": lambda memory: memory[10:20],
    "strided slice": lambda memory: memory[::7],
    "transpose": lambda memory: memory[:12].reshape(3, 4).T,
    "other dtype": lambda memory: memory[:64].view(np.float32),
    "array over the buffer": lambda memory: np.ndarray((4, 4), np.int32, buffer=memory, offset=64),
    "plain view of a view": lambda memory: np.ndarray((16,), np.uint8, buffer=memory)[2:8].reshape(2, 3)[0],
    "array of a memoryview": lambda memory: np.asarray(memory.data[5:9]),
    "memoryview": lambda memory: memory.data,
    "tensor": lambda memory: torch.frombuffer(memory, dtype=torch.uint8),
    "tensor of an array": lambda memory: torch.from_numpy(np.ndarray((8,), np.uint8, buffer=memory)),
    "transposed tensor": lambda memory: torch.frombuffer(memory, dtype=torch.float32)[:12].view(3, 4).t(),
    "array of a tensor": lambda memory: torch.frombuffer(memory, dtype=torch.int16)[3:9].numpy(),
    "detached tensor": lambda memory: torch.frombuffer(memory, dtype=torch.float32)[:2].requires_grad_().detach(),
    "iterator": lambda memory: iter(memory[:5]),
}

COPIES: dict[str, Callable[[Bytes], Any]] = {
    "copy": lambda memory: memory[10:20].copy(),
    "plain array": lambda memory: np.array(memory, subok=False),
    "array of the same class": lambda memory: memory + 1,
    "list": lambda memory: memory[:10].tolist(),
    "cloned tensor": lambda memory: torch.frombuffer(memory, dtype=torch.uint8).clone(),
    "element": lambda memory: memory[3],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_keeps_the_slot_in_use_and_its_end_gives_it_back_once(name: str) -> None:
    book, segment = LeaseBook(), segment_of()
    view = VIEWS[name](book.lease(3, segment))
    gc.collect()
    assert book.take_ended(10) == []
    del view
    assert book.take_ended(10) == [3]
    gc.collect()
    assert book.take_ended(10) == []


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_does_not_keep_the_slot_in_use(name: str) -> None:
    book = LeaseBook()
    copy = COPIES[name](book.lease(3, segment_of()))
    assert book.take_ended(10) == [3]
    del copy
    assert book.take_ended(10) == []


@given(
    held=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(sorted(VIEWS))), max_size=25), seed=st.integers(0, 999)
)
@settings(max_examples=100, deadline=None)
def test_slots_end_once_each_with_their_last_view_in_any_order(held: list[tuple[int, str]], seed: int) -> None:
    book = LeaseBook()
    segments = [segment_of() for _ in range(5)]
    leases = {slot: book.lease(slot, segment) for slot, segment in enumerate(segments)}
    holders: list[tuple[int, Any]] = [(slot, VIEWS[name](leases[slot])) for slot, name in held]
    holders += leases.items()
    leases.clear()
    left = [sum(1 for slot, _ in holders if slot == wanted) for wanted in range(5)]
    random.Random(seed).shuffle(holders)
    while holders:
        slot, view = holders.pop()
        left[slot] -= 1
        del view
        assert book.take_ended(10) == ([] if left[slot] else [slot])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_slot_can_be_lent_again_and_again(data: st.DataObject) -> None:
    book, segments = LeaseBook(), [segment_of() for _ in range(3)]
    in_use: dict[int, list[Any]] = {}
    for _ in range(data.draw(st.integers(0, 30))):
        slot = data.draw(st.integers(0, 2))
        if slot in in_use:
            del in_use[slot]
            assert book.take_ended(10) == [slot]
        else:
            memory = book.lease(slot, segments[slot])
            in_use[slot] = [
                VIEWS[name](memory) for name in data.draw(st.lists(st.sampled_from(sorted(VIEWS)), min_size=1))
            ]
            del memory
            assert book.take_ended(10) == []


def test_the_parts_of_a_decoded_batch_hold_the_slot_one_by_one() -> None:
    book, segment = LeaseBook(), segment_of(1 << 16)
    arena = Arena(segment.array())
    batch = {
        "x": np.arange(1200.0).reshape(3, 400),
        "y": torch.arange(6).view(2, 3),
        "z": [np.zeros(300, "M8[s]")],
        "n": 3,
    }
    sent = encode(batch, arena, Definitions().number_of)
    arrived = decode(memoryview(sent.meta), sent.num_blocks, book.lease(7, segment), Definitions())
    parts = [arrived["x"].T[1:], arrived["y"].t()[0], arrived["z"][0].view("i8")]
    del arrived
    for _ in range(3):
        gc.collect()
        assert book.take_ended(10) == []
        parts.pop()
    assert book.take_ended(10) == [7]


def test_the_memory_stays_mapped_for_as_long_as_a_view_lives() -> None:
    book, segment = LeaseBook(), segment_of()
    segment.array()[:] = 5
    view = book.lease(0, segment)[100:200]
    mapped = weakref.ref(segment)
    del segment, book
    gc.collect()
    assert view.tolist() == [5] * 100
    assert mapped() is not None
    del view
    gc.collect()
    assert mapped() is None


def test_ended_slots_come_oldest_first_and_no_more_than_asked_for() -> None:
    book = LeaseBook()
    leases = {slot: book.lease(slot, segment_of()) for slot in range(5)}
    for slot in (3, 1, 4):
        del leases[slot]
    assert book.take_ended(2) == [3, 1]
    assert book.take_ended(2) == [4]


def keep(book: LeaseBook, slot: int) -> None:
    lease = book.lease_of(slot)
    assert lease is not None
    lease.keep()


def test_a_book_is_full_when_too_many_slots_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "MAX_HELD_SLOTS", 3)
    book = LeaseBook()
    held, fullness = [], []
    for slot in range(3):
        held.append(book.lease(slot, segment_of()))
        keep(book, slot)
        fullness.append(book.is_full)
    held.pop()
    fullness.append(book.is_full)
    assert fullness == [False, False, True, False]


def test_a_book_is_full_when_too_many_bytes_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "MAX_HELD_BYTES", 3 * 4096)
    book = LeaseBook()
    held, fullness = [], []
    for slot in range(3):
        held.append(book.lease(slot, segment_of()))
        keep(book, slot)
        fullness.append(book.is_full)
    assert fullness == [False, False, True]
    assert repr(book) == "<LeaseBook 3 slots in use, 0 to give back>"


def test_a_book_is_full_when_batches_leave_too_much_of_their_slots_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "MAX_WASTED_BYTES", 8000)
    book = LeaseBook()
    held, fullness = [], []
    for slot in range(4):
        held.append(book.lease(slot, segment_of(), 4096 if slot % 2 else 96))
        keep(book, slot)
        fullness.append(book.is_full)
    assert fullness == [False, False, True, True]
    del held[2:]
    assert not book.is_full


def test_a_slot_whose_batch_nobody_wants_ends_at_once() -> None:
    book = LeaseBook()
    book.release(6)
    assert book.take_ended(10) == [6]


def fork_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a process with threads forks
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def test_a_slot_that_was_in_use_at_a_fork_is_never_written_again() -> None:
    book = LeaseBook()
    before, during = book.lease(0, segment_of()), book.lease(1, segment_of())
    del before
    fork_once()
    after = book.lease(2, segment_of())
    del during, after
    assert book.take_ended(10) == [0, 2]
    assert book.take_shared(10) == [1]
    assert book.take_shared(10) == []


def test_a_slot_that_is_in_use_while_another_thread_forks_is_never_written_again() -> None:
    forks = Forks()
    seen = {}
    stamp = forks.stamp
    forks.begin()
    seen["from before into it"], middle = forks.may_have_seen(stamp), forks.stamp
    seen["within it"] = forks.may_have_seen(middle)
    forks.end()
    seen["from it on"] = forks.may_have_seen(middle)
    assert all(seen.values()), seen
    assert not forks.may_have_seen(forks.stamp)


def test_forks_of_several_threads_come_one_after_the_other() -> None:
    forks, order = Forks(), []

    def fork() -> None:
        forks.begin()
        order.append("other")
        forks.end()

    other = threading.Thread(target=fork)
    forks.begin()
    other.start()
    assert forks.may_have_seen(forks.stamp), "this thread's is under way"
    assert repr(forks) == "<Forks, one under way>"
    order.append("this")
    forks.end()
    other.join(10)
    assert order == ["this", "other"]
    assert not forks.may_have_seen(forks.stamp)


def test_in_the_child_no_fork_is_under_way() -> None:
    forks = Forks()
    forks.begin()
    forks.forget()
    assert not forks.may_have_seen(forks.stamp)
    assert forks.starting.acquire(timeout=1)
