from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from swift_loader.executors.process import memory as memory_module
from swift_loader.executors.process.forks import Forks
from swift_loader.executors.process.memory import LeaseBook
from swift_loader.scheduler.delivery import LeaseState
from swift_loader.transport.segments import Segment
from tests.support.helpers import fork_once

pytestmark = pytest.mark.processes

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


@pytest.mark.parametrize("name", [*VIEWS, *COPIES])
def test_a_view_keeps_the_slot_in_use_until_its_end_and_a_copy_does_not(name: str) -> None:
    book = LeaseBook()
    kept = (VIEWS | COPIES)[name](book.lease(3, segment_of()))
    gc.collect()
    assert book.take_returned(10)[0] == ([] if name in VIEWS else [3])
    del kept
    assert book.take_returned(10)[0] == ([3] if name in VIEWS else [])
    gc.collect()
    assert book.take_returned(10)[0] == []


def keep(book: LeaseBook, slot: int) -> None:
    lease = book.lease_of(slot)
    assert lease is not None
    lease.state = LeaseState.KEPT


@pytest.mark.parametrize(
    ("limit", "value", "fullness"),
    [
        ("MAX_HELD_SLOTS", 3, [False, False, True, True]),
        ("MAX_HELD_BYTES", 3 * 4096, [False, False, True, True]),
        ("MAX_WASTED_BYTES", 8000, [False, False, True, True]),
    ],
)
def test_a_book_is_full_when_too_much_is_held_and_not_after_some_has_ended(
    limit: str, value: int, fullness: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, limit, value)
    book, held, found = LeaseBook(), [], []
    for slot in range(4):
        held.append(book.lease(slot, segment_of(), 4096 if slot % 2 or limit != "MAX_WASTED_BYTES" else 96))
        keep(book, slot)
        found.append(book.is_full)
    assert found == fullness
    del held[1:]
    assert not book.is_full


class Interrupting(deque[int]):
    """Another thread does something right after a slot was added."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.then = then

    def append(self, slot: int) -> None:
        super().append(slot)
        self.then()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_slot_that_comes_back_may_be_lent_at_once(is_shared: bool) -> None:
    book, segment = LeaseBook(), segment_of()
    held: list[Bytes] = []
    interrupting = Interrupting(lambda: held.append(book.lease(0, segment)) if not held else None)
    first = book.lease(0, segment)
    if is_shared:
        book.lease_of(0).keep()  # type: ignore[union-attr]
        fork_once()
        book._shared = interrupting
    else:
        book._ended = interrupting
    del first
    assert book.lease_of(0) is not None
    assert 0 in book.not_free()


def test_a_slot_that_the_user_had_at_a_fork_is_never_written_again() -> None:
    book = LeaseBook()
    before, during, ready = (book.lease(slot, segment_of()) for slot in range(3))
    for slot in (0, 1):
        book.lease_of(slot).keep()  # type: ignore[union-attr]
    del before
    fork_once()
    after = book.lease(3, segment_of())
    for slot in (2, 3):
        book.lease_of(slot).keep()  # type: ignore[union-attr]
    del during, ready, after
    assert book.take_returned(10) == ([0, 2, 3], [1])
    assert book.take_returned(10) == ([], [])


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
