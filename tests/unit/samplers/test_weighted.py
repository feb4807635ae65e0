"""Orders with replacement, or with the share of each label in each batch."""

from __future__ import annotations

from itertools import islice, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import SequentialSampler

from swift_loader import StateMismatch, StratifiedBatchSampler, WeightedBatchSampler
from tests.support.samplers import LENGTHS, flat


def weighted(weights: Any, batch_size: int = 4, world_size: int = 1, rank: int = 0, **options: Any) -> Any:
    return WeightedBatchSampler(weights, batch_size, num_replicas=world_size, rank=rank, **{"seed": 3, **options})


def stratified(labels: Any, batch_size: int = 4, world_size: int = 1, rank: int = 0, **options: Any) -> Any:
    return StratifiedBatchSampler(labels, batch_size, num_replicas=world_size, rank=rank, **{"seed": 3, **options})


ORDERS = {
    "stratified": lambda *place: stratified(LENGTHS % 7, *place, uneven="exact"),
    "weighted": lambda *place: weighted([1, 0, 5, 0.5] * 9, *place, num_samples=97, uneven="exact"),
}


@pytest.mark.parametrize("make", ORDERS.values(), ids=list(ORDERS))
@given(
    legs=st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 3, 5]), st.integers(0, 4)), max_size=4),
    epoch=st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_ranks_and_batch_sizes_that_change_consume_one_order(
    make: Any, legs: list[tuple[int, int, int]], epoch: int
) -> None:
    drawn: list[int] = []
    state: Any = None
    for batch_size, world_size, num_steps in [*legs, (7, 2, 200)]:
        ranks = [make(batch_size, world_size, rank) for rank in range(world_size)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
            rank.set_epoch(epoch)
        for step in islice(zip_longest(*ranks, fillvalue=[]), num_steps):
            drawn += flat(list(step))
        state = ranks[0].state_dict()
    alone = make(1, 1, 0)
    alone.set_epoch(epoch)
    assert drawn == flat(list(alone))


def assert_is_chance(observed: Any, expected: Any) -> None:
    """Check the chi-square statistic: as its mean, within 4 standard deviations."""
    freedom = observed.size - 1
    assert abs(((observed - expected) ** 2 / expected).sum() - freedom) < 4 * (2 * freedom) ** 0.5


def test_draws_are_in_proportion_to_the_weights_and_independent() -> None:
    weights = np.random.default_rng(0).pareto(2, 30) + 0.1
    shares, num_draws = weights / weights.sum(), 200_000
    sampler = weighted(weights, 1000, num_samples=num_draws)
    epochs = [np.array(flat(list(sampler))) for _ in range(2)]
    pairs = [(epochs[0], epochs[1])] + [(epochs[0][:-lag], epochs[0][lag:]) for lag in (1, 2, 64, 8192)]
    for draws in epochs:
        assert_is_chance(np.bincount(draws, minlength=30), num_draws * shares)
    for one, other in pairs:
        table = np.bincount(one * 30 + other, minlength=900)
        assert_is_chance(table, len(one) * np.outer(shares, shares).ravel())


@pytest.mark.parametrize(
    ("weights", "drawn"),
    [
        ([0, 0, 2, 0], {2}),
        ([True, False, True], {0, 2}),
        ([0, 1e308, 1e308, 1e308, 0], {1, 2, 3}),
        ([5e-324, 0, 5e-324], {0, 2}),
        ([1, 1e-300], {0}),
        (torch.tensor([0.5, 0, 0.5], dtype=torch.float32), {0, 2}),
        (np.array([200, 0, 200], np.uint8), {0, 2}),
    ],
)
def test_a_sample_is_drawn_if_its_weight_is_above_0(weights: Any, drawn: set[int]) -> None:
    assert set(flat(list(weighted(weights, num_samples=200)))) == drawn


def test_only_the_ratios_of_weights_count() -> None:
    weights = np.array([1.0, 2.0, 4.0] * 9)
    sampler, expected = weighted(weights), list(weighted([2, 4, 8] * 9))
    weights[:] = 0  # it has a copy
    assert list(sampler) == expected
    for dtype in (np.float16, np.float32, np.uint8):  # added up in float64 with each NumPy
        sampler.load_state_dict(weighted(np.array([2, 4, 8] * 9, dtype)).state_dict())


@given(counts=st.lists(st.integers(1, 80), min_size=1, max_size=20), seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_the_first_samples_have_the_share_of_each_label_and_each_sample_comes_once(
    counts: list[int], seed: int
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    sampler = stratified(labels, 4, seed=seed)
    epochs = [flat(list(sampler)) for _ in range(2)]
    for drawn in epochs:
        assert sorted(drawn) == list(range(len(labels)))
        had = np.cumsum(labels[drawn][:, None] == np.arange(len(counts)), axis=0)
        due = np.arange(1, len(labels) + 1)[:, None] * np.array(counts) / len(labels)
        assert np.abs(had - due).max() < 2
    assert epochs[0] != epochs[1] or len(labels) < 10


def test_labels_share_a_batch_with_other_labels_in_each_epoch() -> None:
    labels = np.arange(640) % 64
    sampler = stratified(labels, 16)
    compositions = [{frozenset(labels[batch].tolist()) for batch in sampler} for _ in range(2)]
    assert all(len(batch) == 16 for epoch in compositions for batch in epoch)
    assert not compositions[0] & compositions[1]


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda labels: [f"class {label}" for label in labels]])
def test_labels_are_integers_or_strings(kind: Any) -> None:
    labels = [5, 1, 1, 5, 5, 3] * 9
    assert list(stratified(kind(labels))) == list(stratified(np.array(labels, np.uint8)))


@pytest.mark.parametrize("dtype", ["object", "string", "category", "string[pyarrow]"])
@pytest.mark.parametrize("is_text", [True, False])
def test_labels_may_be_a_column_of_pandas_or_pyarrow(dtype: str, is_text: bool) -> None:
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    labels = [f"class {number}" if is_text else number for number in [5, 1, 10, 5, 5, 3] * 9]
    column = pandas.Series(labels, dtype=dtype if is_text or dtype in ("object", "category") else "Int64")
    expected = list(stratified(labels))
    for given_labels in (column, column.array, pandas.Index(column), pyarrow.chunked_array([labels[:9], labels[9:]])):
        assert list(stratified(given_labels)) == expected
    with pytest.raises(TypeError, match=r"labels\[54\]=\S+ is a \w+; .*without a label|labels are float64"):
        stratified(pandas.concat([column, pandas.Series([None], dtype=column.dtype)]))


def test_a_state_of_other_labels_is_refused() -> None:
    state = stratified([0, 1, 1, 0]).state_dict()
    stratified([5, 7, 7, 5]).load_state_dict(state)
    for other, words in (
        (stratified([0, 1, 0, 1]), "checksum of labels"),
        (stratified([0, 1, 1, 2]), "checksum of labels"),
        (weighted([0, 1, 1, 0]), "StratifiedBatchSampler"),
    ):
        with pytest.raises(StateMismatch, match=words):
            other.load_state_dict(state)


def test_a_state_of_other_weights_is_refused() -> None:
    state = weighted([1, 2, 3]).state_dict()
    for other, words in (
        (weighted([1, 3, 2]), "checksum of weights"),
        (weighted([1, 2, 3], num_samples=4), "num_samples=3"),
        (weighted([1, 2, 3], seed=4), "seed=3"),
    ):
        with pytest.raises(StateMismatch, match=words):
            other.load_state_dict(state)


def test_the_last_of_10_to_the_15_draws_comes_as_soon_as_the_first() -> None:
    sampler = weighted([1, 2], num_samples=10**15)
    sampler.load_state_dict({**sampler.state_dict(), "position": 10**15 - 8})
    assert [len(batch) for batch in sampler] == [4, 4]


@pytest.mark.parametrize(
    ("weights", "options", "error", "words"),
    [
        (SequentialSampler(range(5)), {}, TypeError, "use_distributed_sampler=False"),
        ([[1.0]], {}, ValueError, r"shape \(1, 1\)"),
        (["1"], {}, TypeError, "must be numbers"),
        ([1, -0.5], {}, ValueError, r"weights\[1\]=-0.5"),
        ([1, 2, float("nan")], {}, ValueError, r"weights\[2\]=nan"),
        ([float("inf")], {}, ValueError, r"weights\[0\]=inf"),
        ([0, 0], {}, ValueError, "all 2 weights are 0"),
        ([], {}, ValueError, r"shape \(0,\)"),
        ([1], {"num_samples": 0}, ValueError, "num_samples=0"),
        ([1], {"batch_size": 0}, ValueError, "batch_size=0"),
        ([1], {"drop_last": 1}, TypeError, "drop_last=1"),
        ([1], {"uneven": "even"}, ValueError, "uneven='even'"),
        ([1], {"rank": 0, "num_replicas": None}, ValueError, "need each other"),
    ],
)
def test_a_wrong_argument_of_draws_is_named(
    weights: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        WeightedBatchSampler(weights, **{"batch_size": 4, **options})


@pytest.mark.parametrize(
    ("labels", "options", "error", "words"),
    [
        (SequentialSampler(range(5)), {}, TypeError, "use_distributed_sampler=False"),
        ([], {}, ValueError, r"labels has the shape \(0,\)"),
        ([[1]], {}, ValueError, r"labels has the shape \(1, 1\)"),
        ([1.0, 2.0], {}, TypeError, "labels are float64; they must be integers or strings"),
        ([None, 1], {}, TypeError, r"labels\[0\]=None is a NoneType"),
        (np.array(["a", 1], object), {}, TypeError, r"labels\[1\]=1 is a int; labels must be all integers or all str"),
        ([1], {"batch_size": 0}, ValueError, "batch_size=0"),
    ],
)
def test_a_wrong_argument_of_strata_is_named(
    labels: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        StratifiedBatchSampler(labels, **{"batch_size": 4, **options})
