"""Which slots a worker gets back, and which are given up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from swift_loader.engine.ledger import Assignment
from swift_loader.engine.worker import WorkerHandle
from swift_loader.transport.channel import Channel
from swift_loader.transport.frames import unpack_frame
from swift_loader.transport.messages import Task
from swift_loader.transport.segments import Segment

SMALL, LARGE = 4096, 8192


class Worker:
    """A handle on a worker that only listens; it needs three slots."""

    def __init__(self, *sizes: int) -> None:
        ours, self.theirs = Channel.pair()
        process: Any = SimpleNamespace(close=lambda: None)
        reader: Any = None
        self.handle = WorkerHandle(0, 0, ours, process, reader, keep=3)
        self.memory: dict[int, Any] = {}
        for slot, nbytes in enumerate(sizes):
            segment, descriptor = Segment.create(nbytes)
            os.close(descriptor)
            self.handle._segments[slot] = segment
            self.memory[slot] = self.handle._leases.begin(slot, segment)

    def drop(self, *slots: int) -> tuple[list[int], list[int]]:
        """Drop some batches, and send a task; return the slots that go back, and those that are given up."""
        for slot in slots:
            del self.memory[slot]
        given_up = self.handle.send(Assignment(0, 1, 0, 0, 0))
        received = self.theirs.receive(wait=False)
        assert received is not None
        task = Task.unpack(unpack_frame(received.data))
        assert len(given_up) == len(task.retired)
        return list(task.released), list(task.retired)

    def hand_out(self, *slots: int) -> None:
        for slot in slots:
            loan = self.handle._leases.loan(slot)
            assert loan is not None
            loan.take()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for worker in made:
        worker.handle.close()
        worker.theirs.close()


def test_of_slots_that_are_too_many_the_smallest_goes_and_not_the_one_that_comes_back_next(
    workers: list[Worker],
) -> None:
    workers.append(worker := Worker(LARGE, SMALL, LARGE, LARGE))
    assert worker.drop(0) == ([0], [])
    assert worker.drop(1) == ([], [1])
    assert worker.drop(2, 3) == ([2, 3], [])


def test_of_slots_of_one_size_that_are_too_many_those_go_that_come_back(workers: list[Worker]) -> None:
    workers.append(worker := Worker(*[LARGE] * 6))
    assert worker.drop(4, 0) == ([], [4, 0])
    assert worker.drop(1, 2) == ([2], [1])


def test_slots_whose_batches_the_loop_has_are_not_too_many(workers: list[Worker]) -> None:
    workers.append(worker := Worker(*[LARGE] * 9))
    worker.hand_out(0, 1, 2, 3, 4, 5)
    assert worker.drop(6, 7, 8) == ([6, 7, 8], [])
    assert worker.drop(0) == ([], [0])


def test_closing_leaves_the_memory_to_whoever_asked_for_it(workers: list[Worker]) -> None:
    workers.append(worker := Worker(SMALL, LARGE))
    assert sorted(segment.nbytes for segment in worker.handle.close()) == [SMALL, LARGE]
    assert worker.handle.close() == []
