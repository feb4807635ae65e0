from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from swift_loader import ShuffleSampler, StateMismatch, distributed
from swift_loader.samplers.sharded import BLOCK_ITEMS
from tests.support.samplers import Counting, GlobalRandom


def ranks_of(make: Any, world_size: int, **options: Any) -> list[Any]:
    return [distributed(make(), world_size, rank, seed=3, **options) for rank in range(world_size)]


@given(num_items=st.integers(0, 200), world_size=st.integers(1, 5), drop_last=st.booleans())
@settings(max_examples=100, deadline=None)
def test_items_are_dealt_in_turn(num_items: int, world_size: int, drop_last: bool) -> None:
    samplers = ranks_of(lambda: range(num_items), world_size, drop_last=drop_last)
    lengths = [len(sampler) for sampler in samplers]
    drawn = [list(sampler) for sampler in samplers]
    assert [len(items) for items in drawn] == lengths
    assert len(set(lengths)) == 1
    dealt = [item for step in zip(*drawn, strict=True) for item in step]
    num_whole = num_items - num_items % world_size if drop_last else num_items
    assert dealt[:num_whole] == list(range(num_whole))
    assert set(dealt[num_whole:]) <= set(range(num_items - num_items % world_size, num_items))


class OwnRandom:
    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Any:
        items = list(range(90))
        self.source.shuffle(items)
        return iter(items)


@pytest.mark.parametrize(
    "other", [RandomSampler(range(30)), SequentialSampler(range(40)), BatchSampler(RandomSampler(range(40)), 4, False)]
)
def test_a_state_of_another_sampler_is_refused(other: Any) -> None:
    sampler = distributed(RandomSampler(range(40)), 1, 0, seed=3)
    next(iter(sampler))
    with pytest.raises(StateMismatch, match="RandomSampler of 40"):
        distributed(other, 1, 0, seed=3).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(range(90)),
        lambda: RandomSampler(range(90), replacement=True, num_samples=150),
        lambda: RandomSampler(range(90), generator=torch.Generator()),
        lambda: SubsetRandomSampler(range(90)),
        lambda: WeightedRandomSampler(np.ones(90), 90),  # type: ignore[arg-type]
        lambda: BatchSampler(WeightedRandomSampler(np.ones(90), 90), 4, drop_last=True),  # type: ignore[arg-type]
        lambda: BatchSampler(RandomSampler(range(90), generator=torch.Generator()), 4, drop_last=True),
        GlobalRandom,
        lambda: OwnRandom(np.random.default_rng()),
        lambda: OwnRandom(np.random.RandomState()),
        lambda: OwnRandom(random.Random()),
    ],
)
def test_ranks_with_other_generators_draw_from_one_sequence(make: Any) -> None:
    whole = list(distributed(make(), 1, 0, seed=3))
    drawn = []
    for rank in range(2):
        random.seed(rank)
        np.random.seed(rank)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rank)
            drawn.append(list(distributed(make(), 2, rank, seed=3)))
    assert [item for step in zip(*drawn, strict=True) for item in step][: len(whole)] == whole
    assert list(distributed(make(), 1, 0, seed=4)) != whole


def test_drawing_leaves_the_users_generators_as_they_are() -> None:
    own = torch.Generator()
    own.manual_seed(5)
    sampler = distributed(RandomSampler(range(200), replacement=True, generator=own), 2, 0, seed=3)
    torch_state, own_state = torch.default_generator.get_state(), own.get_state()
    python_state, numpy_state = random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]
    for _ in sampler:
        assert torch.equal(torch.default_generator.get_state(), torch_state)
        assert torch.equal(own.get_state(), own_state)
        assert random.getstate() == python_state
        assert (np.random.get_state()[1] == numpy_state).all()  # type: ignore[index]


