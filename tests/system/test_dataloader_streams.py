"""Streams of the drop-in DataLoader: shared out by the loader, even over ranks, and out of order."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from swift_loader import DataLoader, StateMismatch, SwiftLoaderWarning
from tests.support.chains import plain
from tests.support.group import run_ranks
from tests.support.helpers import exhaustive_unless, set_environ
from tests.support.interrupting import NEVER, Interrupt, Points, call
from tests.support.resumable import Everything, EverythingShuffled, Shards

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

NUM_SAMPLES = 41


class Asking(Everything):
    """Shares itself out if somebody says that there are several workers."""

    def _share(self) -> range:
        info = get_worker_info()
        return range(self.length) if info is None else range(info.id, self.length, info.num_workers)


def make(dataset: Any, num_workers: int, **options: Any) -> DataLoader[Any]:
    context = "fork" if num_workers else None
    given = {"batch_size": 4, "shard_stream": True, **options}
    return DataLoader(dataset, num_workers=num_workers, multiprocessing_context=context, **given)


def batches(loader: Any) -> list[Any]:
    return [plain(batch) for batch in loader]


@pytest.fixture
def be_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def be(rank: int, world_size: int) -> None:
        set_environ(monkeypatch, "RANK", str(rank))
        set_environ(monkeypatch, "WORLD_SIZE", str(world_size))

    return be


# Over workers


@pytest.mark.parametrize("num_workers", exhaustive_unless([2], [1, 2, 3]))
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"batch_size": None}, {"persistent_workers": True}])
@pytest.mark.parametrize("dataset", exhaustive_unless([Asking], [Everything, Asking]))
def test_the_batches_are_those_without_workers(dataset: Any, options: dict[str, Any], num_workers: int) -> None:
    without = {name: value for name, value in options.items() if name != "persistent_workers"}
    loader, expected = make(dataset(NUM_SAMPLES), num_workers, **options), make(dataset(NUM_SAMPLES), 0, **without)
    for _ in range(2):
        assert batches(loader) == batches(expected)


def test_a_thread_gives_all_of_a_stream() -> None:
    loader = DataLoader(Everything(NUM_SAMPLES), 4, num_workers=1, worker_type="thread", shard_stream=True)
    iterator = iter(loader)
    found = [plain(next(iterator)) for _ in range(5)]
    resumed = DataLoader(Everything(NUM_SAMPLES), 4, num_workers=1, worker_type="thread", shard_stream=True)
    resumed.load_state_dict(loader.state_dict())
    assert found + batches(resumed) == batches(make(Everything(NUM_SAMPLES), 0))


def remember_info(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert (info.id, info.num_workers) == (worker_id, 2)


def with_info(samples: list[int]) -> list[int]:
    info = get_worker_info()
    return [*samples, -1 if info is None else info.id]


def test_only_the_dataset_is_not_told_that_there_are_workers() -> None:
    loader = make(Asking(8), 2, worker_init_fn=remember_info, collate_fn=with_info)
    assert batches(loader) == [[0, 1, 2, 3, 0], [4, 5, 6, 7, 1]]


class Faulty(Everything):
    """Fails at a number."""

    def __init__(self, at: int) -> None:
        super().__init__(NUM_SAMPLES)
        self.at = at

    def __iter__(self) -> Iterator[int]:
        return map(self._give, range(self.length))

    def _give(self, number: int) -> int:
        if number == self.at:
            raise LookupError(number)
        return number


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_taken", [3, 6])
def test_an_error_takes_the_place_of_one_batch(num_workers: int, num_taken: int) -> None:
    def outcomes(iterator: Any, stop: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < stop:
            try:
                found.append(plain(next(iterator)))
            except StopIteration:
                break
            except LookupError as error:
                found.append(type(error).__name__)
        return found

    whole = outcomes(iter(make(Faulty(18), 0)), 99)
    assert whole[4] == "LookupError"
    loader, resumed = make(Faulty(18), num_workers), make(Faulty(18), 2 - num_workers)
    iterator = iter(loader)
    found = outcomes(iterator, num_taken)
    resumed.load_state_dict(loader.state_dict())
    assert found + outcomes(iter(resumed), 99) == whole
    assert found + outcomes(iterator, 99) == whole, "the loader goes on, too"


def test_out_of_order_a_shared_stream_resumes_with_as_many_workers() -> None:
    loader = make(Everything(NUM_SAMPLES), 2, in_order=False)
    iterator = iter(loader)
    found = [plain(next(iterator)) for _ in range(5)]
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = make(Everything(NUM_SAMPLES), 2, in_order=False)
    resumed.load_state_dict(state)
    found += batches(resumed)
    assert sorted(found) == batches(make(Everything(NUM_SAMPLES), 0))


class Random(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(2) for _ in range(50))


@pytest.mark.parametrize(
    ("dataset", "options", "is_told"),
    [
        (Everything(50), {}, True),
        (Everything(1), {}, True),
        (Everything(50), {"shard_stream": False}, False),
        (Shards(), {}, False),
        (Random(), {}, False),
    ],
)
def test_workers_that_give_the_same_repeat_it_as_with_torch_and_one_warning_says_so(
    dataset: Any, options: dict[str, Any], is_told: bool
) -> None:
    loader = make(dataset, 2, **{"shard_stream": None, **options})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [batches(loader) for _ in range(2)]
    assert found[0] == found[1] or isinstance(dataset, Random)
    lines = [str(one.message) for one in told if one.category is SwiftLoaderWarning]
    assert len(lines) == is_told
    assert all("workers gives the same samples" in line and "shard_stream=True" in line for line in lines)
    if isinstance(dataset, Everything):
        expected = batches(make(dataset, 0, shard_stream=None))
        assert sorted(found[0]) == sorted(2 * expected)


@pytest.mark.filterwarnings("ignore:each of 2 workers")
def test_the_generators_are_left_as_torch_leaves_them() -> None:
    states = []
    for shard_stream in (None, False):
        torch.manual_seed(3)
        batches(make(Everything(50), 2, shard_stream=shard_stream))
        states.append(torch.get_rng_state().tolist())
    assert states[0] == states[1]


# Over ranks


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", exhaustive_unless([{}], [{}, {"drop_last": True}, {"batch_size": None}]))
@pytest.mark.parametrize("equal", [False, True])
def test_ranks_share_a_stream(
    num_workers: int, options: dict[str, Any], equal: bool, be_rank: Callable[[int, int], None]
) -> None:
    for rank in range(3):
        be_rank(rank, 3)
        loader = make(ListStream(range(NUM_SAMPLES)), num_workers, equal_batches=equal, **options)
        part = range(rank, NUM_SAMPLES - NUM_SAMPLES % 3 if equal else NUM_SAMPLES, 3)
        be_rank(0, 1)
        expected = batches(make(ListStream(part), 0, **options))
        be_rank(rank, 3)
        assert len(loader) == len(expected)
        assert batches(loader) == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_share_a_stream_that_shuffles(num_workers: int, be_rank: Callable[[int, int], None]) -> None:
    found: list[int] = []
    for rank in range(2):
        be_rank(rank, 2)
        random.seed(rank)
        torch.manual_seed(1)
        loader = make(EverythingShuffled(NUM_SAMPLES), num_workers)
        found += [number for numbers, *_ in loader for number in numbers.tolist()]
        drawn, _ = random.random(), random.seed(rank)
        assert drawn == random.random()
    assert sorted(found) == list(range(NUM_SAMPLES))


class ListStream(IterableDataset[int]):
    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def test_any_rank_continues_with_the_state_of_one(be_rank: Callable[[int, int], None]) -> None:
    be_rank(0, 2)
    loader = make(Everything(NUM_SAMPLES), 0)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    be_rank(1, 2)
    whole, resumed = make(Everything(NUM_SAMPLES), 0), make(Everything(NUM_SAMPLES), 1)
    resumed.load_state_dict(state)
    assert batches(resumed) == batches(whole)[1:]


def test_a_part_for_one_rank_is_shared_out_to_workers_only(be_rank: Callable[[int, int], None]) -> None:
    be_rank(1, 2)
    assert batches(make(Everything(9), 2, shard_stream="workers")) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    part = Everything(9)
    part.num_processes, part.process_index = 2, 1  # type: ignore[attr-defined]
    assert len(batches(make(part, 0))) == 3


def test_a_state_of_other_ranks_is_refused(be_rank: Callable[[int, int], None]) -> None:
    loader = make(Everything(NUM_SAMPLES), 0)
    next(iter(loader))
    be_rank(0, 2)
    with pytest.raises(StateMismatch, match="to 1 ranks, but here the loader shares out to 2 ranks"):
        make(Everything(NUM_SAMPLES), 0).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        ([1, 2], {"shard_stream": True}, ValueError, "for an IterableDataset; the samples of a list"),
        ([1, 2], {"equal_batches": True, "shard_stream": None}, ValueError, "for an IterableDataset; give a list"),
        (Everything(), {"shard_stream": "ranks"}, ValueError, "shard_stream='ranks' isn't a choice"),
        (Everything(), {"equal_batches": 1}, TypeError, "equal_batches=1 is a int"),
        (IterableWrapper([1]), {}, TypeError, "dataset is a DataPipe, a IterableWrapperIterDataPipe"),
        (SequenceWrapper([1]), {}, TypeError, "dataset is a DataPipe, a SequenceWrapperMapDataPipe"),
    ],
)
def test_wrong_options_are_refused(dataset: Any, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make(dataset, 0, **options)


def test_ranks_that_cannot_talk_are_told_to(be_rank: Callable[[int, int], None]) -> None:
    be_rank(0, 2)
    with pytest.raises(ValueError, match=r"equal_batches=True needs torch\.distributed"):
        iter(make(Shards(), 0, shard_stream=False, equal_batches=True))


RANK = """
    from torch.utils.data import IterableDataset

    class Part(IterableDataset):
        def __init__(self, length):
            self.length = length

        def __iter__(self):
            return iter(range(self.length))

    found = []
    for num_workers, device in ((0, None), (1, None), (1, "cpu")):
        context = "fork" if num_workers else None
        options = {"num_workers": num_workers, "multiprocessing_context": context, "shard_stream": False}
        options |= {"device": device, "max_nb_batch_on_device": 3}
        part = Part(7 + 6 * rank)
        loader = DataLoader(part, 2, equal_batches=True, **options)
        for epoch in range(2):
            found.append([batch.tolist() for batch in loader])
        iterator = iter(loader)
        next(iterator)
        resumed = DataLoader(part, 2, equal_batches=True, **options)
        resumed.load_state_dict(loader.state_dict())
        del iterator
        found.append([batch.tolist() for batch in resumed])
        found.append([batch.tolist() for batch in resumed])
    alone = DataLoader(part, 2, equal_batches=True)
    for seen in range(2):
        taken = []
        try:
            while len(taken) < 6:
                for batch in alone:
                    taken.append(batch.tolist())
                    if rank == 0 and taken == [[0, 1]]:
                        break
        except RankMismatch as error:
            found.append([taken, str(error)])
    report(found)
    finish()
