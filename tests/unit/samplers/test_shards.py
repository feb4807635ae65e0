from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swift_loader.samplers.shards import Shard
from swift_loader.sampling.plan import Uneven


def drawn(num_items: int, shard: Shard) -> list[int]:
    """What one rank gets, step by step."""
    items, position = [], 0
    while (picked := shard.pick(num_items - position)) is not None:
        items.append(position + picked)
        position += shard.world_size
    return items


@given(st.integers(0, 60), st.integers(1, 9), st.sampled_from(Uneven))
def test_items_are_split_as_uneven_says(num_items: int, world_size: int, uneven: Uneven) -> None:
    shards = [Shard(rank, world_size, uneven) for rank in range(world_size)]
    ranks = [drawn(num_items, shard) for shard in shards]
    assert [len(rank) for rank in ranks] == [shard.num_steps(num_items) for shard in shards]
    items = sorted(item for rank in ranks for item in rank)
    if uneven is Uneven.EXACT:
        assert items == list(range(num_items))
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
        return
    assert len({len(rank) for rank in ranks}) == 1
    if uneven is Uneven.DROP:
        assert items == list(range(num_items - num_items % world_size))
    else:
        assert sorted(set(items)) == list(range(num_items))
        assert len(items) - num_items < world_size


@given(st.integers(1, 60), st.integers(1, 9), st.sampled_from(Uneven))
def test_a_step_is_the_last_if_no_rank_has_another(num_left: int, world_size: int, uneven: Uneven) -> None:
    after = num_left - world_size
    have_more = [Shard(rank, world_size, uneven).pick(after) is not None for rank in range(world_size)]
    assert Shard(0, world_size, uneven).is_last(num_left) == (not any(have_more))
