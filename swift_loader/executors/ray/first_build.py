"""The wait for the first actor that has built the dataset."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swift_loader.executors.ray.inbox import RayWorker
from swift_loader.executors.wording import Wording
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.frames import Kind, unpack_frame
from swift_loader.transport.messages import Failure, FailureStage, Ready
from swift_loader.worker.actor import Answer


@dataclass(frozen=True, slots=True)
class FirstBuild:
    """The first actor that has built the dataset, or whose set-up as a worker failed then."""

    worker: RayWorker
    num_samples: int
    build_s: float
    """How long that took, with the actor's start."""


def first_build_of(
    worker: RayWorker, answer: Answer, build_s: float, wording: Wording, definitions: Definitions
) -> FirstBuild:
    """Return what an actor's first answer says. It has come after `build_s`.

    Raises what building the dataset raised.
    """
    frame = unpack_frame(memoryview(answer.messages[-1]))
    if frame.kind is not Kind.FAILURE:
        return FirstBuild(worker, Ready.unpack(frame).report.num_samples, build_s)
    failure = Failure.unpack(frame)
    if failure.stage is FailureStage.BUILD:
        raise wording.failure(failure, who(worker), definitions, "")
    return FirstBuild(worker, 0, build_s)  # only in torch mode, where the length has no meaning


def who(worker: RayWorker) -> str:
    """Return which actor it is, for messages before the loader has started."""
    return f"the first worker ({worker.process.describe()})"


class Step(NamedTuple):
    """What is done if the first build takes long."""

    after_s: float | None
    """None: never."""
    is_of_building: bool
    """Whether it is about actors that build the dataset, or about actors that have no place."""
    act: Callable[[], None]


class Patience:
    """Takes the steps that are due, each once."""

    def __init__(self, began_s: float, is_building: Callable[[], bool], steps: Sequence[Step]) -> None:
        """Wait since `began_s`, by `time.monotonic`. `is_building` returns whether an actor has a place."""
        self._is_building = is_building
        due = [(began_s + step.after_s, step) for step in steps if step.after_s is not None]
        self._due = sorted(due, key=lambda one: one[0])

    def left_s(self, clock: Callable[[], float] = time.monotonic) -> float | None:
        """Take the steps that are due. Return the seconds until the next one; None if there is none."""
        while self._due:
            at_s, step = self._due[0]
            left_s = at_s - clock()
            if left_s > 0:
                return left_s
            self._due.pop(0)
            if step.is_of_building == self._is_building():
                step.act()
        return None
