"""The actor is an ordinary object here: Ray would only carry its arguments and results."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_loader.transport.frames import Kind, unpack_frame
from swift_loader.transport.messages import NO_SLOT, Batch, Failure, NewPlan, Ready
from swift_loader.transport.payload import Environment, pack_payload
from swift_loader.transport.task import Task
from swift_loader.worker.actor import Answer, BatchActor, Payload, Surroundings
from tests.support.datasets import Blocks, Counting, FailsToBuild, Misbehaving
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


def test_an_error_of_building_is_told() -> None:
    _, answer = started(FailsToBuild)
    (message,) = answer.messages
    assert Failure.unpack(unpack_frame(memoryview(message))).message == "no luck"


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


def test_a_failed_sample_is_an_answer_and_the_next_task_is_done() -> None:
    actor, _ = started(Misbehaving, at=1)
    assert {*kinds(actor.build([task(0)])), *kinds(actor.build([task(1)]))} == {Kind.FAILURE, Kind.BATCH}


def test_a_new_plan_comes_before_its_task() -> None:
    actor, _ = started(Counting)
    plan = replace(spec_of(dataset_class=Counting).plan, batch_size=7)
    answer = actor.build([NewPlan(1, plan).pack(), task(0, 1)])
    assert Batch.unpack(unpack_frame(memoryview(answer.messages[-1]))).num_samples == 7


def test_tasks_of_an_earlier_generation_are_skipped_but_not_the_trial_batch() -> None:
    actor, _ = started(Counting)
    actor.use_generation(3)
    assert kinds(actor.build([task(0, 2)])) == [Kind.SKIPPED]
    assert kinds(actor.build([task(0, 3)])) == [Kind.BATCH]
    assert kinds(actor.build([task(0, 0)])) == [Kind.BATCH]


def test_a_generation_that_was_told_before_the_dataset_was_built_counts() -> None:
    actor = BatchActor()
    actor.use_generation(3)
    layout, memory, _ = pack_payload(spec_of(dataset_class=Counting), Environment.of_this_process())
    actor.start(Payload(layout.pack(), memory), 0, None, HERE)
    assert kinds(actor.build([task(0, 2)])) == [Kind.SKIPPED]


def test_it_takes_over_the_folder_and_the_import_path_that_it_has(tmp_path: Path) -> None:
    started(Counting, Surroundings((str(tmp_path), "/nowhere"), str(tmp_path)))
    assert Path.cwd() == tmp_path
    assert str(tmp_path) in sys.path
    assert "/nowhere" not in sys.path
    started(Counting, Surroundings((), "/nowhere"))
    assert Path.cwd() == tmp_path


class Waits(Counting):
    """The sample comes once the test says so."""

    begun, go = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.begun.set()
        assert self.go.wait(20)
        return super().__getitem__(index)


def test_its_progress_and_its_stack_can_be_asked_for_while_it_builds() -> None:
    actor = BatchActor()
    layout, memory, _ = pack_payload(spec_of(dataset_class=Waits, validate=False), Environment.of_this_process())

    def work() -> None:
        actor.start(Payload(layout.pack(), memory), 0, None, HERE)
        actor.build([task(0)])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert Waits.begun.wait(20)
        assert actor.position() == 0
        assert "in __getitem__" in actor.stacks()
        assert "worker/build.py" not in actor.stacks()
    finally:
        Waits.go.set()
        thread.join()