def test_a_sampler_that_raises_leaves_the_generators_as_they_are() -> None:
    class Broken(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield int(torch.randint(5, ()))
            yield int(torch.randint(5, ()))
            raise KeyError("broken")

    before = torch.default_generator.get_state()
    with pytest.raises(KeyError, match="broken"):
        list(distributed(Broken(), 1, 0, seed=3))
    assert torch.equal(torch.default_generator.get_state(), before)


def test_set_epoch_reaches_the_sampler_within_a_batch_sampler() -> None:
    def batches_of(inner: Any) -> BatchSampler:
        return BatchSampler(inner, 4, drop_last=False)

    dataset: Any = range(40)
    sampler = distributed(batches_of(DistributedSampler(dataset, 1, 0)), 2, 1, seed=3)
    sampler.set_epoch(6)
    inner: DistributedSampler[int] = DistributedSampler(dataset, 1, 0)
    inner.set_epoch(6)
    expected = batches_of(inner)
    assert list(sampler) == list(expected)[1::2]


def test_a_sampler_without_an_end_is_drawn_block_by_block() -> None:
    drawn = []

    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            for number in count():
                drawn.append(number)
                yield number

    sampler = distributed(Endless(), 3, 2, seed=3)
    assert list(islice(sampler, 100)) == list(range(2, 300, 3))
    assert len(drawn) <= 300 + BLOCK_ITEMS
    state = sampler.state_dict()
    resumed = distributed(Endless(), 3, 2, seed=3)
    resumed.load_state_dict(state)
    assert list(islice(resumed, 3)) == [302, 305, 308]
    with pytest.raises(TypeError, match=r"no len\(\)"):
        len(sampler)


class Counted(Sampler[int]):
    """Counts what is drawn from it, and can resume. It changes the state that it has returned."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.num_drawn = self.start = 0
        self.state = {"position": 0}

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        for number in range(start, self.num_samples):
            self.num_drawn += 1
            self.state["position"] = number + 1
            yield number * 1000 + random.randrange(1000)

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.state["position"] = state["position"]


def test_a_sampler_with_a_state_is_not_drawn_again_from_the_start() -> None:
    sampler = distributed(Counted(10_000), 2, 1, seed=3)
    whole = list(sampler)
    for num_steps in (1, 127, 128, 129, 2500, 4999):
        sampler.set_epoch(0)
        list(islice(iter(sampler), num_steps))
        inner = Counted(10_000)
        resumed = distributed(inner, 2, 1, seed=3)
        resumed.load_state_dict(sampler.state_dict())
        assert next(iter(resumed)) == whole[num_steps]
        assert inner.num_drawn <= 2 * BLOCK_ITEMS
        resumed.load_state_dict(sampler.state_dict())
        assert list(resumed) == whole[num_steps:]


def test_a_state_of_a_sampler_needs_one_that_can_load_it() -> None:
    sampler = distributed(Counted(500), 2, 1, seed=3)
    list(islice(iter(sampler), 100))
    with pytest.raises(StateMismatch, match="the range can't load it"):
        distributed(range(500), 2, 1, seed=3).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize(
    ("sampler", "options", "error", "words"),
    [
        (5, {}, TypeError, "sampler is a int"),
        (iter(range(5)), {}, TypeError, "one epoch only"),
        (DistributedSampler(range(8), 2, 0), {}, ValueError, "split twice"),  # type: ignore[arg-type]
        (
            BatchSampler(ShuffleSampler(8, 2, seed=1, num_replicas=2, rank=0), 2, drop_last=False),
            {},
            ValueError,
            "num_replicas=1",
        ),
        (range(5), {"drop_last": 1}, TypeError, "drop_last=1"),
        (range(5), {"seed": None}, ValueError, "Give the same seed="),
        (range(5), {"rank": 2}, ValueError, "rank=2"),
    ],
)
def test_a_wrong_argument_is_named(sampler: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        distributed(sampler, **{"num_replicas": 2, "rank": 0, "seed": 3, **options})


@pytest.mark.parametrize(
    "kind", ["counts at once", "counts at the first item", "counts at the end", "tells blocks", "global generator"]
)
@pytest.mark.parametrize("size", [30, 600])
def test_a_sampler_whose_state_does_not_tell_the_place_is_drawn_again(kind: str, size: int) -> None:
    sampler = distributed(Counting(kind, None, size), 1, 0, seed=4)
    found, states = list[int](), list[Any]()
    for _ in range(3):
        for index in sampler:
            found.append(index)
            states.append(json.loads(json.dumps(sampler.state_dict())))
    for num_found in (1, 2, 25, size, size + 1, size + 13, 2 * size):
        resumed = distributed(Counting(kind, None, size), 1, 0, seed=4)
        resumed.load_state_dict(states[num_found - 1])
        assert [*resumed, *resumed][:size] == found[num_found : num_found + size], num_found
