from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_loader import DataLoader, StateMismatch, SwiftLoaderWarning, TokenBudgetBatchSampler
from tests.support.samplers import flat


def sampler_of(lengths: Any, max_tokens: int, world_size: int = 1, rank: int = 0, **options: Any) -> Any:
    options.setdefault("seed", 3)
    return TokenBudgetBatchSampler(lengths, max_tokens, num_replicas=world_size, rank=rank, **options)


@given(
    lengths=st.lists(st.integers(0, 40), max_size=120),
    max_tokens=st.integers(48, 400),
    max_samples=st.one_of(st.none(), st.integers(1, 9)),
    fill=st.sampled_from([(True, "next"), (False, "next"), (False, "best")]),
    multiple=st.sampled_from([1, 3, 8]),
    bucket_size=st.integers(1, 150),
    order=st.sampled_from([(False, 1), (True, 1), (True, 3), (True, 8)]),
    epoch=st.integers(0, 2),
)
@settings(max_examples=120, deadline=None)
def test_every_sample_is_in_one_batch_within_the_budget(
    lengths: list[int],
    max_tokens: int,
    max_samples: int | None,
    fill: tuple[bool, str],
    multiple: int,
    bucket_size: int,
    order: tuple[bool, int],
    epoch: int,
) -> None:
    (padded, fit), (shuffle, balance) = fill, order
    sampler = sampler_of(
        lengths,
        max_tokens,
        max_samples=max_samples,
        padded=padded,
        fit=fit,
        balance=balance,
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
    for options, full in (({}, 0.95), ({"padded": False}, 0.97), ({"padded": False, "fit": "best"}, 0.99)):
        for max_tokens in (2000, 16_384):
            batches = list(sampler_of(lengths, max_tokens, **options))
            tokens = lengths.sum() / len(batches) / max_tokens
            assert tokens > full - (0.15 if max_tokens == 2000 and full < 0.99 else 0)


def test_packed_batches_mix_lengths() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 50_000).astype(int) + 1, 2000)
    sizes = [len(batch) for batch in sampler_of(lengths, 16_384, padded=False, fit="best")]
    assert np.std(sizes) < 0.25 * np.mean(sizes)  # with first-fit decreasing, it is 1.2 of the mean


def cost(batch: list[int], lengths: Any, padded: bool) -> int:
    return max(lengths[batch]) * len(batch) if padded else sum(lengths[batch])


@pytest.mark.parametrize("padded", [True, False])
def test_batches_of_a_step_cost_the_same_for_each_number_of_ranks_that_divides_balance(padded: bool) -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1, 20_000).astype(int) + 1, 2048)

    def idle(world_size: int, balance: int) -> float:
        options: dict[str, Any] = {"padded": padded, "balance": balance, "uneven": "drop"}
        ranks = [list(sampler_of(lengths, 4096, world_size, rank, **options)) for rank in range(world_size)]
        steps = [[cost(batch, lengths, padded) for batch in step] for step in zip(*ranks, strict=True)]
        return 1 - sum(map(sum, steps)) / sum(max(step) * world_size for step in steps)

    assert sampler_of(lengths, 4096, balance=24).state_dict()["balance"] == 24
    for world_size in (2, 3, 8):
        assert idle(world_size, 24) < 0.01
    assert idle(5, 24) < idle(5, 1) / 2
    few = lengths[:200]
    assert list(sampler_of(few, 4096, padded=padded, balance=999)) == list(sampler_of(few, 4096, padded=padded))


