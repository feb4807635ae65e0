"""The state, the epoch and the reset of a DevicePrefetcher are those of its source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from swift_loader import DevicePrefetcher, StateMismatch, SwiftLoader
from tests.support.datasets import Counting
from tests.support.helpers import make_loader
from tests.support.sources import NUM_BATCHES, Counted, LikeDali, numbers

pytestmark = pytest.mark.processes


def test_reset_is_passed_on_and_drops_what_was_ahead() -> None:
    prefetcher = DevicePrefetcher(LikeDali(), "cpu")
    for _ in range(2):
        assert [int(batch[0]["data"]) for batch in prefetcher] == list(range(NUM_BATCHES))
        prefetcher.reset()
    batches = iter(prefetcher)
    next(batches)
    prefetcher.reset()
    with pytest.raises(RuntimeError, match=r"ended by reset\(\)"):
        next(batches)
    assert len(list(prefetcher)) == NUM_BATCHES
    with pytest.raises(TypeError, match="a list has no reset"):
        DevicePrefetcher([], "cpu").reset()


def test_the_state_is_that_of_the_batch_the_loop_has() -> None:
    prefetcher = DevicePrefetcher(Counted(), "cpu", max_nb_batch_on_device=2)
    assert prefetcher.state_dict() == {"nested": {"given": 0}}
    batches, states = iter(prefetcher), []
    assert prefetcher.state_dict() == {"nested": {"given": 0}}
    for number, _ in enumerate(batches):
        states.append(prefetcher.state_dict())
        assert states[-1] == {"nested": {"given": number + 1}}
    for given, state in enumerate(states, 1):
        other = DevicePrefetcher(Counted(), "cpu")
        other.load_state_dict(state)
        assert numbers(other) == list(range(given, NUM_BATCHES))
        assert numbers(other) == list(range(NUM_BATCHES))


@pytest.mark.parametrize("num_seen", [1, 7, 13])
def test_a_swift_loader_behind_it_resumes_exactly(num_seen: int) -> None:
    def ids(batches: Any) -> list[list[int]]:
        return [batch["id"].tolist() for batch in batches]

    with make_loader(Counting, workers=0) as whole:
        expected = ids(whole) + ids(whole)
    with make_loader(Counting, workers=1) as first:
        prefetcher = DevicePrefetcher(first, "cpu", max_nb_batch_on_device=3)
        batches = iter(prefetcher)
        seen = ids(next(batches) for _ in range(num_seen))
        state = prefetcher.state_dict()
    with make_loader(Counting, workers=2) as second:
        resumed = DevicePrefetcher(second, "cpu")
        resumed.load_state_dict(state)
        seen += ids(resumed)
        while len(seen) < len(expected):
            seen += ids(resumed)
    assert seen == expected


def test_a_source_that_has_no_state_just_now_is_not_the_loop_s_error() -> None:
    with make_loader(Counting, workers=1, in_order=False) as loader:
        prefetcher = DevicePrefetcher(loader, "cpu")
        batches = iter(prefetcher)
        next(batches)
        with pytest.raises(RuntimeError, match="in_order=False"):
            prefetcher.state_dict()
        assert len(list(batches)) == 12
        assert prefetcher.state_dict()["position"] == 100


def test_loading_a_state_ends_the_iterator_in_use() -> None:
    prefetcher = DevicePrefetcher(Counted(), "cpu")
    batches = iter(prefetcher)
    next(batches)
    prefetcher.load_state_dict({"nested": {"given": 4}})
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"ended by load_state_dict\(\)"):
            next(batches)
    assert prefetcher.state_dict() == {"nested": {"given": 4}}
    assert numbers(prefetcher) == [4, 5]


def test_a_source_without_a_state_has_an_empty_one() -> None:
    prefetcher = DevicePrefetcher([torch.tensor(1)], "cpu")
    assert prefetcher.state_dict() == {}
    prefetcher.load_state_dict({})
    with pytest.raises(StateMismatch, match="a list has no load_state_dict"):
        prefetcher.load_state_dict({"position": 3})


def test_the_epoch_is_passed_on_to_whoever_takes_it() -> None:
    source = Counted()
    DevicePrefetcher(source, "cpu").set_epoch(3)
    assert source.epochs == [3]
    data = list(range(8))
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=0)  # type: ignore[arg-type]
    prefetcher = DevicePrefetcher(DataLoader(data, 2, sampler=sampler), "cpu")  # type: ignore[arg-type]
    prefetcher.set_epoch(5)
    assert sampler.epoch == 5
    DevicePrefetcher([], "cpu").set_epoch(1)
    with pytest.raises(ValueError, match="epoch=-1"):
        prefetcher.set_epoch(-1)


def test_a_chosen_epoch_is_in_the_state() -> None:
    with make_loader(Counting, workers=0, batch_size=20) as loader:
        prefetcher = DevicePrefetcher(loader, "cpu")
        list(prefetcher)
        assert (prefetcher.state_dict()["epoch"], prefetcher.state_dict()["position"]) == (0, 100)
        prefetcher.set_epoch(5)
        assert prefetcher.state_dict() == loader.state_dict()
        batches = iter(prefetcher)
        next(batches)
        assert (prefetcher.state_dict()["epoch"], prefetcher.state_dict()["position"]) == (5, 20)


def test_a_loader_goes_on_where_it_was_with_another_collate_function() -> None:
    def collate(samples: list[Any]) -> list[int]:
        return [-sample["id"] for sample in samples]

    loader = make_loader(Counting, workers=1, shuffle=False)
    batches = iter(loader)
    first = next(batches)["id"].tolist()
    loader.set_epoch(3)
    other: SwiftLoader = loader.with_collate_fn(collate)
    with pytest.raises(RuntimeError, match="superseded"):
        next(batches)
    with other:
        assert other.state_dict() == loader.state_dict()
        assert [-number for number in next(iter(other))] == first
        assert other.state_dict()["epoch"] == 3
    with pytest.raises(TypeError, match="collate_fn is a int"):
        other.with_collate_fn(3)  # type: ignore[arg-type]
