"""What all samplers have in common: epochs, states, ranks."""

from __future__ import annotations

import json
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader, DistributedSampler

from tests.support.samplers import MAKERS, NUM_SAMPLES, Make, flat, of_ranks

every_sampler = pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))


@every_sampler
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_resumed_after_any_item_draws_the_rest(make: Make, world_size: int) -> None:
    sampler = make(world_size, world_size - 1)
    sampler.set_epoch(2)
    states, items = [], []
    for item in sampler:
        items.append(item)
        states.append(json.loads(json.dumps(sampler.state_dict())))
    following = list(sampler)
    assert (following == items) == (make is MAKERS["in order"])
    for number, state in enumerate(states, 1):
        resumed = make(world_size, world_size - 1)
        resumed.load_state_dict(state)
        assert json.loads(json.dumps(resumed.state_dict())) == state
        if number < len(items):
            assert list(resumed) == items[number:]
        assert list(resumed) == following


@every_sampler
@given(stops=st.lists(st.integers(0, 40), min_size=1, max_size=60))
@settings(max_examples=15, deadline=None)
def test_a_chain_of_stops_draws_what_one_run_draws(make: Make, stops: list[int]) -> None:
    one_run, sampler = make(2, 1), make(2, 1)
    expected = [item for _ in range(4) for item in one_run]
    drawn: list[Any] = []
    for stop in stops:
        iterator = chain.from_iterable(repeat(sampler))  # pass after pass
        drawn += islice(iterator, stop)
        state = json.loads(json.dumps(sampler.state_dict()))
        sampler = make(2, 1)
        sampler.load_state_dict(state)
        if len(drawn) >= len(expected):
            break
    num_common = min(len(drawn), len(expected))
    assert drawn[:num_common] == expected[:num_common]


@every_sampler
def test_the_end_of_an_epoch_is_known_with_its_last_item(make: Make) -> None:
    sampler = make(2, 1)
    num_items = len(list(sampler))
    sampler.set_epoch(0)
    list(islice(iter(sampler), num_items))
    assert sampler.epoch == 1
    resumed = make(2, 1)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.epoch == 1
    resumed.set_epoch(0)
    assert list(resumed) == []


@every_sampler
def test_epochs_come_by_themselves_or_by_set_epoch(make: Make) -> None:
    sampler, other = make(2, 0), make(2, 0)
    first, second, third = list(sampler), list(sampler), list(sampler)
    other.set_epoch(2)
    assert list(other) == third
    other.epoch = 0
    assert list(other) == first
    assert list(other) == second


@every_sampler
def test_a_second_iterator_begins_the_epoch_afresh(make: Make) -> None:
    sampler = make(2, 0)
    left = iter(sampler)
    begun = [next(left), next(left)]
    whole = list(sampler)
    assert whole[:2] == begun
    sampler.set_epoch(0)
    assert list(sampler) == whole


@every_sampler
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_ranks_draw_equally_many_items(make: Make, world_size: int) -> None:
    for epoch in (0, 1):
        assert len({len(rank) for rank in of_ranks(make, world_size, epoch)}) == 1


@every_sampler
def test_the_length_is_the_number_of_items(make: Make) -> None:
    sampler = make(3, 1)
    try:
        length = len(sampler)
    except TypeError as error:
        assert "no len()" in str(error)  # noqa: PT017 - most have one
    else:
        assert length == len(list(sampler))


@every_sampler
def test_frameworks_see_that_it_is_split_already(make: Make) -> None:
    sampler = make(3, 1)
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.num_replicas, sampler.rank) == (3, 1)
    assert getattr(sampler, "sampler", sampler) is sampler


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@every_sampler
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_distributed_checkpoint_has_the_whole_state(make: Make, before: int, after: int, tmp_path: Path) -> None:
    sampler, resumed, other = make(before, 0), make(after, after - 1), make(after, after - 1)
    if hasattr(sampler, "exclude"):
        sampler.exclude([3, 50, 51])
    sampler.set_epoch(1)
    list(islice(sampler, 3))
    save({"sampler": sampler}, checkpoint_id=tmp_path, no_dist=True)
    load({"sampler": resumed}, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(sampler.state_dict())
    assert resumed.state_dict() == sampler.state_dict()
    assert list(resumed) == list(other)


@every_sampler
def test_the_rank_is_looked_up_when_the_first_pass_begins(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    early, begun, resumed = (make(None, None) for _ in range(3))
    next(iter(begun))
    state = begun.state_dict()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (early.num_replicas, early.rank) == (2, 1)
    assert list(early) == list(make(2, 1))
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 by the launcher's WORLD_SIZE.* rank 0 of 1"):
        next(iter(begun))
    given = make(2, 1)
    for sampler in (resumed, given):
        sampler.load_state_dict(state)
    assert list(resumed) == list(given)


@every_sampler
def test_torchs_loader_takes_it(make: Make) -> None:
    items = list(make(2, 1))
    place = {"batch_sampler": make(2, 1)} if isinstance(items[0], list) else {"sampler": make(2, 1), "batch_size": 4}
    loader: DataLoader[Any] = DataLoader(range(NUM_SAMPLES), **place)  # type: ignore[arg-type]
    assert [index for batch in loader for index in batch.tolist()] == flat(items)


@pytest.mark.parametrize(
    "name",
    ["shuffle batches", "buckets", "tokens", "tokens, packed", "draws", "strata", "weighted", "own state"],
)
@given(data=st.data(), before=st.integers(1, 5), after=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_another_number_of_ranks_draws_the_rest(name: str, data: st.DataObject, before: int, after: int) -> None:
    make = MAKERS[name]
    whole = make(1, 0)
    expected = flat(list(whole))
    ranks = [make(before, rank) for rank in range(before)]
    begun = [iter(rank) for rank in ranks]
    num_steps = data.draw(st.integers(0, NUM_SAMPLES // 4 // before - 1))
    first = [[next(rank) for rank in begun] for _ in range(num_steps)]
    states = [rank.state_dict() for rank in ranks]
    assert all(state == states[0] for state in states)

    resumed = [make(after, rank) for rank in range(after)]
    for rank in resumed:
        rank.load_state_dict(states[0])
    drawn = flat([item for step in first for item in step])
    rest = [list(rank) for rank in resumed]
    num_full = min(map(len, rest))
    drawn += flat([rank[step] for step in range(num_full) for rank in rest])
    assert drawn[: len(expected)] == expected
    assert set(drawn[len(expected) :]) <= set(range(NUM_SAMPLES))  # what pads the last step
