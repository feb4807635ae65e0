from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader import sample_rng
from swift_loader.transport.messages import FailureStage
from swift_loader.transport.task import LostKeys, Task
from swift_loader.worker.failure import BuildError
from swift_loader.worker.generators import preserved_generators
from swift_loader.worker.keyed_samples import KeyedSamples
from swift_loader.worker.seeding import Rng
from swift_loader.worker.torch_mode import Resume, Snapshot
from tests.support.torch_mode import plan_of, worker_spec


def samples_of(dataset: Any, rng: Rng = Rng.NONE, **mode: Any) -> KeyedSamples:
    options = worker_spec(dataset, **mode).options
    assert options.torch is not None
    return KeyedSamples(dataset, options.torch, rng, 7, None)


def fetch(samples: KeyedSamples, keys: Any, step: int = 0) -> Any:
    with preserved_generators():
        fetched = samples.fetch(Task(1, step, 0, step, keys))
        if samples.seeding.needs_rebuild():
            fetched = samples.fetch(Task(1, step, 0, step, keys))
            samples.seeding.needs_rebuild()
    return fetched.samples


class Drawing:
    def __init__(self) -> None:
        self.num_calls = 0

    def __getitem__(self, key: Any) -> Any:
        self.num_calls += 1
        return random.random(), float(np.random.rand()), float(torch.rand(())), float(sample_rng().random())


class InBulk(Drawing):
    def __getitems__(self, keys: Any) -> Any:
        return [self[key] for key in keys]


class WithoutBulk(Drawing):
    __getitems__ = None


class Saved(Drawing):
    def state_dict(self) -> Any:
        return self.num_calls

    def load_state_dict(self, state: Any) -> None:
        if state < 0:
            raise ValueError("no such state")
        self.num_calls = state


def test_a_batch_is_a_list_of_its_own() -> None:
    samples = samples_of({"a": 1, "b": 2})
    first = fetch(samples, ["a", "b"])
    assert (first, fetch(samples, ("b",))) == ([1, 2], [2])
    assert fetch(samples, []) == []


@pytest.mark.parametrize("keys", [np.array([1, 0]), torch.tensor([1, 0]), (1, 0), range(1, -1, -1), {1: "x", 0: "y"}])
def test_keys_may_come_in_anything_that_can_be_iterated(keys: Any) -> None:
    assert fetch(samples_of(["a", "b"]), keys) == ["b", "a"]


@pytest.mark.parametrize("dataset_class", [Drawing, InBulk, WithoutBulk, Saved])
def test_draws_are_keyed_by_the_position_in_the_epoch(dataset_class: Any) -> None:
    samples = samples_of(dataset_class(), Rng.SAMPLE)
    steps = [fetch(samples, [5, 5, 5], step) for step in (0, 1, 0)]
    assert steps[0] == steps[2]
    assert len({sample for step in steps for sample in step}) == 6
    assert fetch(samples_of(dataset_class(), Rng.SAMPLE), [6, 9, 1]) == steps[0]
    assert dataset_class is not InBulk or samples.counters.words[1] == -1  # it is still asked for whole batches
    other_seed = samples_of(dataset_class(), Rng.SAMPLE)
    other_seed.use_plan(plan_of(8), None, 0)
    assert not {*fetch(other_seed, [5, 5, 5])} & {*steps[0]}


def test_a_dataset_with_a_state_is_asked_once_for_each_key() -> None:
    dataset = Saved()
    fetch(samples_of(dataset, Rng.SAMPLE), [1, 2, 3])
    assert dataset.num_calls == 3


def test_a_snapshot_comes_with_the_first_batch_and_every_nth_one_after_it() -> None:
    dataset = Saved()
    samples = samples_of(dataset, snapshot_every=3)
    states = [(fetch(samples, [1, 2]), samples.state)[1] for _ in range(7)]
    assert [None if state is None else Snapshot.unpack(state) for state in states] == [
        *[Snapshot(1, dataset=2), None, None],
        *[Snapshot(4, dataset=8), None, None],
        Snapshot(7, dataset=14),
    ]
    samples.use_plan(plan_of(1), Resume(states[3]).pack(), 0)
    assert dataset.num_calls == 8
    assert [(fetch(samples, [1]), samples.state)[1] is None for _ in range(3)] == [True, True, False]


def test_a_state_that_cannot_be_saved_or_loaded_is_the_batchs_error() -> None:
    dataset = Saved()
    samples = samples_of(dataset, snapshot_every=1)
    dataset.state_dict = lambda: lambda: None  # type: ignore[method-assign]
    with pytest.raises(BuildError) as saving:
        fetch(samples, [1])
    assert saving.value.stage is FailureStage.SAVE
    with pytest.raises(BuildError) as loading:
        samples.use_plan(plan_of(1), Resume(Snapshot(1, dataset=-1).pack()).pack(), 0)
    assert loading.value.stage is FailureStage.LOAD


@pytest.mark.parametrize(
    ("keys", "index", "error"),
    [([0, 1, 9], 9, IndexError), (["x"], None, TypeError), (3, None, TypeError), (LostKeys("?"), None, Exception)],
)
def test_an_error_says_the_index_if_there_is_one(keys: Any, index: int | None, error: type[Exception]) -> None:
    with pytest.raises(BuildError) as caught:
        fetch(samples_of(["a", "b"]), keys)
    assert (caught.value.stage, caught.value.index) == (FailureStage.FETCH, index)
    assert isinstance(caught.value.__cause__, error)
