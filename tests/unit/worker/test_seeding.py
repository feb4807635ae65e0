"""Random numbers keyed by sample: the builder alone, in this process."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from swift_loader import SwiftLoader, sample_rng
from swift_loader.sampling.plan import PlanSettings, Uneven
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.slots import HeapStore
from swift_loader.transport.task import Task
from swift_loader.worker.build import BatchBuilder
from swift_loader.worker.failure import BuildError
from swift_loader.worker.seeding import (
    Fetching,
    Rng,
    Seeding,
    keep_to_this_thread,
    preserved_generators,
    seed_for_construction,
    seed_for_worker,
)
from swift_loader.worker.spec import WorkerSpec

DRAWS: dict[str, Callable[[], Any]] = {
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.getrandbits of 1": lambda: random.getrandbits(1),
    "random.shuffle": lambda: random.sample(range(10), 10),
    "numpy.random.rand": lambda: float(np.random.rand()),
    "numpy.random.standard_normal": lambda: float(np.random.standard_normal()),
    "numpy.random.rand(312), a whole turn of the generator": lambda: float(np.random.rand(312)[0]),
    "numpy.random.randint": lambda: int(np.random.randint(2)),
    "torch.rand": lambda: float(torch.rand(())),
    "torch.randperm": lambda: torch.randperm(5).tolist(),
}
"""What unmodified code does with the global generators."""


class Drawing:
    """Sample i is what a function gives, for i in `at`, and 0 elsewhere; remembers what was fetched."""

    def __init__(self, draw: Callable[[], Any], at: range = range(100)) -> None:
        self.draw, self.at = draw, at
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.fetched.append(index)
        return (index, self.draw() if index in self.at else 0)


def as_list(samples: list[Any]) -> list[Any]:
    return samples


class Builder:
    """Builds batches as a worker does, but gives the samples."""

    def __init__(self, dataset: Any, batch_size: int = 4, rng: Rng = Rng.SAMPLE, seed: int = 1, **options: Any) -> None:
        order = OrderSettings(seed, shuffle=False, window=0, run_length=1)
        plan = PlanSettings(order, batch_size, 1, 0, Uneven.PAD, drop_last=False)
        self.batches: list[Any] = []
        options.setdefault("collate_fn", as_list)
        collate_fn = options["collate_fn"]

        def keep(samples: list[Any]) -> list[Any]:
            self.batches.append(collate_fn(samples))
            return [0]

        spec = WorkerSpec(replace(SwiftLoader(dataset=dataset)._options.workers, rng=rng, collate_fn=keep), plan)
        self.builder = BatchBuilder(dataset, len(dataset), spec, Definitions())

    def build(self, step: int, epoch: int = 0) -> Any:
        with preserved_generators():
            self.builder.build(HeapStore(), Task(1, 0, epoch, step))
        return self.batches[-1]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
@pytest.mark.parametrize("at", [range(100), range(3, 100), range(42, 43)])
def test_what_a_sample_draws_depends_on_the_sample_alone(draw: Callable[[], Any], at: range) -> None:
    in_order = Builder(Drawing(draw, at), batch_size=4)
    expected = [sample for step in range(25) for sample in in_order.build(step)]
    in_other_batches = Builder(Drawing(draw, at), batch_size=7)
    backwards = {step: in_other_batches.build(step) for step in reversed(range(15))}
    assert [sample for step in range(15) for sample in backwards[step]] == expected
    again = Builder(Drawing(draw, at), batch_size=100)
    assert again.build(0) == expected
    assert again.build(0, epoch=1) != expected or len(at) == 1


class Varying(Drawing):
    """Sample i draws from one generator, from another one, or from both or none."""

    def __getitem__(self, index: int) -> Any:
        kinds = (self.draw, random.random, lambda: (self.draw(), random.random()), lambda: 0)
        return (index, kinds[index // 12 % 4]())


@pytest.mark.parametrize("draw", list(DRAWS.values())[4:], ids=list(DRAWS)[4:])
def test_each_generator_is_seeded_once_something_is_drawn_from_it(draw: Callable[[], Any]) -> None:
    def collate(samples: list[Any]) -> Any:
        return samples, draw() if samples[0][0] % 5 else random.random()

    expected = [Builder(Varying(draw), collate_fn=collate).build(step) for step in range(25)]
    for steps in (range(25), [*reversed(range(25))], [11, 3, 24, 0, 12, 13, 5, 4]):
        builder = Builder(Varying(draw), collate_fn=collate)
        assert [builder.build(step) for step in steps] == [expected[step] for step in steps]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_a_batch_that_drew_is_built_again_once_and_the_later_ones_not(draw: Callable[[], Any]) -> None:
    dataset = Drawing(draw, range(5, 100))
    builder = Builder(dataset)
    for step in range(4):
        builder.build(step)
    assert dataset.fetched == [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, *range(8, 16)]


def test_a_batch_that_fails_by_what_it_drew_fails_by_what_it_should_draw() -> None:
    def refuse_some() -> float:
        drawn = random.random()
        if drawn < 0.2:
            raise ValueError(drawn)
        return drawn

    def outcomes(batch_size: int, steps: list[int]) -> dict[int, list[Any]]:
        builder = Builder(Drawing(refuse_some), batch_size)
        found: dict[int, list[Any]] = {}
        for step in steps:
            try:
                found[step] = builder.build(step)
            except BuildError as error:
                found[step] = [error.index, str(error.__cause__)]
        return found

    forwards, backwards = outcomes(4, list(range(25))), outcomes(4, list(reversed(range(25))))
    assert forwards == backwards
    assert {len(outcome) for outcome in forwards.values()} == {2, 4}


def test_a_collate_that_draws_is_keyed_by_its_batch() -> None:
    def collate(samples: list[Any]) -> list[Any]:
        return [samples[0][0], random.random(), np.random.rand(), sample_rng().random()]

    forwards, backwards = (Builder(Drawing(lambda: 0), collate_fn=collate) for _ in "ab")
    first = [forwards.build(step) for step in range(25)]
    second = [backwards.build(step) for step in reversed(range(25))]
    assert first == second[::-1]
    assert len({number for batch in first for number in batch[1:]}) == 75


class Several(Drawing):
    """Fetches a batch at once, or one sample, as torch's Subset does."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class OnlySeveral:
    """Fetches a batch at once, and nothing else."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 100

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, self.draw()) for index in indices]


class OnlySeveralOfTorch(OnlySeveral, torch.utils.data.Dataset[Any]):
    """Inherits a `__getitem__` that raises."""


BULK_DRAWS = pytest.mark.parametrize("draw", [random.random, lambda: sample_rng().random()])


@BULK_DRAWS
def test_samples_that_could_come_in_bulk_are_keyed_by_sample_all_the_same(draw: Callable[[], Any]) -> None:
    expected = Builder(Drawing(draw), 100).build(0)
    dataset = Several(draw)
    builder = Builder(dataset, 7)
    assert [sample for step in range(15) for sample in builder.build(step)] == expected
    assert dataset.fetched == [*range(7), *range(100)]


@BULK_DRAWS
@pytest.mark.parametrize("kind", [OnlySeveral, OnlySeveralOfTorch])
def test_what_comes_in_bulk_only_is_keyed_by_its_batch(draw: Callable[[], Any], kind: type[OnlySeveral]) -> None:
    forwards, backwards = (Builder(kind(draw)) for _ in "ab")
    first = [forwards.build(step) for step in range(25)]
    second = [backwards.build(step) for step in reversed(range(25))]
    assert first == second[::-1]
    assert len({drawn for batch in first for _, drawn in batch}) == 100


class NotingBulk(Several):
    num_asked = 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.num_asked += 1
        return super().__getitems__(indices)


def test_samples_come_in_bulk_again_in_the_next_epoch_if_they_draw_no_more() -> None:
    dataset = NotingBulk(random.random)
    builder = Builder(dataset, 10)
    drawn, dataset.draw = builder.build(0), lambda: 0.5
    asked = [dataset.num_asked]
    for epoch in (0, 1, 1, 2):
        builder.build(1, epoch)
        asked.append(dataset.num_asked)
    assert asked == [1, 1, 1, 2, 3]
    dataset.draw = random.random
    assert builder.build(0) == drawn


def test_samples_come_in_bulk_if_only_the_collate_draws() -> None:
    def collate(samples: list[Any]) -> list[Any]:
        return [samples, random.random()]

    bulk, single = Builder(Several(lambda: 0), collate_fn=collate), Builder(Drawing(lambda: 0), collate_fn=collate)
    whole = Builder(Whole(), collate_fn=collate)
    for step in range(3):
        batch = single.build(step)
        assert bulk.build(step) == batch
        assert whole.build(step)[1] == batch[1]


class Whole(Several):
    """Returns batches in columns."""

    def __init__(self) -> None:
        super().__init__(lambda: 0)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is asked for")

    def __getitems__(self, indices: list[int]) -> Any:
        return {"id": np.array(indices)}


@pytest.mark.parametrize(("draws", "is_owed"), [(False, False), (True, True)])
def test_importing_torch_is_no_draw(draws: bool, is_owed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seeding = Seeding(Rng.SAMPLE)
    with preserved_generators():
        torch.manual_seed(3)
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "torch")
            seeding.begin(Fetching(1, 0, [0], []))
        if draws:
            torch.rand(1)
        assert seeding.needs_rebuild() == is_owed


def test_an_attempt_that_fails_before_anything_is_fetched_is_no_draw() -> None:
    seeding = Seeding(Rng.SAMPLE)
    assert not seeding.needs_rebuild()
    assert not seeding.by_sample


def test_workers_that_are_seeded_once_differ() -> None:
    drawn = set()
    with preserved_generators():
        for rank, worker in [(0, 0), (0, 1), (1, 0)]:
            seed_for_worker(1, rank, worker, Rng.WORKER)
            drawn |= {random.random(), np.random.rand(), float(torch.rand(()))}
        assert len(drawn) == 9
        random.seed(5)
        seed_for_worker(1, 0, 0, Rng.NONE)
        seed_for_construction(Rng.NONE)
        after = random.random()
        random.seed(5)
        assert after == random.random()


@pytest.mark.processes
def test_worker_threads_tell_their_samples_apart_and_other_threads_see_those_of_the_process() -> None:
    def draw(index: int, *, as_worker: bool) -> None:
        if as_worker:
            keep_to_this_thread()
            seeding = Seeding(Rng.NONE)
            seeding.begin(Fetching(1, 0, [index], []))
        for _ in range(100):
            found.setdefault(index, set()).add(sample_rng().bit_generator.state["state"]["key"][0])
            both.wait()
        if as_worker:
            seeding.needs_rebuild()

    found: dict[int, set[int]] = {}
    both = threading.Barrier(3)
    outer = Seeding(Rng.NONE)
    outer.begin(Fetching(1, 0, [7], []))  # on this thread, for the process
    threads = [threading.Thread(target=draw, args=(index,), kwargs={"as_worker": index < 2}) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sample_rng().bit_generator.state["state"]["key"][0]
    outer.needs_rebuild()
    assert [len(found[index]) for index in range(3)] == [1, 1, 1]
    assert found[2] == {expected}
    assert found[0] != found[1] != found[2]
