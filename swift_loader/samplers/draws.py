"""Draws from any sampler so that every rank, and every resumed run, draws the same.

While the sampler is drawn from, the generators that it may use are seeded: `random`, the legacy `numpy.random`,
torch's default generator, and each torch generator that it keeps in an attribute `generator`. Afterwards they are
restored. That takes 0.4 ms, so a block of items is drawn at a time. Each block has its own key. So the numbers of a
block depend on seed, epoch and block, and not on where the run was resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, Generic, TypeVar

import torch

from swift_loader.sampling.permutation import derive_key
from swift_loader.worker.generators import preserved_generators, seed_generators

__all__ = ["BLOCK_ITEMS", "Draws", "chain_of"]

BLOCK_ITEMS = 256
"""Seeding takes less than 2 us an item then. A block that takes long to draw delays the loop."""

MAX_CHAIN = 16
"""A property that makes a new sampler each time would make an endless chain."""

_Item = TypeVar("_Item")


def chain_of(sampler: object) -> list[Any]:
    """Return a sampler and those that it draws from: its attributes `sampler` and `batch_sampler`, and theirs."""
    chain: list[Any] = []
    waiting = [sampler]
    while waiting and len(chain) < MAX_CHAIN:
        one = waiting.pop()
        if one is not None and all(one is not other for other in chain):
            chain.append(one)
            waiting += [getattr(one, name, None) for name in ("sampler", "batch_sampler")]
    return chain


class Draws(Generic[_Item]):
    """Draws the items of one epoch in blocks: the first item alone, then up to each multiple of `BLOCK_ITEMS`.

    After its first item, a sampler's state tells its epoch apart from the one before.
    """

    def __init__(self, sampler: Iterable[_Item], key: int, num_drawn: int = 0) -> None:
        """Begin an epoch, or continue one.

        Args:
            sampler: Where `iter` continues at item `num_drawn`.
            key: Depends on seed and epoch.
            num_drawn: Where a block begins: 0, 1 or a multiple of `BLOCK_ITEMS`.
        """
        self._sampler = sampler
        self._generators = [
            one.generator for one in chain_of(sampler) if isinstance(getattr(one, "generator", None), torch.Generator)
        ]
        self._key = key
        self.num_drawn = num_drawn
        self.is_over = False
        """Whether nothing is left to draw."""
        self._items: Iterator[_Item] | None = None

    def block(self) -> list[_Item]:
        """Return the next block. It may be empty at the epoch's end. Raises what the sampler raises."""
        start = self.num_drawn
        stop = 1 if start == 0 else start - start % BLOCK_ITEMS + BLOCK_ITEMS
        with self._seeded(start):
            if self._items is None:
                self._items = iter(self._sampler)
            items = list(islice(self._items, stop - start))
        self.num_drawn += len(items)
        self.is_over = self.num_drawn < stop
        return items

    @contextmanager
    def _seeded(self, start: int) -> Iterator[None]:
        key = derive_key(self._key, start)
        with ExitStack() as stack:
            stack.enter_context(preserved_generators())
            for generator in self._generators:
                stack.callback(generator.set_state, generator.get_state())
            seed_generators(key)
            for generator in self._generators:
                generator.manual_seed(key)
            yield