"""


@pytest.mark.slow
def test_ranks_with_parts_of_their_own_end_together(tmp_path: Path) -> None:
    answers = [found for [found] in run_ranks(RANK, 2, tmp_path)]
    whole = [[[0, 1], [2, 3], [4, 5], [6]], [[0, 1], [2, 3], [4, 5], [6, 7]]]
    told = "rank 0 asks for batch 0 of epoch {}, but rank 1 for batch 1 of epoch {}: "
    for found, expected in zip(answers, whole, strict=True):
        for epoch, (taken, text) in zip((1, 3), (found.pop(-2), found.pop()), strict=True):
            assert taken == [[0, 1]]
            assert text.startswith(told.format(epoch, epoch - 1))
        assert found == 3 * [expected, expected, expected[1:], expected]


# Out of order


class OneWaits(IterableDataset[int]):
    """The second worker waits until the first one's numbers are all there."""

    def __init__(self, gate: int) -> None:
        self.gate = gate

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        if info.id == 0:
            yield from range(30)
        else:
            os.read(self.gate, 1)
            yield from range(100, 103)


def test_out_of_order_a_slow_shard_holds_up_no_other() -> None:
    gate, opener = os.pipe()
    loader = DataLoader(
        OneWaits(gate),
        1,
        num_workers=2,
        multiprocessing_context="fork",
        in_order=False,
        shard_stream=False,
    )
    iterator = iter(loader)
    found = [int(next(iterator)) for _ in range(30)]
    assert found == list(range(30))
    os.write(opener, b"!")
    assert [int(batch) for batch in iterator] == [100, 101, 102]
    workers = loader.state_dict()["_snapshot"]["_worker_snapshots"]
    ended = [one["fetcher_state"]["fetcher_ended"] for one in workers]
    assert ended == [True, True]
    os.close(gate)
    os.close(opener)


