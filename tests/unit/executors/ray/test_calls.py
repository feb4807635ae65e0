from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from swift_loader.executors.ray.calls import ActorCalls, Broken, Lost, told_by_ray
from swift_loader.sampling.plan import PlanSettings
from swift_loader.transport.messages import NewPlan, Recheck
from swift_loader.transport.task import Task
from swift_loader.worker.actor import Answer


class Result:
    """A result of a call, as Ray refers to it."""

    def __init__(self) -> None:
        self.done: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.done


class FakeActor:
    """Notes its calls, whose results the test gives."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.results: deque[Result] = deque()
        self.end = Result()
        self.build = SimpleNamespace(remote=self._call)
        self.await_end = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: self.end))

    def _call(self, messages: Any) -> Result:
        self.calls.append(messages)
        self.results.append(Result())
        return self.results[-1]


class Gone(Exception):
    pass


class OfCall(Exception):
    pass


@pytest.fixture
def actor() -> FakeActor:
    return FakeActor()


@pytest.fixture
def announced() -> list[None]:
    return []


@pytest.fixture
def calls(actor: FakeActor, announced: list[None]) -> ActorCalls:
    made = ActorCalls(actor, lambda error: isinstance(error, OfCall), lambda: announced.append(None))
    started = Result()
    made.begin(started)
    started.done.set_result(([b"ready"], None))
    assert made.take() == Answer([b"ready"], None)
    announced.clear()
    return made


def task(sequence: int) -> bytes:
    return Task(1, sequence, 0, sequence).pack()


def test_a_plan_goes_with_the_next_task(calls: ActorCalls, actor: FakeActor) -> None:
    plan = NewPlan(1, PlanSettings.of_seed(1)).pack()
    calls.send(plan)
    assert actor.calls == []
    calls.send(task(0))
    calls.send(task(1))
    calls.send(Recheck().pack())
    assert actor.calls == [[plan, task(0)], [task(1)], [Recheck().pack()]]


def test_answers_come_in_the_order_of_the_calls(calls: ActorCalls, actor: FakeActor, announced: list[None]) -> None:
    for sequence in range(2):
        calls.send(task(sequence))
    actor.results[1].done.set_result(([b"1"], None))
    assert announced == [None]
    assert calls.take() is None
    actor.results[0].done.set_result(([b"0"], None))
    assert [calls.take(), calls.take(), calls.take()] == [Answer([b"0"], None), Answer([b"1"], None), None]


def test_results_that_are_on_their_way_count_if_the_actor_has_ended(calls: ActorCalls, actor: FakeActor) -> None:
    calls.send(task(0))
    actor.end.done.set_exception(Gone("ended"))
    assert calls.take() is None
    actor.results[0].done.set_result(([b"0"], None))
    assert calls.take() == Answer([b"0"], None)
    lost = calls.take()
    assert isinstance(lost, Lost)
    assert str(lost.reason) == "ended"
    assert calls.take() is None


def test_results_of_an_actor_that_was_killed_because_it_hung_are_not_waited_for(
    calls: ActorCalls, actor: FakeActor
) -> None:
    calls.send(task(0))
    calls.drop_results()
    actor.end.done.set_exception(Gone())
    assert isinstance(calls.take(), Lost)


def test_a_lost_result_is_the_end_of_the_actor(calls: ActorCalls, actor: FakeActor) -> None:
    for sequence in range(2):
        calls.send(task(sequence))
    actor.results[0].done.set_exception(Gone())
    actor.results[1].done.set_result(([b"1"], None))
    assert isinstance(calls.take(), Lost)
    assert calls.take() is None


def test_the_error_of_a_call_does_not_end_the_actor(calls: ActorCalls, actor: FakeActor) -> None:
    for sequence in range(2):
        calls.send(task(sequence))
    actor.results[0].done.set_exception(error := OfCall())
    actor.results[1].done.set_result(([b"1"], None))
    assert calls.take() == Broken(error)
    assert calls.take() == Answer([b"1"], None)


def test_sending_after_the_end_is_a_broken_pipe(calls: ActorCalls) -> None:
    calls.close()
    with pytest.raises(BrokenPipeError):
        calls.send(task(0))


def test_what_ray_says_is_told_without_its_general_advice() -> None:
    loss = Gone("The actor died.\n\tclass_name: BatchActor\n\tpid: 7\nEnd of file. Some common causes include: many")
    assert told_by_ray(loss) == "\nRay says:\n    The actor died. End of file."
