"""The actor is an ordinary object here: Ray would only carry its arguments and results."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from swift_loader.transport.frames import Kind, unpack_frame
from swift_loader.transport.messages import NO_SLOT, Batch, Ready
from swift_loader.transport.payload import Environment, pack_payload
from swift_loader.transport.task import Task
from swift_loader.worker.actor import Answer, BatchActor, Payload, Surroundings
from tests.support.datasets import Blocks, Counting
from tests.support.specs import spec_of

HERE = Surroundings((), None)


@pytest.fixture(autouse=True)
def _kept_process() -> Iterator[None]:
    """The actor owns its process, apart from here."""
    import torch

    argv, path, folder, threads = list(sys.argv), list(sys.path), os.getcwd(), torch.get_num_threads()
    yield
    sys.argv[:], sys.path[:] = argv, path
    os.chdir(folder)
    torch.set_num_threads(threads)


def started(dataset_class: Any, around: Surroundings = HERE, **kwargs: Any) -> tuple[BatchActor, Answer]:
    spec = spec_of(dataset_class=dataset_class, dataset_kwargs=kwargs)
    layout, memory, _ = pack_payload(spec, Environment.of_this_process())
    actor = BatchActor()
    return actor, actor.start(Payload(layout.pack(), memory), 0, None, around)


def task(sequence: int, generation: int = 0) -> bytes:
    return Task(generation, sequence, 0, sequence).pack()


def kinds(answer: Answer) -> list[Kind]:
    return [unpack_frame(memoryview(message)).kind for message in answer.messages]


def test_it_tells_that_it_has_built_the_dataset() -> None:
    _, answer = started(Counting, num_samples=50)
    (message,) = answer.messages
    assert Ready.unpack(unpack_frame(memoryview(message))).report.num_samples == 50


def test_a_batch_comes_with_its_memory_which_is_used_again() -> None:
    actor, _ = started(Blocks)
    answers = [actor.build([task(number)]) for number in range(3)]
    for answer in answers:
        batch = Batch.unpack(unpack_frame(memoryview(answer.messages[-1])))
        assert batch.slot != NO_SLOT
        assert answer.memory is not None
        assert answer.memory.nbytes == batch.used_nbytes
    assert answers[2].memory is not None
    assert len({answer.memory.ctypes.data for answer in answers if answer.memory is not None}) <= 2


def test_tasks_of_an_earlier_generation_are_skipped_but_not_the_trial_batch() -> None:
    actor, _ = started(Counting)
    actor.use_generation(3)
    assert kinds(actor.build([task(0, 2)])) == [Kind.SKIPPED]
    assert kinds(actor.build([task(0, 3)])) == [Kind.BATCH]
    assert kinds(actor.build([task(0, 0)])) == [Kind.BATCH]
