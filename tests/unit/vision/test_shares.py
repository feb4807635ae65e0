from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.vision.shares import Share

REPEATS = st.one_of(st.integers(1, 6).map(float), st.floats(1, 6))


def share_of(num_samples: int, num_repeats: float, ranks: tuple[int, int], *, shuffle: bool = True) -> Share:
    order = OrderSettings.of(seed=3, shuffle=shuffle, window=0, batch_size=8)
    return Share(order, num_samples, num_repeats, *ranks)


def items_of(share: Share, epoch: int = 0, *, cycles: int = 1) -> list[int]:
    items: list[int] = share.indices(epoch, np.arange(cycles * share.num_items)).tolist()
    return items


@given(st.integers(1, 1200), REPEATS, st.integers(1, 5), st.data())
def test_the_selection_is_timms(
    timm_data: Any, num_samples: int, num_repeats: float, world_size: int, data: Any
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    theirs = timm_data.distributed_sampler.RepeatAugSampler(
        range(num_samples), world_size, rank, shuffle=False, num_repeats=num_repeats
    )
    ours = share_of(num_samples, num_repeats, (world_size, rank), shuffle=False)
    if num_repeats > 1:
        assert ours.num_items == len(theirs)
        assert items_of(ours) == list(theirs)


@given(st.integers(1, 300), st.integers(1, 5))
def test_without_repeats_each_sample_comes_once_except_for_padding(num_samples: int, world_size: int) -> None:
    shares = [share_of(num_samples, 1.0, (world_size, rank)) for rank in range(world_size)]
    counts = Counter(index for share in shares for index in items_of(share))
    assert sorted(counts) == list(range(num_samples))
    assert len({share.num_items for share in shares}) == 1
    assert counts.total() - num_samples < world_size


def test_the_repeats_of_a_sample_go_to_different_ranks_at_the_same_place() -> None:
    by_rank = [items_of(share_of(300, 3.0, (3, rank))) for rank in range(3)]
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert len(set(by_rank[0])) == len(by_rank[0]) == 256 // 3


def test_on_one_rank_repeats_follow_each_other() -> None:
    items = items_of(share_of(10, 3.0, (1, 0)))
    assert len(items) == 10
    assert items[0] == items[1] == items[2] != items[3] == items[4]


def test_epochs_and_further_cycles_have_orders_of_their_own() -> None:
    share = share_of(50, 1.0, (1, 0))
    orders = [items_of(share, epoch) for epoch in range(3)] + [items_of(share, 0, cycles=2)[50:]]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@given(st.integers(1, 100), REPEATS, st.integers(1, 3), st.data())
def test_items_can_be_asked_for_in_any_pieces(num_samples: int, num_repeats: float, world_size: int, data: Any) -> None:
    share = share_of(num_samples, num_repeats, (world_size, 0))
    items = items_of(share, 1, cycles=3)
    start = data.draw(st.integers(0, len(items)))
    stop = data.draw(st.integers(start, len(items)))
    assert share.indices(1, np.arange(start, stop)).tolist() == items[start:stop]


@pytest.mark.parametrize("num_repeats", [1.0, 2.5])
def test_no_items_are_an_empty_array(num_repeats: float) -> None:
    assert items_of(share_of(0, num_repeats, (1, 0))) == []
