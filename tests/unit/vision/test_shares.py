from __future__ import annotations

from typing import Any

import numpy as np
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
