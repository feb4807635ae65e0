from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import SequentialSampler

from swift_loader import LengthBucketBatchSampler, StateMismatch
from tests.support.samplers import flat


def sampler_of(lengths: Any, batch_size: int, world_size: int = 1, rank: int = 0, **options: Any) -> Any:
    options.setdefault("seed", 3)
    return LengthBucketBatchSampler(lengths, batch_size, num_replicas=world_size, rank=rank, **options)


@given(
    lengths=st.lists(st.integers(0, 40), max_size=120),
    batch_size=st.integers(1, 15),
    bucket_size=st.one_of(st.none(), st.integers(1, 150)),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 2),
)
@settings(max_examples=100, deadline=None)
def test_every_sample_is_in_one_batch_of_the_right_size(
    lengths: list[int], batch_size: int, bucket_size: int | None, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    sampler = sampler_of(lengths, batch_size, bucket_size=bucket_size, shuffle=shuffle, drop_last=drop_last)
    sampler.set_epoch(epoch)
    length = len(sampler)
    batches = list(sampler)
    assert len(batches) == length
    num_left = len(lengths) % batch_size
    sizes = [batch_size] * (len(lengths) // batch_size) + ([num_left] if num_left and not drop_last else [])
    assert [len(batch) for batch in batches] == sizes
    counts = Counter(flat(batches))
    assert set(counts.values()) <= {1}
    if not drop_last:
        assert sorted(counts) == list(range(len(lengths)))


def test_batches_have_similar_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(int)
    padded = sum(int(lengths[batch].max()) * len(batch) for batch in sampler_of(lengths, 32))
    assert lengths.sum() / padded > 0.8
    unsorted = sum(int(lengths[batch].max()) * len(batch) for batch in sampler_of(lengths, 32, bucket_size=32))
    assert lengths.sum() / unsorted < 0.5


def test_each_epoch_forms_other_batches() -> None:
    sampler = sampler_of(np.arange(200) % 17, 8)
    first, second = ({frozenset(batch) for batch in sampler} for _ in range(2))
    assert len(first & second) < 3


def test_without_shuffling_buckets_follow_the_dataset() -> None:
    sampler = sampler_of([1, 2, 3, 4, 9, 8, 7, 6, 5], 2, bucket_size=4, shuffle=False)
    assert list(sampler) == [[3, 2], [1, 0], [4, 5], [6, 7], [8]]
    assert list(sampler) == [[3, 2], [1, 0], [4, 5], [6, 7], [8]]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda values: np.array(values, np.uint8)])
def test_lengths_are_any_integers(kind: Any) -> None:
    values = [5, 1, 7, 3, 9, 200]
    assert list(sampler_of(kind(values), 2)) == list(sampler_of(values, 2))


def test_changed_lengths_do_not_change_the_sampler() -> None:
    lengths = np.arange(50)
    sampler = sampler_of(lengths, 4)
    expected = list(sampler)
    lengths[:] = 1
    sampler.set_epoch(0)
    assert list(sampler) == expected


def test_other_lengths_or_options_are_refused_on_resume() -> None:
    state = sampler_of(range(50), 4).state_dict()
    with pytest.raises(StateMismatch, match="checksum of lengths"):
        sampler_of(range(1, 51), 4).load_state_dict(state)
    with pytest.raises(StateMismatch, match="saved with batch_size=4, but this sampler has batch_size=5"):
        sampler_of(range(50), 5).load_state_dict(state)
    with pytest.raises(StateMismatch, match="shuffle=1"):
        sampler_of(range(50), 4, shuffle=False).load_state_dict(state)
    with pytest.raises(StateMismatch, match="seed=3"):
        sampler_of(range(50), 4, seed=5).load_state_dict(state)


@pytest.mark.parametrize(
    ("lengths", "options", "error", "words"),
    [
        ([1.0, 2.0], {}, TypeError, "float64"),
        (SequentialSampler([1]), {}, TypeError, "use_distributed_sampler=False"),
        (["a"], {}, TypeError, "integers"),
        ([True, False], {}, TypeError, "bool"),
        ([[1, 2]], {}, ValueError, "2 dimensions"),
        (3, {}, ValueError, "0 dimensions"),
        ([4, -2, -3], {}, ValueError, r"lengths\[1\]=-2"),
        ([2**61, 1], {}, ValueError, "sum of lengths"),
        ([1], {"batch_size": 0}, ValueError, "batch_size=0"),
        ([1], {"bucket_size": 0}, ValueError, "bucket_size=0"),
        ([1], {"drop_last": None}, TypeError, "drop_last=None"),
    ],
)
def test_a_wrong_argument_is_named(lengths: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LengthBucketBatchSampler(lengths, **{"batch_size": 2, **options})