def test_out_of_order_streams_resume_without_loss() -> None:
    def new() -> DataLoader[Any]:
        return DataLoader(Shards(), 4, num_workers=2, multiprocessing_context="fork", in_order=False)

    whole = sorted(number for batch in new() for number in batch.tolist())
    seen: list[int] = []
    state = None
    for _ in range(3):
        loader = new()
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        for _ in range(5):
            seen += next(iterator).tolist()
        state = loader.state_dict()
        del iterator
    loader = new()
    loader.load_state_dict(state or {})
    seen += torch.cat(list(loader)).tolist()
    assert sorted(seen) == whole


class Waiting(IterableDataset[int]):
    """Takes a state only with the next pass, or at once."""

    def __init__(self, *, at_once: bool, num_samples: int = 5) -> None:
        self.at_once, self.num_samples = at_once, num_samples
        self.place = self.first = self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, 0
        for place in range(first + 1, self.num_samples + 1):
            self.place = place
            yield 100 * self.epoch + place
        if self.at_once:
            self.place, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = self.place = state["place"]
        self.epoch = state["epoch"]


@pytest.mark.parametrize("options", [{}, {"shard_stream": True}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_state_of_the_last_batch_begins_the_next_epoch_with_its_first_one(
    options: dict[str, Any], at_once: bool
) -> None:
    loaders: list[Any] = [DataLoader(Waiting(at_once=at_once), 2, **options) for _ in range(3)]
    iterator = iter(loaders[0])
    batches = [next(iterator) for _ in range(3)]
    loaders[1].load_state_dict(loaders[0].state_dict())
    assert len(batches[-1]) == 1
    assert list(iterator) == list(loaders[1]) == []
    loaders[2].load_state_dict(loaders[0].state_dict())
    found = [[torch.cat(list(loader)).tolist() for _ in range(2)] for loader in loaders]
    assert found[1:] == [found[0]] * 2
    assert len(found[0][0]) == len(found[0][1]) == 5


class NeedsArguments(IterableDataset[int]):
    """Its state is for the loader of its own package."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        return {"samples": num_samples * from_beginning}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class ItemsNeedArguments(Dataset[int]):
    """The same with items."""

    state_dict, load_state_dict = NeedsArguments.state_dict, NeedsArguments.load_state_dict

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [NeedsArguments, ItemsNeedArguments])
def test_a_state_that_needs_arguments_is_not_asked_for(kind: Any, num_workers: int) -> None:
    loaders: list[Any] = [DataLoader(kind(), 2, num_workers=num_workers) for _ in range(2)]
    iterator = iter(loaders[0])
    assert next(iterator).tolist() == [0, 1]
    loaders[1].load_state_dict(loaders[0].state_dict())
    assert [batch.tolist() for batch in loaders[1]] == [batch.tolist() for batch in iterator] == [[2, 3], [4, 5]]


class FailsToSave(Waiting):
    """Its state can't be had."""

    def state_dict(self) -> dict[str, int]:
        raise NotImplementedError("no state here")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_state_says_how_to_save_none(num_workers: int) -> None:
    loader: Any = DataLoader(FailsToSave(at_once=True), 5, num_workers=num_workers)
    with pytest.raises(NotImplementedError, match="no state here") as caught:
        loader.state_dict() if list(loader) else None
    assert "snapshot_every_n_steps=0 saves none" in "".join(getattr(caught.value, "__notes__", ()))
    loader = DataLoader(FailsToSave(at_once=True), 5, num_workers=num_workers, snapshot_every_n_steps=0)
    assert len(list(loader)) == 1
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_warning_that_is_made_an_error_takes_no_batch(num_workers: int) -> None:
    class Short(NeedsArguments):
        def __len__(self) -> int:
            return 2

    loader: Any = DataLoader(Short(), None, num_workers=num_workers)
    assert len(loader) == 2
    iterator = iter(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [int(next(iterator)) for _ in range(2)]
        with pytest.raises(UserWarning, match="but 3 samples have been fetched"):
            next(iterator)
        assert [*found, *map(int, iterator)] == list(range(6))


class Breaking(IterableDataset[int]):
    """Ends with an error, or goes on after it."""

    def __init__(self, goes_on: bool) -> None:
        self.goes_on = goes_on

    def __iter__(self) -> Any:
        items = map(self.checked, range(12))
        return items if self.goes_on else (item for item in items)

    def checked(self, number: int) -> int:
        if number == 5:
            raise ValueError("broken")
        return number


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_error_of_another_rank_that_ends_the_stream_is_heard(
    goes_on: bool, be_rank: Callable[[int, int], None]
) -> None:
    be_rank(0, 2)
    batches = iter(DataLoader(Breaking(goes_on), None, shard_stream=True))
    assert [next(batches) for _ in range(3)] == [0, 2, 4]
    if goes_on:
        assert list(batches) == [6, 8, 10]
    else:
        with pytest.raises(ValueError, match="broken"):
            next(batches)


class ItsOwnIterator(IterableDataset[int]):
    def __init__(self) -> None:
        self._left = iter(range(6))

    def __iter__(self) -> Iterator[int]:
        return self._left


def test_without_workers_a_batch_that_was_read_survives_an_interrupt() -> None:
    points = Points(NEVER)
    iterator = iter(DataLoader(ItsOwnIterator(), None))
    next(iterator)
    call(iterator.__next__, points, Interrupt)
    for at in range(points.count - 5, points.count):
        iterator = iter(DataLoader(ItsOwnIterator(), None))
        got = [next(iterator)]
        with suppress(Interrupt):  # a slow `next` has some points more than another
            got.append(call(iterator.__next__, Points(at), Interrupt))
        assert got + list(iterator) == [*range(6)], f"interrupted at point {at} of {points.count}"
