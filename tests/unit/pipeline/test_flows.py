from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_loader.pipeline.nodes import Batch, Cache, Node, Shard, Shuffle, Unbatch
from swift_loader.pipeline.sources import joined
from swift_loader.pipeline.stage import Item, Opening, Place


def items(num: int, start: int = 0) -> Iterator[Item]:
    """Return items of a source: their numbers."""
    return (Item(number, (number + 1,)) for number in range(start, num))


def marked(which: int, source: Iterator[Item]) -> Iterator[Item]:
    """Return the items with the number of their flow."""
    return (Item((which, item.value), item.after) for item in source)


def values(flow: Iterator[Item]) -> list[Any]:
    return [item.value for item in flow]


def flow(node: Node, source: Iterator[Item], start: Place = (0,), num_skipped: int = 0) -> Iterator[Item]:
    """Return a node's results for the only epoch of a source."""
    return next(node.flows(iter((source,)), Opening(start, num_skipped, 5, 3)))


def chunks(source: Iterator[Item]) -> Iterator[Item]:
    """Return an item of `number % 4` elements for each."""
    return (Item([item.value] * (item.value % 4), item.after) for item in source)


COUNTING: dict[str, Node] = {"unbatch": Unbatch(), "shuffle": Shuffle(5), "cache": Cache(7, 30)}


@given(st.integers(0, 60), st.integers(1, 20), st.booleans())
def test_batches_hold_all_items_in_order(num: int, batch_size: int, drop_last: bool) -> None:
    batches = list(flow(Batch(batch_size, drop_last), items(num)))
    kept = num - num % batch_size if drop_last else num
    assert [number for batch in batches for number in batch.value] == list(range(kept))
    assert all(len(batch.value) == batch_size for batch in batches[:-1])
    assert [batch.after for batch in batches] == [(batch.value[-1] + 1,) for batch in batches]


@given(st.integers(0, 60), st.data())
@pytest.mark.parametrize("name", COUNTING)
def test_a_counting_flow_continues_at_each_place(name: str, num: int, data: st.DataObject) -> None:
    node = COUNTING[name]
    given_items = chunks if name == "unbatch" else iter
    whole = list(flow(node, given_items(items(num))))
    assert len({item.after for item in whole}) == len(whole)
    if whole:
        cut = data.draw(st.integers(0, len(whole) - 1))
        start, skipped = whole[cut].after
        rest = flow(node, given_items(items(num, start)), (start,), skipped)
        assert list(rest) == whole[cut + 1 :]


@given(st.integers(0, 60), st.integers(1, 80))
def test_a_shuffle_gives_each_item_once_and_none_too_early(num: int, buffer_size: int) -> None:
    got = values(flow(Shuffle(buffer_size), items(num)))
    assert sorted(got) == list(range(num))
    assert all(value <= position + buffer_size for position, value in enumerate(got))


def test_a_shuffle_differs_from_epoch_to_epoch() -> None:
    first, second = map(values, Shuffle(20).flows(iter((items(50), items(50))), Opening((0,), key=5)))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    (again,) = map(values, Shuffle(20).flows(iter((items(50),)), Opening((0,), key=5, epoch=1)))
    assert again == second


@given(st.integers(0, 60), st.integers(1, 7), st.booleans())
def test_ranks_share_the_items(num: int, world_size: int, is_equal: bool) -> None:
    parts = [values(flow(Shard(rank, world_size, is_equal), items(num))) for rank in range(world_size)]
    kept = num - num % world_size if is_equal else num
    assert parts == [list(range(rank, kept, world_size)) for rank in range(world_size)]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.booleans(), st.data())
def test_joined_flows_give_everything_once_and_continue_at_each_place(
    sizes: list[int], is_mixed: bool, data: st.DataObject
) -> None:
    def rest(places: list[Place], turn: int, num_before: int) -> Iterator[Item]:
        parts = [
            marked(which, items(size, place[0])) if place else None
            for which, (size, place) in enumerate(zip(sizes, places, strict=True))
        ]
        weights = [1.0 + number for number in range(len(sizes))]
        return joined(parts, places, num_before, turn, weights if is_mixed else (), 5)

    whole = list(rest([(0,)] * len(sizes), 0, 0))
    assert Counter(values(iter(whole))) == Counter((which, n) for which, size in enumerate(sizes) for n in range(size))
    if whole:
        cut = data.draw(st.integers(0, len(whole) - 1))
        ((number, turn, *places),) = whole[cut].after
        assert number == cut + 1
        assert list(rest(places, turn, number)) == whole[cut + 1 :]


def test_a_mix_follows_the_weights() -> None:
    parts: list[Iterator[Item] | None] = [marked(which, items(4000)) for which in range(2)]
    chosen = [item.value[0] for item in itertools.islice(joined(parts, [(0,)] * 2, 0, 0, [3.0, 1.0], 1), 4000)]
    assert 0.72 < chosen.count(0) / 4000 < 0.78


def test_a_cache_pulls_no_more_than_it_keeps() -> None:
    source = items(100)
    assert values(flow(Cache(3, 8), source)) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert next(source).value == 3
    assert values(flow(Cache(3, None), iter(()))) == []
