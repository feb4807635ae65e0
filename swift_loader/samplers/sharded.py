"""Splits any sampler or batch sampler over the ranks, with equal numbers of items on all of them.

    the sampler, drawn the same on every rank ──► blocks of items ──► steps of one item per rank ──► this rank's item

The position is how many items all ranks have drawn. If the sampler has a `state_dict`, its states at the beginning of
the blocks are kept, and a resumed run draws from the last one again. If not, it draws again from the epoch's start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import DistributedSampler

from swift_loader.checks import check_flag, check_integer
from swift_loader.errors import StateMismatch
from swift_loader.samplers.draws import Draws, chain_of
from swift_loader.samplers.passes import Pass, Passes
from swift_loader.samplers.ranks import ranks_of, seed_of
from swift_loader.samplers.shards import Shard
from swift_loader.samplers.states import VERSION, check_same, saved_fields
from swift_loader.sampling.permutation import derive_key
from swift_loader.sampling.plan import Uneven

__all__ = ["ShardedSampler", "distributed"]

_Item = TypeVar("_Item")

_NAME = "distributed"
_KEY = 0xD157
"""Tells the key of the draws from other keys of the same seed."""


class _Mark(NamedTuple):
    """Where a resumed run can begin to draw again."""

    position: int
    state: Any
    """The sampler's state there; None at the epoch's start."""


_START = _Mark(0, None)


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
    With several ranks and no seed, it blocks until all ranks are here.

    Args:
        sampler: What yields the items of an epoch at each `iter`. Its random numbers must come from torch, `random` or
            `numpy.random`, or from torch generators in an attribute `generator`. They are seeded while it is drawn
            from, and restored afterwards.
        num_replicas: Number of ranks. None: that of torch.distributed or of the launcher, else 1.
        rank: This rank. Needs `num_replicas`.
        drop_last: What happens in the last step, if there aren't items for all ranks: True leaves them out, False
            repeats them.
        seed: Seed of the draws. None: that of torch's default generator, rank 0's if there are several ranks.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, the sampler is split already, or the ranks have no common seed.
    """
    return ShardedSampler(sampler, num_replicas, rank, drop_last=drop_last, seed=seed)


