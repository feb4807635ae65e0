"""What all samplers share: the rank that they serve, a common seed, epochs, and a position that can be saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import DistributedSampler, Sampler

from swift_loader.checks import check_choice, check_integer, check_optional_integer
from swift_loader.ranks.agreement import agree_on_seed
from swift_loader.ranks.ranks import Ranks, find_ranks, torch_distributed
from swift_loader.sampling.integers import MAX_BITS, Form, check_known, check_same, check_state, field_of, integer
from swift_loader.sampling.plan import MAX_EPOCH, Uneven
from swift_loader.sampling.run import EpochRule, Pass, PassState, Shard

_Item = TypeVar("_Item")

_MAX_CHAIN = 16
"""A property that makes a new sampler each time would make an endless chain."""

_GIVEN = "the arguments"
"""Where ranks come from that the user gave. They don't change."""

VERSION = 1
"""Version of the fields of a state, and of the orders. With another version, the order would be another one."""


_ANY, PLACE = integer(0, 2**MAX_BITS), integer(0, MAX_EPOCH)
FORMS = {"seed": _ANY, "epoch": PLACE, "position": PLACE, "finished": _ANY}
"""What the states of all samplers have."""


class ResumableSampler(DistributedSampler[_Item]):
    """One rank's part of each epoch. It is a `DistributedSampler`, so that frameworks don't split it again.

    A subclass yields the items of a pass in `_rest`, and advances the pass.
    """

    _forms: Mapping[str, Form] = {}
    """What else is in a state."""

    def __init__(self, ranks: Ranks, seed: int | None, uneven: str, *, is_seed_used: bool = True) -> None:
        """Begin with epoch 0. With several ranks and no seed, it blocks until all ranks are here, if it is used.

        Before torch.distributed is initialised, the first pass does.
        """
        self._ranks, self._uneven = ranks, check_choice("uneven", uneven, Uneven)
        self._has_own_seed = seed is not None
        self._seed = seed_of(seed)
        self._drawn_for = None if self._has_own_seed or not is_seed_used else Ranks(0, 1, "default")
        """The ranks that have this seed in common. None: it needn't be agreed on."""
        self._passes = EpochRule()
        self._name = type(self).__name__
        """Of the sampler that a state belongs to."""
        self._facts: dict[str, int] = {}
        """What else the order depends on. A state with others is refused."""
        if ranks.source == _GIVEN or torch_distributed() is not None:
            self._agree()

    @property
    def num_replicas(self) -> int:  # type: ignore[override] # DistributedSampler's is an attribute
        """Number of ranks."""
        return self._find_ranks().world_size

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The number of this rank."""
        return self._find_ranks().rank

    @property
    def _shard(self) -> Shard:
        return Shard(self.rank, self.num_replicas, self._uneven)

    def _find_ranks(self) -> Ranks:
        """Return which rank this is. A script may make its samplers before it initialises torch.distributed."""
        before = self._ranks
        now = before if before.source == _GIVEN else find_ranks(None, None)
        if (now.rank, now.world_size) != (before.rank, before.world_size):
            if self._passes.last.state is not PassState.READY:
                raise RuntimeError(
                    f"this process is rank {now.rank} of {now.world_size} by {now.source}, but the sampler's passes "
                    f"so far were those of rank {before.rank} of {before.world_size}. Begin the first pass after "
                    f"init_process_group, make another sampler, or give it num_replicas and rank"
                )
            self._ranks = now
        return self._ranks

    def _agree(self) -> None:
        """Take rank 0's seed, if this one was drawn. Blocks until all ranks are here."""
        ranks = self._find_ranks()
        if self._drawn_for not in (None, ranks):
            self._seed, self._drawn_for = agree_on_seed(ranks, self._seed), ranks

    def __iter__(self) -> Iterator[_Item]:
        """Yield the items of the next pass, or the rest of a saved one. It begins with the first `next`."""
        self._agree()
        this = self._passes.begin()
        yield from self._rest(this)
        this.end()

    def _rest(self, this: Pass) -> Iterator[_Item]:
        """Yield what is left of a pass on this rank, and advance it."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The epoch of the pass that runs; if none does, that of the next pass."""
        return self._passes.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def sampler(self) -> ResumableSampler[_Item]:
        """Itself: frameworks call `batch_sampler.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. A pass that runs stays as it is."""
        self._passes.choose(check_integer("epoch", epoch, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the items drawn so far, as plain types. It is the same on every rank."""
        this = self._passes.current
        return {
            "version": VERSION,
            "sampler": self._name,
            "seed": self._seed,
            "epoch": this.epoch,
            "position": this.position,
            "finished": int(this.at_end),
            **self._facts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume there with the next pass. The number of ranks may be another one than when it was saved.

        Raises:
            TypeError: The state isn't a dict.
            StateMismatch: It is of another sampler or dataset, or of other options. Nothing has changed then.
        """
        fields = self._read(state)
        present = {**self._facts, **({"seed": self._seed} if self._has_own_seed else {})}
        check_same(fields, present, "this sampler has")
        self._seed, self._drawn_for = fields["seed"], None
        self._passes.restore(fields["epoch"], fields["position"], at_end=bool(fields["finished"]))

    def _read(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a state. Raises as `load_state_dict` does."""
        check_state(state, "sampler", VERSION)
        own = {"sampler": Form(repr(self._name), {self._name: self._name}.__getitem__)}
        forms = {**own, **FORMS, **dict.fromkeys(self._facts, _ANY), **self._forms}
        fields = {name: field_of(state, name, form) for name, form in forms.items()}
        check_known(state, self.state_dict())
        return fields


def ranks_of(num_replicas: int | None, rank: int | None) -> Ranks:
    """Return the rank and the number of ranks: those given, else torch.distributed's, else the launcher's, else one."""
    if num_replicas is None and rank is None:
        return find_ranks(None, None)
    if num_replicas is None or rank is None:
        raise ValueError(
            f"num_replicas={num_replicas} and rank={rank} need each other; give both, or leave both out to take them "
            f"from torch.distributed or the launcher"
        )
    world_size = check_integer("num_replicas", num_replicas, 1)
    return Ranks(check_integer("rank", rank, 0, world_size - 1), world_size, _GIVEN)


def seed_of(seed: int | None) -> int:
    """Return the seed given, else the seed of torch's default generator."""
    chosen = check_optional_integer("seed", seed, 0)
    return int(torch.initial_seed()) if chosen is None else chosen


def refuse_sampler(name: str, value: object) -> None:
    """Raise TypeError for a sampler where a dataset or lengths belong.

    Lightning and Fabric call the class of a batch sampler with a sampler of theirs, to split it over ranks.
    """
    if isinstance(value, Sampler):
        raise TypeError(
            f"{name} is a {type(value).__name__}, which doesn't belong there. If a framework passed it to replace the "
            f"batch sampler of a DataLoader: tell it not to, as with use_distributed_sampler=False of Lightning and "
            f"Fabric, because this sampler splits its batches over the ranks itself"
        )


def facts_of_sampler(sampler: Any) -> str:
    """Return what a position in a sampler's order depends on. Empty if it isn't torch's: its length may change."""
    chain = chain_of(sampler)
    if any(type(one) not in (list, range) and not type(one).__module__.startswith("torch.utils.") for one in chain):
        return ""
    return ", ".join(f"{type(one).__name__} of {getattr(one, 'batch_size', None) or len(one)}" for one in chain)


def num_ranks_of(*samplers: Any) -> int:
    """Return over how many ranks samplers are split already, as torch's, timm's and Accelerate's say it."""
    numbers = (getattr(one, name, 1) for one in chain_of(*samplers) for name in ("num_replicas", "num_processes"))
    return max((number for number in numbers if isinstance(number, int)), default=1)


def chain_of(*samplers: Any) -> list[Any]:
    """Return samplers, and those that they draw from, as torch's, Lightning's, Accelerate's and timm's name them."""
    left, found = [one for one in reversed(samplers) if one is not None], dict[int, Any]()
    while left and len(found) < _MAX_CHAIN:
        sampler = left.pop()
        if id(sampler) not in found:
            found[id(sampler)] = sampler
            inner = (getattr(sampler, name, None) for name in ("sampler", "batch_sampler"))
            left += [one for one in inner if one is not None]
    return list(found.values())
