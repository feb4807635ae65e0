from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader import StateMismatch, SwiftLoaderWarning, TokenBudgetBatchSampler
from tests.support.samplers import flat


def sampler_of(lengths: Any, max_tokens: int, world_size: int = 1, rank: int = 0, **options: Any) -> Any:
    options.setdefault("seed", 3)
    return TokenBudgetBatchSampler(lengths, max_tokens, num_replicas=world_size, rank=rank, **options)


@given(
    lengths=st.lists(st.integers(0, 40), max_size=120),
    max_tokens=st.integers(48, 400),
    max_samples=st.one_of(st.none(), st.integers(1, 9)),
    padded=st.booleans(),
    multiple=st.sampled_from([1, 3, 8]),
    bucket_size=st.integers(1, 150),
    shuffle=st.booleans(),
    epoch=st.integers(0, 2),
)
@settings(max_examples=120, deadline=None)
def test_every_sample_is_in_one_batch_within_the_budget(
    lengths: list[int],
    max_tokens: int,
    max_samples: int | None,
    padded: bool,
    multiple: int,
    bucket_size: int,
    shuffle: bool,
    epoch: int,
) -> None:
    sampler = sampler_of(
        lengths,
        max_tokens,
        max_samples=max_samples,
        padded=padded,
        pad_to_multiple_of=multiple,
        bucket_size=bucket_size,
        shuffle=shuffle,
    )
    sampler.set_epoch(epoch)
    length = len(sampler)
    batches = list(sampler)
    assert len(batches) == length
    assert sorted(flat(batches)) == list(range(len(lengths)))
    for batch in batches:
        costs = [math.ceil(max(lengths[index], 1) / multiple) * multiple for index in batch]
        assert (max(costs) * len(costs) if padded else sum(costs)) <= max_tokens
        assert len(batch) <= (max_samples or len(lengths))


def test_batches_are_nearly_full() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 50_000).astype(int) + 1, 2000)
    for padded in (True, False):
        batches = list(sampler_of(lengths, 16_384, padded=padded))
        tokens = lengths.sum() / len(batches) / 16_384
        assert tokens > 0.9


def test_each_epoch_forms_other_batches_in_another_order() -> None:
    sampler = sampler_of(np.arange(1, 400) % 17 + 1, 100)
    first, second = ({frozenset(batch) for batch in sampler} for _ in range(2))
    assert len(first & second) < 5


def test_a_sample_beyond_the_budget_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"sample 1 counts as 99 tokens.* max_tokens=50, and so do 1 others"):
        sampler_of([1, 99, 3, 98], 50)
    with pytest.raises(ValueError, match=r"sample 0 counts as 16 tokens, more than max_tokens=10\. Raise"):
        sampler_of([9], 10, pad_to_multiple_of=8)


def test_a_sample_beyond_the_budget_can_be_left_out() -> None:
    with pytest.warns(SwiftLoaderWarning, match="2 of 4 samples have more than max_tokens=50 tokens"):
        sampler = sampler_of([1, 99, 3, 98], 50, oversized="drop")
    assert sorted(flat(list(sampler))) == [0, 2]


@pytest.mark.parametrize("padded", [True, False])
def test_a_sample_beyond_the_budget_can_be_alone(padded: bool) -> None:
    batches = list(sampler_of([1, 99, 3, 98], 50, oversized="alone", padded=padded))
    assert sorted(flat(batches)) == [0, 1, 2, 3]
    assert [1] in batches
    assert [3] in batches


def test_the_largest_budget_takes_all_samples() -> None:
    for padded in (True, False):
        assert sorted(flat(list(sampler_of([5, 1, 2], 2**100, padded=padded)))) == [0, 1, 2]
        assert len(sampler_of([5, 1, 2], 2**100, padded=padded)) == 1


def test_other_options_are_refused_on_resume() -> None:
    state = sampler_of(range(50), 60).state_dict()
    with pytest.raises(StateMismatch, match="max_tokens=60"):
        sampler_of(range(50), 61).load_state_dict(state)
    with pytest.raises(StateMismatch, match="padded=1"):
        sampler_of(range(50), 60, padded=False).load_state_dict(state)
    with pytest.raises(StateMismatch, match="checksum of lengths"):
        sampler_of(range(50), 60, pad_to_multiple_of=4).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens=0"),
        ({"max_tokens": 1.5}, TypeError, r"max_tokens=1\.5"),
        ({"max_samples": 0}, ValueError, "max_samples=0"),
        ({"pad_to_multiple_of": 0}, ValueError, "pad_to_multiple_of=0"),
        ({"oversized": "keep"}, ValueError, "'raise', 'drop', 'alone'"),
        ({"padded": "yes"}, TypeError, "padded='yes'"),
        ({"lengths": [0.5]}, TypeError, "float64"),
        ({"lengths": 5}, ValueError, "0 dimensions"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        TokenBudgetBatchSampler(**{"lengths": [1, 2], "max_tokens": 10, **options})