class ShardedSampler(DistributedSampler[_Item]):
    """What `distributed` returns. Use it where the sampler that it splits would be used."""

    def __init__(
        self,
        inner: Iterable[_Item],
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        drop_last: bool = False,
        seed: int | None = None,
    ) -> None:
        """Begin with epoch 0. Arguments and errors are those of `distributed`."""
        ranks = ranks_of(num_replicas, rank)
        _check_inner(inner, ranks.world_size)
        self.inner = inner
        self.batch_size = getattr(inner, "batch_size", None)
        self.num_replicas, self.rank = ranks.world_size, ranks.rank
        uneven = Uneven.DROP if check_flag("drop_last", drop_last) else Uneven.PAD
        self._shard = Shard(ranks.rank, ranks.world_size, uneven)
        self._has_own_seed = seed is not None
        self._seed = seed_of(seed, ranks)
        self._passes = Passes()
        self._marks = deque([_START])
        """The first is the last one that isn't after the position."""

    def __iter__(self) -> Iterator[_Item]:
        """Yield the items of the next pass, or the rest of a saved one. It begins with the first `next`."""
        this = self._passes.begin()
        if not this.at_end:
            yield from self._rest(this)
        this.end()

    def _rest(self, this: Pass) -> Iterator[_Item]:
        """Yield what is left of a pass, and advance it."""
        mark = self._marks[0] if this.position else _START
        marks = self._marks = deque([mark])
        shard, world_size, draws = self._shard, self.num_replicas, self._draws(this.epoch, mark)
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

    @property
    def epoch(self) -> int:
        """The epoch of the pass that runs; if none does, that of the next pass."""
        return self._passes.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def sampler(self) -> ShardedSampler[_Item]:
        """Itself: frameworks call `batch_sampler.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, which the sampler's own `set_epoch` gets, too, when that begins."""
        self._passes.choose(check_integer("epoch", epoch, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the items drawn so far: integers, strings, and maybe a state of the sampler.

        It is the same on every rank.
        """
        this = self._passes.current
        mark = self._marks[0] if this.position else _START
        state = {
            "version": VERSION,
            "sampler": _NAME,
            "seed": self._seed,
            "epoch": this.epoch,
            "position": this.position,
            "finished": int(this.at_end),
        }
        return (
            state
            if mark.state is None or this.at_end
            else {**state, "inner_position": mark.position, "inner": mark.state}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume there. The number of ranks may be another one than when it was saved.

        Raises:
            TypeError: The state isn't a dict.
            StateMismatch: The state is of another seed, or the sampler has no `load_state_dict` for its part of it.
        """
        fields = saved_fields(state, _NAME, ["seed", "epoch", "position", "finished"])
        mark = _START
        if "inner" in state:
            mark = _Mark(saved_fields(state, _NAME, ["inner_position"])["inner_position"], state["inner"])
            if mark.position > fields["position"] or not hasattr(self.inner, "load_state_dict"):
                raise StateMismatch(
                    f"the state has a state of the sampler, but the {type(self.inner).__name__} can't load it; give "
                    f"the same sampler, or start a new run without load_state_dict()"
                )
        if self._has_own_seed:
            check_same("seed", fields["seed"], self._seed)
        self._seed = fields["seed"]
        self._marks = deque([mark])
        self._passes.restore(fields["epoch"], fields["position"], at_end=bool(fields["finished"]))

    def _draws(self, epoch: int, mark: _Mark) -> Draws[_Item]:
        """Return the draws of an epoch, from a mark on."""
        inner: Any = self.inner
        for one in chain_of(inner):
            if callable(choose := getattr(one, "set_epoch", None)):
                choose(epoch)
        if mark.state is not None:
            inner.load_state_dict(mark.state)
        return Draws(self.inner, derive_key(self._seed, _KEY, epoch), mark.position)

    def _skip(self, draws: Draws[_Item], marks: deque[_Mark], num_skipped: int) -> list[_Item]:
        """Draw so many items again that were drawn before the run was resumed. Return what was drawn beyond them."""
        left: list[_Item] = []
        while num_skipped > len(left):
            num_skipped -= len(left)
            if not (left := self._more(draws, marks, 1)):
                return left
        return left[num_skipped:]

    def _more(self, draws: Draws[_Item], marks: deque[_Mark], num_wanted: int) -> list[_Item]:
        """Draw blocks until there are so many items, or none are left to draw."""
        inner: Any = self.inner
        items: list[_Item] = []
        while len(items) < num_wanted and not draws.is_over:
            if draws.num_drawn > marks[-1].position and hasattr(inner, "state_dict"):
                marks.append(_Mark(draws.num_drawn, inner.state_dict()))
            items += draws.block()
        return items

    def __repr__(self) -> str:
        return f"<ShardedSampler rank {self.rank} of {self.num_replicas}, {self._passes!r}>"


def _check_inner(inner: object, world_size: int) -> None:
    if not hasattr(inner, "__iter__"):
        raise TypeError(f"sampler is a {type(inner).__name__}; it must be a sampler, which iter() begins an epoch of")
    if hasattr(inner, "__next__"):
        raise TypeError(
            f"sampler is an iterator ({type(inner).__name__}), which has one epoch only; give the sampler itself"
        )
    is_split = any(isinstance(one, DistributedSampler) and one.num_replicas > 1 for one in chain_of(inner))
    if world_size > 1 and is_split:
        raise ValueError(
            f"the {type(inner).__name__} is split over ranks already, and would be split twice; give it num_replicas=1 "
            f"and rank=0"
        )
