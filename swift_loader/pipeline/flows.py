"""Stages that need no workers: they run on the thread of whoever pulls.

Each takes items and gives items. At the end of an epoch, all of them hand on what they hold before the marker.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from swift_loader.pipeline.failures import explained, place_of
from swift_loader.pipeline.items import Item, Marker, Place
from swift_loader.sampling.permutation import derive_key

_END = Marker.EPOCH_END

_SHUFFLE, _MIX = 0x5F, 0x31
"""What draws are for."""


def filtered(items: Iterable[Item], predicate: Callable[[Any], bool], stage: str) -> Iterator[Item]:
    """Keep the items for which the predicate is true. An error of the predicate names the stage and the item."""
    number = 0
    for item in items:
        if item.value is _END:
            yield item
            continue
        try:
            is_kept = predicate(item.value)
        except Exception as error:
            raise explained(error, place_of(stage, number))  # noqa: B904 - it has its causes
        number += 1
        if is_kept:
            yield item


def told(items: Iterable[Item], stage: str, number: int = 0) -> Iterator[Item]:
    """Pass items on. An error of what gives them names the stage and the item. `number`: of the first one."""
    try:
        for item in items:
            number = 0 if item.value is _END else number + 1
            yield item
    except Exception as error:
        raise explained(error, place_of(stage, number))  # noqa: B904 - it has its causes


def batched(items: Iterable[Item], batch_size: int, *, drop_last: bool) -> Iterator[Item]:
    """Collect items in lists. With `drop_last`, leave out a list that isn't full."""
    values: list[Any] = []
    after: Place = ()
    for item in items:
        if item.value is _END:
            if values and not drop_last:
                yield Item(values, after)
            values = []
            yield item
            continue
        values.append(item.value)
        after = item.after
        if len(values) == batch_size:
            yield Item(values, after)
            values = []
    if values and not drop_last:
        yield Item(values, after)


def unbatched(items: Iterable[Item], start: Place, num_skipped: int) -> Iterator[Item]:
    """Give the elements of each item one by one. The items' values are iterables, whose errors name the item.

    `start`: where they begin. `num_skipped`: how many elements of the first item are left out.
    """
    before = start
    for position, item in enumerate(items):
        if item.value is _END:
            before = beginning(start)
            yield item
            continue
        try:
            for number, value in enumerate(item.value, 1):
                if number > num_skipped:
                    yield Item(value, (*before, number))
        except Exception as error:
            raise explained(error, place_of("unbatch", position))  # noqa: B904 - it has its causes
        before, num_skipped = item.after, 0


def shuffled(
    items: Iterable[Item], buffer_size: int, key: Callable[[int], int], epoch: int, start: Place, num_skipped: int
) -> Iterator[Item]:
    """Give each time a random one of the next `buffer_size` items.

    `key` returns the key of an epoch's draws. `epoch`: the first one. `start`: always where the epoch began, because
    what waits depends on all items before. `num_skipped`: how many results are left out.
    """
    iterator, has_more = iter(items), True
    while has_more:
        has_more = False
        base = derive_key(key(epoch), _SHUFFLE)
        waiting: list[Any] = []
        num_results = 0
        for item in iterator:
            if item.value is _END:
                has_more = True
                break
            if len(waiting) < buffer_size:
                waiting.append(item.value)
                continue
            chosen = derive_key(base, num_results) % buffer_size
            value, waiting[chosen] = waiting[chosen], item.value
            num_results += 1
            if num_results > num_skipped:
                yield Item(value, (*start, num_results))
        while waiting:
            chosen = derive_key(base, num_results) % len(waiting)
            waiting[chosen], waiting[-1] = waiting[-1], waiting[chosen]
            value = waiting.pop()
            num_results += 1
            if num_results > num_skipped:
                yield Item(value, (*start, num_results))
        if has_more:
            yield Item(_END, ())
        start, num_skipped, epoch = beginning(start), 0, epoch + 1


def of_rank(items: Iterable[Item], rank: int, world_size: int, *, is_equal: bool) -> Iterator[Item]:
    """Keep every `world_size`-th item, beginning with number `rank`. The items are the same ones on all ranks.

    `is_equal`: the items after the last full round are left out, so that all ranks get the same number.
    """
    held: Item | None = None
    number = 0
    after: Place = ()
    for item in items:
        if item.value is _END:
            if held is not None and not is_equal:
                yield Item(held.value, after)
            held, number = None, 0
            yield item
            continue
        if number == rank:
            held = item
        number, after = number + 1, item.after
        if number == world_size:
            assert held is not None, "each round has an item of each rank"
            yield Item(held.value, after)
            held, number = None, 0
    if held is not None and not is_equal:
        yield Item(held.value, after)


def cached(
    items: Iterable[Item], num_items: int, stop_after: int | None, start: Place, num_skipped: int
) -> Iterator[Item]:
    """Give the first items again and again. Upstream isn't pulled any more once `num_items` came.

    Ends of epochs are left out. `stop_after`: how many results there are; None: without end. `start`: where items
    begin. `num_skipped`: how many results are left out.
    """
    values = (item.value for item in items if item.value is not _END)
    kept = list(itertools.islice(values, num_items))
    for number, value in enumerate(itertools.islice(itertools.cycle(kept), num_skipped, stop_after), num_skipped + 1):
        yield Item(value, (*start, number))


def in_turn(flows: list[Iterator[Item] | None], places: list[Place], turn: int, num_before: int) -> Iterator[Item]:
    """Give one item of each flow in turn, until all have ended.

    `flows`: what is merged; None: has ended. `places`: of each flow; empty if it has ended. `turn`: which flow is next.
    `num_before`: how many items were given before.
    """
    places, number = list(places), num_before
    while any(flow is not None for flow in flows):
        current, turn = turn, (turn + 1) % len(flows)
        flow = flows[current]
        item = next(flow, None) if flow is not None else None
        if item is None:
            flows[current], places[current] = None, ()
            continue
        places[current] = item.after
        number += 1
        yield Item(item.value, ((number, turn, *places),))


def mixed(
    flows: list[Iterator[Item] | None], weights: Sequence[float], key: int, places: list[Place], num_before: int
) -> Iterator[Item]:
    """Give items of several flows in a random order, until all have ended.

    `flows`, `places` and `num_before`: as in `in_turn`. `weights`: how often each is chosen, relative to the others
    that haven't ended. `key`: of the draws.
    """
    places, number = list(places), num_before
    left = [index for index, flow in enumerate(flows) if flow is not None]
    while left:
        chosen = _choose(left, weights, derive_key(key, _MIX, number) / 2**64)
        flow = flows[chosen]
        assert flow is not None, "it is left"
        item = next(flow, None)
        if item is None:
            left.remove(chosen)
            places[chosen] = ()
            continue
        places[chosen] = item.after
        number += 1
        yield Item(item.value, ((number, 0, *places),))


def _choose(left: list[int], weights: Sequence[float], draw: float) -> int:
    point = draw * sum(weights[index] for index in left)
    for index in left:
        point -= weights[index]
        if point < 0:
            return index
    return left[-1]


def beginning(place: Place) -> Place:
    """Return the place of the same form at the beginning of an epoch."""
    return tuple(0 if isinstance(part, int) else beginning(part) for part in place)