@given(
    lengths=st.lists(st.integers(0, 20), max_size=60),
    world_sizes=st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=3),
    uneven=st.sampled_from(["pad", "drop", "exact"]),
    fit=st.sampled_from(["next", "best"]),
    stop=st.integers(1, 4),
)
@settings(max_examples=80, deadline=None)
def test_scaled_mean_losses_average_to_the_mean_of_all_tokens(
    lengths: list[int], world_sizes: list[int], uneven: str, fit: str, stop: int
) -> None:
    """Also after the run resumes on another number of ranks, and each batch is the next one of the same sequence."""
    options: dict[str, Any] = {"padded": False, "fit": fit, "balance": 2}
    sequence = list(sampler_of(lengths, 20, **options))
    losses, state, position = np.random.default_rng(0).random(len(lengths)), None, 0
    for world_size in world_sizes:
        samplers = [sampler_of(lengths, 20, world_size, rank, uneven=uneven, **options) for rank in range(world_size)]
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(state)
        if samplers[0].epoch:
            return
        iterators = [iter(sampler) for sampler in samplers]
        scales = [sampler.loss_scales(lengths) for sampler in samplers]
        while batches := [batch for iterator in iterators if (batch := next(iterator, None)) is not None]:
            now = [next(scales[rank]) for rank in range(len(batches))]
            counts = [sum(lengths[index] for index in batch) for batch in batches]
            sums = [sum(losses[index] * lengths[index] for index in batch) for batch in batches]
            scaled = [scale * total / max(count, 1) for scale, total, count in zip(now, sums, counts, strict=True)]
            assert sum(scaled) / world_size == pytest.approx(sum(sums) / max(sum(counts), 1))
            assert batches == [
                sequence[position + number % (len(sequence) - position)] for number in range(len(batches))
            ]
            position = min(position + world_size, len(sequence))
            state = samplers[0].state_dict()
            if stop and position >= stop:
                break
        else:
            assert [list(scale) for scale in scales] == [[]] * world_size
            return


def test_loss_scales_need_a_number_for_each_sample_and_a_pass() -> None:
    sampler = sampler_of([1, 2], 10)
    with pytest.raises(ValueError, match="tokens has 1 samples, but the dataset has 2"):
        next(sampler.loss_scales([1]))
    with pytest.raises(ValueError, match=r"tokens\[1\]=-1 is negative"):
        next(sampler.loss_scales([0, -1]))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="take the first batch before"):
            next(sampler.loss_scales([1, 2]))
        assert [scale for _, scale in zip(sampler, sampler.loss_scales([1, 2]), strict=True)] == [1.0]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=[pytest.mark.processes, pytest.mark.slow])])
def test_loss_scales_are_right_in_a_loader_that_resumes(num_workers: int) -> None:
    lengths = np.random.default_rng(2).integers(1, 50, 60)

    def scaled(num_batches: int | None, state: Any = None) -> tuple[list[Any], Any]:
        sampler = sampler_of(lengths, 80, 2, 1)
        loader: Any = DataLoader(range(60), batch_sampler=sampler, collate_fn=list, num_workers=num_workers)  # type: ignore[arg-type]
        if state is not None:
            loader.load_state_dict(state)
        pairs = zip(loader, sampler.loss_scales(lengths))  # noqa: B905 - a test stops early
        return list(islice(pairs, num_batches)), loader.state_dict()

    whole, _ = scaled(None)
    begun, state = scaled(5)
    rest, _ = scaled(None, state)
    assert begun + rest == whole
    assert len({scale for _, scale in whole}) > 5


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
    with pytest.raises(StateMismatch, match="best fit=0"):
        sampler_of(range(50), 60, padded=False, fit="best").load_state_dict({**state, "padded": 0})
    with pytest.raises(StateMismatch, match="balance=1"):
        sampler_of(range(50), 60, balance=2).load_state_dict(state)
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
        ({"fit": "first"}, ValueError, "'next', 'best'"),
        ({"fit": "best"}, ValueError, "give padded=False"),
        ({"balance": 0}, ValueError, "balance=0"),
        ({"balance": 2, "shuffle": False}, ValueError, "shuffle=True"),
        ({"lengths": [0.5]}, TypeError, "float64"),
        ({"lengths": 5}, ValueError, "0 dimensions"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        TokenBudgetBatchSampler(**{"lengths": [1, 2], "max_tokens": 10, **options})
