"""Splits an order over the ranks: swift_loader's own, or that of any sampler.

`ShuffleBatchSampler` yields batches (`batch_sampler=`), `ShuffleSampler` the same batches index by index (`sampler=`).
Their order is a computed permutation, O(1) to resume. Both split it over the ranks as `SwiftLoader` does, and their
states can be exchanged with each other's and with `SwiftLoader`'s.

`distributed` splits any sampler or batch sampler, with equal numbers of items on all ranks:

    the sampler, drawn the same on every rank ──► blocks of items ──► steps of one item per rank ──► this rank's item

While the sampler is drawn from, the generators that it may use are seeded: `random`, the legacy `numpy.random`,
torch's default generator, and each generator that it keeps in an attribute. Afterwards they are
restored. That takes 0.4 ms, so a block of items is drawn at a time. Each block has its own key. So the numbers of a
block depend on seed, epoch and block, and not on where the run was resumed.

The position is how many items all ranks have drawn. If the sampler has a `state_dict`, its states at the beginning of
the blocks are kept, and a resumed run draws from the last one again. If not, or if the states stay the same, it draws
again from the epoch's start.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from swift_loader.batch.digests import difference
from swift_loader.checks import check_flag, check_integer, check_optional_integer
from swift_loader.errors import StateMismatch
from swift_loader.ranks.ranks import Ranks
from swift_loader.samplers.base import (
    PLACE,
    ResumableSampler,
    chain_of,
    facts_of_sampler,
    num_ranks_of,
    ranks_of,
    refuse_sampler,
    seed_of,
)
from swift_loader.sampling.integers import TEXT, Form
from swift_loader.sampling.mixture import mix_of
from swift_loader.sampling.permutation import derive_key
from swift_loader.sampling.plan import Plan, PlanReader, PlanSettings, Uneven
from swift_loader.sampling.run import Pass, PassState, Run, fixed_fields
from swift_loader.sampling.shuffle import OrderSettings
from swift_loader.sampling.skips import Position
from swift_loader.worker.seeding import preserved_generators, seed_generators

_Item = TypeVar("_Item")


class _PlannedSampler(ResumableSampler[_Item]):
    """An order that is cut into the batches of one rank. Memory is O(batch), and resuming is O(1)."""

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        nearby_shuffle: int | None = None,
        drop_last: bool = False,
        uneven: Literal["pad", "drop", "exact"] = "pad",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Start with epoch 0. With several ranks and no seed, this blocks until all ranks are here.

        Args:
            dataset: The dataset, its length, or a `Mixture`.
            batch_size: Samples in a batch of one rank.
            shuffle: Whether to shuffle.
            seed: Seed of the order. None: that of torch's default generator; with several ranks, that of rank 0.
            nearby_shuffle: How many samples are shuffled together, as for `SwiftLoader`. 0: all.
            drop_last: Whether to leave out the last step of an epoch, if it isn't full on all ranks.
            uneven: What happens in that step otherwise: `"pad"`, `"drop"` or `"exact"`, as for `SwiftLoader`.
            num_replicas: Number of ranks. None: that of torch.distributed or of the launcher, else 1.
            rank: The number of this rank. Give `num_replicas`, too.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument is out of its range, or the ranks have no common seed.
        """
        refuse_sampler("dataset", dataset)
        self._num_samples = len(dataset) if isinstance(dataset, Sized) else check_integer("dataset", dataset, 0)
        self._batch_size = check_integer("batch_size", batch_size, 1)
        shuffle, self.drop_last = check_flag("shuffle", shuffle), check_flag("drop_last", drop_last)
        window = check_optional_integer("nearby_shuffle", nearby_shuffle, 0)
        order = OrderSettings.of(seed=seed_of(seed), shuffle=shuffle, window=window, batch_size=self._batch_size)
        fixed = fixed_fields(seed=seed, shuffle=shuffle, window=window)
        self._run = Run(replace(order, mix=mix_of(dataset)), fixed, is_of_loader=False)
        """The order, too. A loaded state may replace it."""
        super().__init__(ranks_of(num_replicas, rank), seed, uneven, is_seed_used=shuffle)
        self._passes = self._run
        self._run.note_length(self._num_samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after what was drawn so far: plain integers, the same on every rank.

        With several ranks, `ShuffleSampler` counts whole batches.
        """
        return self._run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume there. Batch size and number of ranks may be others than when it was saved. O(1).

        Raises:
            TypeError: The state isn't a dict.
            StateMismatch: The state is of another dataset, seed or order. Nothing has changed then.
        """
        self._run.load_state_dict(state)
        self._seed, self._drawn_for = self._run.order.seed, None

    def exclude(self, rows: Any) -> None:
        """Leave rows out from where the next pass begins, as `SwiftLoader.exclude` does. The state has them.

        Args:
            rows: Dataset indices, or a function that chooses them, as for `SwiftLoader`.

        Raises:
            RuntimeError: A pass is running, so the loop may have drawn ahead. Load a state first, or end the pass.
            TypeError: The rows aren't integers.
            ValueError: A row isn't in the dataset, or nothing would be left.
        """
        if self._passes.last.state is PassState.RUNNING:
            raise RuntimeError(
                "rows can't be excluded while a pass is running, because the loop may have drawn ahead. Do it before "
                "the pass, or after load_state_dict()"
            )
        self._run.exclude(rows, self._num_samples)

    def _agree(self) -> None:
        super()._agree()
        self._run.take_seed(self._seed)

    def _plan(self) -> Plan:
        order, replicas = self._run.order, self.num_replicas
        settings = PlanSettings(order, self._batch_size, replicas, self.rank, self._uneven, self.drop_last)
        return Plan.of(self._num_samples, replace(settings, skips=self._run.skips))


def _cut(plan: Plan, this: Pass) -> Iterator[tuple[list[int], int]]:
    """Yield the batches of a pass, and the position after each, over all ranks. Advance the pass for each."""
    plan, first_step = plan.resumed_at(Position(this.epoch, this.position))
    reader = PlanReader(plan)
    for step in range(first_step, plan.num_batches(this.epoch)):
        after = plan.position_after(this.epoch, step).num_samples
        yield reader.batch(this.epoch, step).indices.tolist(), after


class PlannedBatches(ResumableSampler[list[int]]):
    """Yields the batches of one rank. A subclass has the plan."""

    def _plan(self) -> Plan:
        raise NotImplementedError

    def _rest(self, this: Pass) -> Iterator[list[int]]:
        plan = self._plan()
        for indices, after in _cut(plan, this):
            this.advance(after, at_end=after == plan.order.num_samples)
            yield indices
        this.advance(plan.order.num_samples, at_end=True)  # a rank may lack the last batch of an uneven epoch

    def __len__(self) -> int:
        """Return the number of batches of this rank in a whole epoch."""
        return self._plan().num_batches(self.epoch)


class ShuffleBatchSampler(_PlannedSampler[list[int]], PlannedBatches):
    """Yields the batches of one rank as lists of indices: the argument `batch_sampler` of a DataLoader."""

    @property
    def batch_size(self) -> int:
        """Samples in a batch of one rank."""
        return self._batch_size


class ShuffleSampler(_PlannedSampler[int]):
    """Yields the indices of one rank, one by one: the argument `sampler` of a DataLoader.

    Give the DataLoader the same `batch_size`. Then the batches are those of `ShuffleBatchSampler`.
    """

    def _rest(self, this: Pass) -> Iterator[int]:
        plan = self._plan()
        gaps, is_alone = plan.gaps(this.epoch), plan.settings.world_size == 1
        for (*others, last), after in _cut(plan, this):
            for index in others:
                if is_alone:  # else the other ranks' samples of this step lie between: it counts whole
                    this.advance(gaps.position_of(gaps.place_of(this.position) + 1), at_end=False)
                yield index
            this.advance(after, at_end=after == self._num_samples)
            yield last
        this.advance(self._num_samples, at_end=True)

    def __len__(self) -> int:
        """Return the number of indices of this rank in a whole epoch, with padding."""
        return self._plan().num_samples(self.epoch)


_KEY = 0xD157
"""Tells the key of the draws from other keys of the same seed."""


BLOCK_ITEMS = 256
"""Seeding takes less than 2 us an item then. A block that takes long to draw delays the loop."""


class _Mark(NamedTuple):
    """Where a resumed run can begin to draw again."""

    position: int
    state: Any
    """The sampler's state there; None: there is none, or it isn't needed."""


_START = _Mark(0, None)


def _read_mark(inner: Any) -> _Mark:
    position, state = _START if inner in ((), []) else inner
    return _Mark(PLACE.read(position), state)


def distributed(
    sampler: Iterable[_Item],
    num_replicas: int | None = None,
    rank: int | None = None,
    *,
    drop_last: bool = False,
    seed: int | None = None,
) -> ShardedSampler[_Item]:
    """Return this rank's part of any sampler or batch sampler: weighted, bucketed or your own.

    In each step, every rank gets one item: an index, or a batch of a batch sampler. All ranks get the same number.
    With several ranks and no seed, this blocks until all ranks are here.

    Args:
        sampler: Yields the items of an epoch at each `iter`. Its random numbers must come from torch, `random` or
            `numpy.random`, or from generators of these in its attributes. They are seeded while it is drawn from, and
            restored afterwards.
        num_replicas: Number of ranks. None: that of torch.distributed or of the launcher, else 1.
        rank: The number of this rank. Give `num_replicas`, too.
        drop_last: What happens in the last step if there aren't items for all ranks. True leaves them out, False
            repeats some.
        seed: Seed of the draws. None: that of torch's default generator; with several ranks, that of rank 0.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, the sampler is split already, or the ranks have no common seed.
    """
    ranks = ranks_of(num_replicas, rank)
    _check_inner(sampler, ranks.world_size)
    uneven = Uneven.DROP if check_flag("drop_last", drop_last) else Uneven.PAD
    return ShardedSampler(sampler, ranks, uneven, seed)


class ShardedSampler(ResumableSampler[_Item]):
    """What `distributed` returns. Use it where the sampler that it splits would be used."""

    _forms = {
        "inner": Form("a position and the sampler's state there, or nothing", _read_mark, older=_START),
        "of": TEXT._replace(older=""),
    }

    def __init__(self, inner: Iterable[_Item], ranks: Ranks, uneven: Uneven, seed: int | None) -> None:
        """Begin with epoch 0."""
        self.inner = inner
        self.batch_size = getattr(inner, "batch_size", None)
        super().__init__(ranks, seed, uneven)
        self._name = "distributed"
        self._marks = deque([_START])
        """The first is the last one that isn't after the position."""

    def _rest(self, this: Pass) -> Iterator[_Item]:
        if this.at_end:
            return
        mark = self._marks[0] if this.position else _START
        marks = self._marks = deque([mark])
        shard, draws = self._shard, self._draws(this.epoch, mark)
        world_size = shard.world_size
        left = self._skip(draws, marks, this.position - mark.position)
        while True:
            left += self._more(draws, marks, 2 * world_size - len(left))
            num_steps = max(1, len(left) // world_size - 1)  # of those, only the last may be the epoch's last
            picked = shard.pick(len(left))
            if picked is None:
                return
            for first in range(0, num_steps * world_size, world_size):
                is_last = shard.is_last(len(left) - first)
                num_taken = len(left) - first if is_last else world_size
                this.advance(this.position + num_taken, at_end=is_last)
                while len(marks) > 1 and marks[1].position <= this.position:
                    marks.popleft()
                yield left[first + picked]
            del left[: num_steps * world_size]

    def __len__(self) -> int:
        """Return the number of items of this rank in a whole epoch. A TypeError if the sampler has no length."""
        return self._shard.num_steps(len(self.inner))  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the items drawn so far: integers, strings, and maybe a state of the sampler.

        It is the same on every rank.
        """
        state, this = super().state_dict(), self._passes.current
        mark = self._marks[0] if this.position and not this.at_end else _START
        # In a tuple: torch.distributed.checkpoint takes a dict apart, and loads only the keys that a new one has.
        return state | {"inner": tuple(mark) if mark.state is not None else (), "of": facts_of_sampler(self.inner)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume there. The number of ranks may be another one than when it was saved.

        Raises:
            TypeError: The state isn't a dict.
            StateMismatch: The state is of another seed, or the sampler has no `load_state_dict` for its part of it.
        """
        if isinstance(state, Mapping) and "inner_position" in state:  # of version 0.2
            state = dict(state)
            state["inner"] = (state.pop("inner_position"), state.get("inner"))
        fields, here = self._read(state), facts_of_sampler(self.inner)
        mark, of = fields["inner"], fields["of"]
        if of and here and of != here and fields["position"] and not fields["finished"]:
            raise StateMismatch(f"the state is of a {of}, but the sampler is a {here}; give the same sampler")
        can_load = hasattr(self.inner, "load_state_dict") and mark.position <= fields["position"]
        if mark.state is not None and not can_load:
            raise StateMismatch(
                f"the state has a state of the sampler, but the {type(self.inner).__name__} can't load it; give "
                f"the same sampler, or start a new run without load_state_dict()"
            )
        super().load_state_dict(state)
        self._marks = deque([mark])

    def _draws(self, epoch: int, mark: _Mark) -> _DrawnBlocks[_Item]:
        """Return the draws of an epoch, from a mark on."""
        inner: Any = self.inner
        _check_inner(inner, self.num_replicas)
        for one in chain_of(inner):
            if callable(choose := getattr(one, "set_epoch", None)):
                choose(epoch)
        if mark.state is not None:
            inner.load_state_dict(mark.state)
        return _DrawnBlocks(inner, derive_key(self._seed, _KEY, epoch), mark.position)

    def _skip(self, draws: _DrawnBlocks[_Item], marks: deque[_Mark], num_skipped: int) -> list[_Item]:
        """Draw so many items again that were drawn before the run was resumed. Return what was drawn beyond them."""
        left: list[_Item] = []
        while num_skipped > len(left):
            num_skipped -= len(left)
            if not (left := self._more(draws, marks, 1)):
                return left
        return left[num_skipped:]

    def _more(self, draws: _DrawnBlocks[_Item], marks: deque[_Mark], num_wanted: int) -> list[_Item]:
        """Draw blocks until there are so many items, or none are left to draw."""
        items: list[_Item] = []
        while len(items) < num_wanted and not draws.is_over:
            items += draws.block()
            last, state = marks[-1], _state_of(self.inner)
            is_drawn_again = not last.position and last.state is not None
            if state is None or is_drawn_again or draws.num_drawn == last.position:
                continue
            before = last.state if last.position else draws.begun
            if draws.start.state is not None and difference(state, before) is None:
                marks.clear()
                marks.append(draws.start)  # the states don't tell the place
            else:
                marks.append(_Mark(draws.num_drawn, state))
        return items


def _state_of(sampler: Any) -> Any:
    """Return a copy of the present state of a sampler; None if it has none."""
    return deepcopy(sampler.state_dict()) if hasattr(sampler, "state_dict") else None


class _DrawnBlocks(Generic[_Item]):
    """Draws the items of one epoch in blocks: the first item alone, then up to each multiple of `BLOCK_ITEMS`.

    After its first item, a sampler's state tells its epoch apart from the one before.
    """

    def __init__(self, sampler: Iterable[_Item], key: int, num_drawn: int = 0) -> None:
        """Continue at item `num_drawn`, where a block begins: 0, 1 or a multiple of `BLOCK_ITEMS`.

        `key` depends on seed and epoch.
        """
        self._sampler = sampler
        held = [(*getattr(one, "__dict__", {}).values(), getattr(one, "generator", None)) for one in chain_of(sampler)]
        self._generators = [one for one in {id(one): one for one in chain(*held)}.values() if isinstance(one, _OWN)]
        self._key = key
        self.num_drawn = num_drawn
        self.is_over = False
        """Whether nothing is left to draw."""
        self._items: Iterator[_Item] | None = None
        self.start = _Mark(0, None if num_drawn else _state_of(sampler))
        """The epoch's start, with the sampler's state, if the draws begin there."""
        self.begun: Any = None
        """The sampler's state before the first item."""

    def block(self) -> list[_Item]:
        """Return the next block. It may be empty at the epoch's end. Raises what the sampler raises."""
        start = self.num_drawn
        stop = 1 if start == 0 else start - start % BLOCK_ITEMS + BLOCK_ITEMS
        with self._seeded(start):
            if self._items is None:
                self._items = iter(self._sampler)
                self.begun = _state_of(self._sampler)
            items = list(islice(self._items, stop - start))
        self.num_drawn += len(items)
        self.is_over = self.num_drawn < stop
        return items

    @contextmanager
    def _seeded(self, start: int) -> Iterator[None]:
        key = derive_key(self._key, start)
        with ExitStack() as stack:
            stack.enter_context(preserved_generators())
            seed_generators(key)
            for generator in self._generators:
                stack.callback(_seed(generator, key))
            yield


_OWN = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _seed(generator: Any, key: int) -> Callable[[], None]:
    """Seed a generator. Return what restores its state."""
    if isinstance(generator, random.Random):
        restore = partial(generator.setstate, generator.getstate())
        generator.seed(key)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        restore = partial(setattr, bits, "state", bits.state)
        bits.state = type(bits)(key).state  # all of NumPy's take a seed
    else:
        restore = partial(generator.set_state, generator.get_state())
        generator.manual_seed(key) if isinstance(generator, torch.Generator) else generator.seed(key % 2**32)
    return restore


def _check_inner(inner: object, world_size: int) -> None:
    if not hasattr(inner, "__iter__"):
        raise TypeError(f"sampler is a {type(inner).__name__}; it must be a sampler, which iter() begins an epoch of")
    if hasattr(inner, "__next__"):
        raise TypeError(
            f"sampler is an iterator ({type(inner).__name__}), which has one epoch only; give the sampler itself"
        )
    if world_size > 1 and num_ranks_of(inner) > 1:
        raise ValueError(
            f"the {type(inner).__name__} is split over ranks already, and would be split twice; give it num_replicas=1 "
            f"and rank=0"
        )
