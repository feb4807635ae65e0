"""A worker's loop on a channel: what it answers to the tasks that it is sent, without a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from swift_loader import ProtocolError, SwiftLoader, sample_rng
from swift_loader.sampling.plan import PlanSettings, Uneven
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.channel import Channel
from swift_loader.transport.codec import decode
from swift_loader.transport.frames import Frame, Kind, pack_frame, unpack_frame
from swift_loader.transport.messages import Batch, Failure, FailureStage, NewPlan, Recheck, SampleFailed, Verdicts
from swift_loader.transport.reports import BuildReport, Verdict
from swift_loader.transport.task import Task
from swift_loader.worker.build import BatchBuilder
from swift_loader.worker.fetch import OnError
from swift_loader.worker.generators import preserved_generators
from swift_loader.worker.loop import run_worker
from swift_loader.worker.seeding import Rng
from swift_loader.worker.spec import WorkerSpec

NUM_SAMPLES = 20


class Numbers:
    """Sample i is i, or (i, what is drawn for it)."""

    def __init__(self, *, draws: bool = False, bad: Sequence[int] = ()) -> None:
        self.samples = list(range(NUM_SAMPLES))
        self.draws = draws
        self.bad = bad

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index]
        if index in self.bad:
            raise ValueError(f"sample {index} is bad")
        return (sample, float(sample_rng().random())) if self.draws else sample


class InBulk(Numbers):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def as_list(samples: list[Any]) -> list[Any]:
    return list(samples)


def plan_of(*, batch_size: int = 4, shuffle: bool = False) -> PlanSettings:
    order = OrderSettings.of(seed=3, shuffle=shuffle, window=0, batch_size=batch_size)
    return PlanSettings(order, batch_size, 1, 0, Uneven.PAD, drop_last=False)


def judge(report: BuildReport) -> Verdicts:
    return Verdicts({report.num_samples: Verdict.CHANGED})


def answers(dataset: Any, sent: Sequence[bytes], *, draws: bool = False, **options: Any) -> list[Frame]:
    """Return what a worker sends in answer to these messages, which are all there before it reads the first."""
    of_loader = SwiftLoader(dataset=dataset, rng="sample", collate_fn=as_list, validate=False)._options.workers
    spec = WorkerSpec(replace(of_loader, **options), plan_of(), draws)
    ours, theirs = Channel.pair()

    def work() -> None:
        try:
            with preserved_generators():
                builder = BatchBuilder(dataset, len(dataset), spec, Definitions())
                run_worker(theirs, builder, BuildReport(len(dataset), 0), judge)
        finally:
            theirs.close()

    for message in sent:
        ours.send(message)
    with ThreadPoolExecutor(1) as executor:
        worker = executor.submit(work)
        frames = list(_received(ours, sum(kind_of(message) is not Kind.PLAN for message in sent)))
        ours.close()
        worker.result()
    assert frames.pop(0).kind is Kind.READY
    return frames


def _received(channel: Channel, num_answers: int) -> Iterator[Frame]:
    """Yield the messages up to the last answer, or until the worker has ended."""
    while num_answers and (message := channel.receive()) is not None:
        for descriptor in message.descriptors:
            os.close(descriptor)
        frame = unpack_frame(memoryview(bytes(message.data)))
        num_answers -= frame.kind not in (Kind.READY, Kind.SAMPLE_FAILED)
        yield frame


def kind_of(message: bytes) -> Kind:
    return unpack_frame(memoryview(message)).kind


def samples_in(frame: Frame) -> Any:
    assert frame.kind is Kind.BATCH
    batch = Batch.unpack(frame)
    return decode(memoryview(batch.meta), batch.num_blocks, np.empty(0, np.uint8), Definitions())


@pytest.mark.parametrize("dataset", [Numbers(), InBulk()])
@pytest.mark.parametrize("indices", [(7, 3, 7, 19, 0, 3), (5,), (-1, 0, -20), ()])
def test_a_task_with_indices_gives_these_samples_in_this_order(dataset: Any, indices: tuple[int, ...]) -> None:
    [frame] = answers(dataset, [Task(1, 6, 5, 4, indices).pack()])
    assert samples_in(frame) == [dataset[index] for index in indices]
    batch = Batch.unpack(frame)
    assert (batch.generation, batch.sequence, batch.num_samples) == (1, 6, len(indices))


def test_a_sample_is_the_same_in_a_planned_batch_and_in_a_chosen_one() -> None:
    planned, chosen = answers(Numbers(draws=True), [Task(1, 0, 2, 1).pack(), Task(1, 1, 2, 0, (6, 4, 6, 7, 5)).pack()])
    by_index = dict(samples_in(planned))
    assert sorted(by_index) == [4, 5, 6, 7]
    assert samples_in(chosen) == [(index, by_index[index]) for index in (6, 4, 6, 7, 5)]


@pytest.mark.parametrize("rng", Rng)
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("bad", [NUM_SAMPLES, -NUM_SAMPLES - 1, 2**62, -(2**63)])
def test_an_index_outside_the_dataset_gives_the_datasets_own_error(rng: Rng, draws: bool, bad: int) -> None:
    dataset = Numbers(draws=draws)
    setup_draws = draws and rng is Rng.SAMPLE
    failed, after = answers(dataset, [Task(1, 0, 0, 0, (3, bad, 5)).pack(), Task(1, 1, 0, 1).pack()], draws=setup_draws)
    failure = Failure.unpack(failed)
    assert (failure.stage, failure.index, failure.generation, failure.sequence) == (FailureStage.FETCH, bad, 1, 0)
    with pytest.raises(IndexError) as caught:
        dataset.samples[bad]
    assert (failure.type_name, failure.message) == ("IndexError", str(caught.value))
    assert Batch.unpack(after).sequence == 1


def test_a_bad_index_can_be_skipped() -> None:
    failed, batch = answers(Numbers(), [Task(1, 2, 0, 0, (3, 99, 5)).pack()], on_error=OnError.SKIP)
    sample = SampleFailed.unpack(failed)
    assert (sample.position, sample.replaced_by, sample.failure.index) == (1, None, 99)
    assert (sample.failure.generation, sample.failure.sequence) == (1, 2)
    assert samples_in(batch) == [3, 5]


def test_tasks_of_an_earlier_generation_are_skipped() -> None:
    frames = answers(Numbers(), [Task(1, 0, 0, 0).pack(), Task(1, 1, 0, 1).pack(), Task(2, 0, 0, 3).pack()])
    assert [(frame.kind, frame.generation) for frame in frames] == [
        (Kind.SKIPPED, 1),
        (Kind.SKIPPED, 1),
        (Kind.BATCH, 2),
    ]
    assert samples_in(frames[2]) == [12, 13, 14, 15]


def test_the_trial_batch_is_built_although_a_later_task_waits() -> None:
    trial, batch = answers(Numbers(), [Task(0, 0, 1, 2).pack(), Task(1, 0, 0, 0).pack()])
    assert (trial.generation, samples_in(trial)) == (0, [8, 9, 10, 11])
    assert (batch.generation, samples_in(batch)) == (1, [0, 1, 2, 3])


def test_the_samples_that_fail_in_the_trial_batch_are_reported() -> None:
    failed, _ = answers(Numbers(bad=[2]), [Task(0, 0, 0, 0).pack()], on_error=OnError.SKIP)
    assert (SampleFailed.unpack(failed).failure.generation, SampleFailed.unpack(failed).position) == (0, 2)


def test_a_plan_holds_from_its_generation_on() -> None:
    frames = answers(
        Numbers(), [Task(1, 0, 0, 0).pack(), NewPlan(1, plan_of(batch_size=2)).pack(), Task(1, 1, 0, 9).pack()]
    )
    assert [samples_in(frame) for frame in frames] == [[0, 1], [18, 19]]
    frames = answers(
        Numbers(), [Task(0, 0, 0, 0).pack(), NewPlan(1, plan_of(batch_size=2)).pack(), Task(1, 0, 0, 9).pack()]
    )
    assert [samples_in(frame) for frame in frames] == [[0, 1, 2, 3], [18, 19]]


def test_a_worker_says_why_its_samples_may_differ() -> None:
    [frame] = answers(Numbers(), [Recheck().pack()])
    assert Verdicts.unpack(frame) == judge(BuildReport(NUM_SAMPLES, 0))


@pytest.mark.parametrize("kind", [Kind.BATCH, Kind.FORK, Kind.SKIPPED])
def test_a_message_that_no_trainer_sends_is_refused(kind: Kind) -> None:
    with pytest.raises(ProtocolError, match=f"a worker was sent a message of kind {kind.name}"):
        answers(Numbers(), [pack_frame(kind)])
