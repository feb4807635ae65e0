"""Which slots a worker gets back, and which are given up."""

from __future__ import annotations

import os
from typing import Any

from swift_loader.executors.process.memory import WorkerMemory
from swift_loader.transport.segments import Segment

SMALL, LARGE = 4096, 8192


class Worker:
    """The memory of a worker that needs three slots."""

    def __init__(self, *sizes: int) -> None:
        self.memory = WorkerMemory(max_segments=3)
        self.batches: dict[int, Any] = {}
        for slot, nbytes in enumerate(sizes):
            segment, descriptor = Segment.create(nbytes)
            os.close(descriptor)
            self.memory._segments[slot] = segment
            self.batches[slot] = self.memory._leases.lease(slot, segment)

    def drop(self, *slots: int) -> tuple[list[int], list[int]]:
        """Drop some batches; return the slots that go back, and those that are given up."""
        for slot in slots:
            del self.batches[slot]
        released, retired, given_up = self.memory.take_returned()
        assert len(given_up) == len(retired)
        return released, retired

    def hand_out(self, *slots: int) -> None:
        for slot in slots:
            lease = self.memory._leases.lease_of(slot)
            assert lease is not None
            lease.take()


def test_of_slots_that_are_too_many_the_smallest_goes_and_not_the_one_that_comes_back_next() -> None:
    worker = Worker(LARGE, SMALL, LARGE, LARGE)
    assert worker.drop(0) == ([0], [])
    assert worker.drop(1) == ([], [1])
    assert worker.drop(2, 3) == ([2, 3], [])


def test_of_slots_of_one_size_that_are_too_many_those_go_that_come_back() -> None:
    worker = Worker(*[LARGE] * 6)
    assert worker.drop(4, 0) == ([], [4, 0])
    assert worker.drop(1, 2) == ([2], [1])


def test_slots_whose_batches_the_loop_has_are_not_too_many() -> None:
    worker = Worker(*[LARGE] * 9)
    worker.hand_out(0, 1, 2, 3, 4, 5)
    assert worker.drop(6, 7, 8) == ([6, 7, 8], [])
    assert worker.drop(0) == ([], [0])


def test_closing_leaves_the_memory_to_whoever_asked_for_it() -> None:
    worker = Worker(SMALL, LARGE)
    assert sorted(segment.nbytes for segment in worker.memory.take_segments()) == [SMALL, LARGE]
    assert worker.memory.take_segments() == []
