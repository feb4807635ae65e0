from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from swift_loader import ShuffleBatchSampler, ShuffleSampler, StateMismatch, SwiftLoader
from swift_loader.sampling.plan import Plan, PlanSettings, Uneven
from swift_loader.sampling.shuffle import OrderSettings


class Numbers:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index


def sampler_of(num_samples: int, batch_size: int, world_size: int = 1, rank: int = 0, **options: Any) -> Any:
    options.setdefault("seed", 3)
    return ShuffleBatchSampler(num_samples, batch_size, num_replicas=world_size, rank=rank, **options)


@given(
    num_samples=st.integers(0, 200),
    batch_size=st.integers(1, 20),
    world_size=st.integers(1, 4),
    window=st.one_of(st.none(), st.integers(0, 60)),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    uneven=st.sampled_from(Uneven),
    epoch=st.integers(0, 3),
)
@settings(max_examples=75, deadline=None)
def test_the_batches_are_those_of_the_loaders_plan(
    num_samples: int,
    batch_size: int,
    world_size: int,
    window: int | None,
    shuffle: bool,
    drop_last: bool,
    uneven: Uneven,
    epoch: int,
) -> None:
    order = OrderSettings.of(seed=3, shuffle=shuffle, window=window, batch_size=batch_size)
    chosen = PlanSettings(order, batch_size, world_size, 0, uneven, drop_last)
    options: Any = {"shuffle": shuffle, "drop_last": drop_last, "uneven": uneven.value, "nearby_shuffle": window}
    for rank in range(world_size):
        plan = Plan.of(num_samples, replace(chosen, rank=rank))
        expected = [plan.batch(epoch, step).indices.tolist() for step in range(plan.num_batches(epoch))]
        sampler = sampler_of(num_samples, batch_size, world_size, rank, **options)
        sampler.set_epoch(epoch)
        assert len(sampler) == len(expected)
        assert list(sampler) == expected
        one_by_one = ShuffleSampler(num_samples, batch_size, seed=3, num_replicas=world_size, rank=rank, **options)
        one_by_one.set_epoch(epoch)
        assert list(BatchSampler(one_by_one, batch_size, drop_last)) == expected
        assert len(one_by_one) == sum(map(len, expected))


def test_with_several_ranks_the_indices_resume_at_the_last_whole_batch() -> None:
    sampler = ShuffleSampler(50, 8, seed=3, num_replicas=2, rank=1)
    iterator = iter(sampler)
    list(islice(iterator, 11))
    assert sampler.state_dict()["position"] == 16


def test_states_can_be_exchanged_with_the_loaders() -> None:
    sampler = sampler_of(100, 10)
    batches = list(islice(iter(sampler), 3))
    with SwiftLoader(Numbers, {}, batch_size=10, worker_per_consumer=0, seed=3) as loader:
        loader.load_state_dict(sampler.state_dict())
        batches += [batch.tolist() for batch in islice(loader, 3)]
        sampler.load_state_dict(loader.state_dict())
    assert batches + list(sampler) == list(sampler_of(100, 10))


def test_without_a_seed_it_is_torchs() -> None:
    before = torch.default_generator.get_state()
    try:
        torch.manual_seed(41)
        assert list(ShuffleBatchSampler(30, 4)) == list(sampler_of(30, 4, seed=41))
    finally:
        torch.default_generator.set_state(before)


def test_a_seed_that_was_not_given_comes_from_the_state() -> None:
    state = sampler_of(30, 4, seed=41).state_dict()
    resumed = ShuffleBatchSampler(30, 4)
    resumed.load_state_dict(state)
    assert list(resumed) == list(sampler_of(30, 4, seed=41))
    with pytest.raises(StateMismatch, match=r"seed=41.*seed=3"):
        sampler_of(30, 4).load_state_dict(state)


def test_resuming_takes_as_long_at_any_position() -> None:
    sampler = sampler_of(10**12, 64)
    state = {**sampler.state_dict(), "position": 10**12 - 128}
    sampler.load_state_dict(state)
    assert [len(batch) for batch in sampler] == [64, 64]


@pytest.mark.parametrize(
    ("dataset", "options", "error", "words"),
    [
        (SequentialSampler(range(5)), {}, TypeError, "use_distributed_sampler=False"),
        (object(), {}, TypeError, "dataset="),
        (-1, {}, ValueError, "at least 0"),
        (10, {"batch_size": 0}, ValueError, "batch_size=0"),
        (10, {"batch_size": 2.0}, TypeError, r"batch_size=2\.0"),
        (10, {"uneven": "even"}, ValueError, "uneven='even'"),
        (10, {"seed": -1}, ValueError, "seed=-1"),
        (10, {"shuffle": 1}, TypeError, "shuffle=1"),
        (10, {"num_replicas": 2}, ValueError, "need each other"),
        (10, {"rank": 2}, ValueError, "need each other"),
        (10, {"num_replicas": 2, "rank": 2}, ValueError, "rank=2 is too large"),
        (10, {"num_replicas": 2, "rank": 0}, ValueError, "Give the same seed="),
    ],
)
def test_a_wrong_argument_is_named(dataset: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    for kind in (ShuffleBatchSampler, ShuffleSampler):
        with pytest.raises(error, match=words):
            kind(dataset, **{"batch_size": 4, **options})


def test_the_launcher_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(ShuffleBatchSampler(30, 4, seed=3)) == list(sampler_of(30, 4, 2, 1))
    assert list(ShuffleBatchSampler(30, 4, shuffle=False))  # needs no seed
    without_seed = ShuffleBatchSampler(30, 4)  # torch.distributed may be initialised before its first pass
    with pytest.raises(ValueError, match="Give the same seed="):
        next(iter(without_seed))
