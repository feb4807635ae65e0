"""The number of a DataLoader's workers changes while it runs, and its batches stay what they are."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info

from swift_loader import DataLoader
from swift_loader.dataloader.sources import SamplerSource
from swift_loader.scheduler.queues import WorkerState
from tests.support.helpers import HANG_S, LIKE_A_FORK, wait_until
from tests.support.interrupting import Interrupt, Points, call
from tests.support.resizing import calling

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

NUM_SAMPLES = 120
RESIZES = {3: 4, 12: 2, 20: 1, 29: 3, 40: 2}
"""By number of batches, of 30 in each epoch."""


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.rand(), torch.rand(())


class Counts(Drawing):
    """Tells the worker, and how many samples that has had."""

    def __init__(self) -> None:
        self.num_had = 0

    def __getitem__(self, index: int) -> Any:
        self.num_had += 1
        info = get_worker_info()
        assert info is not None
        return index, info.id, self.num_had, info.num_workers


class Stateful(Counts):
    """The same, as a state."""

    def state_dict(self) -> dict[str, int]:
        return {"num_had": self.num_had}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.num_had = state["num_had"]


class HasGenerator(Counts):
    """The same, with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(3)


class Stream(IterableDataset[Any]):
    """Each worker gives its share of the numbers, and says how many workers there are."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        for number in range(info.id, NUM_SAMPLES, info.num_workers):
            yield number, info.id, info.num_workers


def loader_of(dataset: Any, num_workers: int = 1, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    options = {"shuffle": not isinstance(dataset, IterableDataset), "generator": generator, **LIKE_A_FORK, **options}
    return DataLoader(dataset, batch_size=4, num_workers=num_workers, **options)


def seen(batch: Any) -> list[list[Any]]:
    return [part.tolist() for part in batch]


def run(loader: DataLoader[Any], sizes: Mapping[int, int], epochs: int = 2) -> list[Any]:
    got: list[Any] = []
    for _ in range(epochs):
        for batch in loader:
            if len(got) in sizes:
                loader.resize(sizes[len(got)])
            got.append(seen(batch))
    return got


def num_serving(loader: DataLoader[Any]) -> int:
    """Return how many workers take tasks of the current epoch."""
    assert isinstance(loader._latest, SamplerSource)
    workers = loader._latest.workers
    assert workers is not None
    of_scheduler = list(workers.engine._scheduler.ledger.workers)
    return sum(worker.state is WorkerState.READY for worker in of_scheduler)


@pytest.mark.parametrize(
    ("kind", "persistent", "in_order"),
    [*itertools.product(["processes", "threads"], [False, True], [False, True]), ("to a device", True, True)],
)
def test_batches_are_those_of_a_loader_without_resizes(kind: str, persistent: bool, in_order: bool) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "processes": {},
        "to a device": {"device": "cpu", "max_nb_batch_on_device": 3},
        "threads": {"worker_type": "thread", "rng": None, "multiprocessing_context": None},
    }
    options = {**kinds[kind], "persistent_workers": persistent, "in_order": in_order}
    got, expected = (run(loader_of(Drawing(), **options), sizes) for sizes in (RESIZES, {}))
    if kind == "threads":  # which draw from the loop's generators
        got, expected = ([batch[0] for batch in run] for run in (got, expected))
    if not in_order:
        got, expected = (sorted(run[:30]) + sorted(run[30:]) for run in (got, expected))
    assert got == expected


def test_it_takes_effect_within_the_epoch() -> None:
    loader = loader_of(Drawing())
    iterator = iter(loader)
    next(iterator)
    for number in (4, 2):
        loader.resize(number)
        wait_until(lambda number=number: num_serving(loader) == number, f"{number} workers")  # type: ignore[misc]
        next(iterator)
    assert loader.num_workers == 2
    list(iterator)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Stateful(), {}),
        (HasGenerator(), {}),
        (Counts(), {"rng": None}),
        (Counts(), {"worker_init_fn": int}),
        (Counts(), {"rng": None, "persistent_workers": True}),
    ],
)
def test_where_a_batch_shows_its_worker_it_waits_for_the_next_epoch(dataset: Any, options: dict[str, Any]) -> None:
    loader = loader_of(dataset, num_workers=2, **options)
    first, second, third = (run(loader, sizes, 1) for sizes in ({7: 3}, {11: 1}, {}))
    for got, number in ((first, 2), (second, 3), (third, 1)):
        assert [set(batch[1]) for batch in got] == [{step % number} for step in range(30)]


def test_worker_info_tells_how_many_there_were_when_the_worker_started() -> None:
    loader = loader_of(Counts(), num_workers=2)
    for number in (2, 5, 3):
        loader.resize(number)
        for batch in loader:
            _, ids, _, nums = seen(batch)
            assert all(one < among for one, among in zip(ids, nums, strict=True))
    loader = loader_of(Stateful(), num_workers=2)
    for number in (2, 5, 3):
        loader.resize(number)
        assert {among for batch in run(loader, {}, 1) for among in batch[3]} == {number}


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stream_has_the_new_number_of_shards_in_the_next_epoch(persistent: bool) -> None:
    loader = loader_of(Stream(), num_workers=2, persistent_workers=persistent)
    for now, following in ((2, 3), (3, 1), (1, 1)):
        got = run(loader, {2: following}, 1)
        assert sorted(number for batch in got for number in batch[0]) == list(range(NUM_SAMPLES))
        assert {among for batch in got for among in batch[2]} == {now}


@pytest.mark.parametrize("sampler", ["generator of the loop", "own class"])
def test_a_sampler_is_asked_as_early_as_without_a_resize(sampler: str) -> None:
    drawn: list[int] = []

    class Noted(RandomSampler):
        def __iter__(self) -> Any:
            for index in super().__iter__():
                drawn.append(index)
                yield index

    def make() -> DataLoader[Any]:
        if sampler == "own class":
            return loader_of(Drawing(), shuffle=False, sampler=Noted(Drawing()))
        return loader_of(Drawing(), shuffle=False, sampler=RandomSampler(Drawing(), replacement=True))

    runs = []
    for sizes in ({}, {3: 4, 12: 2}):
        torch.manual_seed(1)
        drawn.clear()
        loader, found = make(), []
        for number, batch in enumerate(loader):
            if number in sizes:
                loader.resize(sizes[number])
            found.append((seen(batch), torch.rand(()).item(), len(drawn)))
        runs.append(found)
    assert runs[0] == runs[1]


@pytest.mark.filterwarnings("ignore:the state has datasets of")
@pytest.mark.parametrize("dataset", [Drawing(), Stateful()])
def test_a_state_resumes_around_resizes(dataset: Any) -> None:
    expected = run(loader_of(dataset, 2), {}, 1)
    got: list[Any] = []
    state: dict[str, Any] = {}
    for num_batches, number, following in ((7, 2, 3), (8, 3, 2), (9, 2, 4), (6, 4, 1)):
        loader = loader_of(dataset, number)
        loader.load_state_dict(state)
        iterator = iter(loader)
        for step in range(num_batches):
            got.append(seen(next(iterator)))
            if step == 3:
                loader.resize(following)
        state = loader.state_dict()
        del iterator
    assert got == expected


def test_another_thread_resizes_while_epochs_begin_and_end() -> None:
    loader, rng = loader_of(Drawing()), random.Random(1)
    expected = run(loader_of(Drawing()), {}, 4)
    with calling(lambda: loader.resize(rng.randint(1, 4)), every_s=0.02):
        assert run(loader, {}, 4) == expected


@pytest.mark.filterwarnings("ignore::swift_loader.SwiftLoaderWarning")
def test_workers_that_are_killed_after_a_resize_show_nothing() -> None:
    loader = loader_of(Drawing(), num_workers=3)
    got = []
    for number, batch in enumerate(loader):
        got.append(seen(batch))
        if number in (3, 15):
            loader.resize(2 + number // 4)
            assert loader._latest is not None
            loader._latest.processes()[0].kill()
    assert got == run(loader_of(Drawing()), {}, 1)


def test_what_has_no_workers_of_its_own_refuses() -> None:
    with pytest.raises(RuntimeError, match=r"resize\(2\) needs workers"):
        loader_of(Drawing(), num_workers=0, multiprocessing_context=None).resize(2)
    with pytest.raises(ValueError, match="num_workers=0 is too small; it must be at least 1"):
        loader_of(Drawing()).resize(0)


def test_a_resize_while_an_epoch_begins_returns_before_it_has_begun() -> None:
    asked, resized = threading.Event(), threading.Event()

    class Waits(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            asked.set()
            assert resized.wait(HANG_S)
            return iter(range(8))

        def __len__(self) -> int:
            return 8

    loader: Any = DataLoader(list(range(8)), 2, sampler=Waits(), num_workers=1)  # type: ignore[arg-type]

    def resize() -> None:
        assert asked.wait(HANG_S)
        loader.resize(2)
        resized.set()

    thread = threading.Thread(target=resize)
    thread.start()
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    thread.join()
    assert loader.num_workers == 2


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(0 if info is None else info.id, 40, 1 if info is None else info.num_workers))


@pytest.mark.parametrize(
    ("dataset", "number", "options"),
    [(range(40), 3, {}), (range(40), 1, {"rng": "worker"}), (Numbers(), 1, {})],
    ids=["at once", "bound", "stream"],
)
def test_after_a_resize_and_an_interrupt_the_epoch_goes_on(dataset: Any, number: int, options: dict[str, Any]) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(dataset, 4, num_workers=2, **options)

    whole = [batch.tolist() for batch in make()]
    loader, other = make(), make()
    iterator = iter(loader)
    got = [next(iterator).tolist() for _ in range(3)]
    loader.resize(number)
    with pytest.raises(Interrupt):
        call(iterator.__next__, Points(9), Interrupt)
    got.append(next(iterator).tolist())
    other.load_state_dict(loader.state_dict())
    assert got + [batch.tolist() for batch in iterator] == whole == got + [batch.tolist() for batch in other]
    assert loader.num_workers == number
