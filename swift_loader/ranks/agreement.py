"""Checks that all ranks have the same configuration, so that a difference is an error and not different data. And lets
them end their epochs together.

Ranks exchange the configuration through the key-value store of torch.distributed, not through a collective. The store
needs no device and no stream, can't interfere with the user's own collectives, and raises an error if a rank never
arrives.
"""

from __future__ import annotations

import uuid
import zlib
from typing import Any, NamedTuple

from swift_loader.errors import RankMismatch, warn
from swift_loader.ranks.ranks import Ranks, expected_ranks, torch_distributed
from swift_loader.ranks.rendezvous import ONLY_SOME, Facts, Rendezvous
from swift_loader.sampling.run import Run
from swift_loader.sampling.skips import SKIPPED

_CLOCK = "seed from the clock"
_INDEX = "consumer_index"
_PROCESS = "rank"
_STORE = "store"
_MAY_DIFFER = (_CLOCK, _INDEX, _PROCESS, _STORE)

_LENGTH = "len(dataset)"

_NO_SEED = (
    "but no seed was given, and this process can't get one from the others (torch.distributed isn't initialised, or "
    "has another world size)"
)


class SameData(NamedTuple):
    """The ranks that share batches: at least two that need the same data."""

    ranks: tuple[int, ...]
    """Their numbers in torch.distributed. The first one loads."""
    rank: int
    """This one's."""
    store: Any
    """Of torch.distributed, with names that only these ranks use, and only once."""


def agree_on_run(
    run: Run, ranks: Ranks, options: Facts, *, is_made_here: bool, shares_batches: bool = False
) -> SameData | None:
    """Check that all ranks have the same run and options. Without a chosen seed, give them rank 0's.

    `run`: what this rank is about to start. `options`: those that must be equal on all ranks. `is_made_here`: this
    process made the loader; False: it got the loader from another process, as by pickle or fork. `shares_batches`: this
    rank may share batches with those that need the same data.

    Returns this rank and those that share batches with it; None if there are no others. Raises `ValueError` if the
    ranks have different options or each has drawn its own seed, `RuntimeError` if a rank didn't arrive.
    """
    if _is_alone(ranks):
        return None
    order, position = run.order, run.position
    facts = {
        **options,
        "seed": order.seed if run.has_own_seed else "rank 0's",
        "nearby_shuffle": order.window,
        "epoch": position.epoch,
        "position": position.num_samples,
        "skipped": str(run.skips.to_dict().get(SKIPPED, [])),
        "excluded": f"{run.skips.num_excluded} rows ({zlib.crc32(repr(run.skips.exclusions).encode()):08x})",
        "mixture": "none" if order.mix is None else f"{zlib.crc32(str(order.mix.state).encode()):08x}",
        _CLOCK: order.seed,
    }
    if shares_batches:
        facts[_STORE] = f"swift_loader/{uuid.uuid4().hex}"
    answers = _exchange(ranks, facts)
    if answers is not None:
        _check_equal(answers)
        run.take_seed(int(answers[0][_CLOCK]))
        return _same_data(answers, ranks) if shares_batches else None
    if is_made_here and not run.has_own_seed:
        _refuse_own_seeds(run, ranks)
    return None


def _same_data(answers: list[Facts], ranks: Ranks) -> SameData | None:
    """Return the ranks with the same data that share batches. None if there are no others."""
    stores = {int(one[_PROCESS]): str(one[_STORE]) for one in answers if one[_INDEX] == ranks.rank and _STORE in one}
    distributed = torch_distributed()
    if len(stores) == 1 or distributed is None:
        return None
    members = tuple(sorted(stores))
    store = distributed.PrefixStore(stores[members[0]], default_store(distributed))
    return SameData(members, distributed.get_rank(), store)


def agree_on_length(ranks: Ranks, num_samples: int) -> None:
    """Check that the dataset has the same length on all ranks.

    Raises `ValueError` if the lengths differ or a rank couldn't build the dataset, `RuntimeError` if a rank didn't
    arrive.
    """
    _check_equal(_exchange(ranks, {_LENGTH: num_samples}) or [])


def agree_on_seed(ranks: Ranks, seed: int) -> int:
    """Return the seed that rank 0 passed. Blocks until all ranks are here.

    Raises `ValueError` if the ranks can't exchange it, `RuntimeError` if a rank didn't arrive.
    """
    if _is_alone(ranks):
        return seed
    answers = _exchange(ranks, {_CLOCK: seed})
    if answers is None:
        raise ValueError(f"there are {ranks.world_size} ranks, {_NO_SEED}. Give the same seed= to all")
    return int(answers[0][_CLOCK])


def report_failure(ranks: Ranks, error: BaseException) -> None:
    """Tell the ranks in `agree_on_length` that this one failed. Doesn't block."""
    _join(ranks, {_LENGTH: f"none, because of {type(error).__name__}"})


def _refuse_own_seeds(run: Run, ranks: Ranks) -> None:
    """Raise or warn if each rank would shuffle by its own seed, because the ranks can't exchange one."""
    if not run.order.shuffle:
        return
    problem = (
        f"there are {ranks.world_size} consumers, {_NO_SEED}. If each process makes its own loader, their orders "
        f"differ. Give the same seed= to all"
    )
    if expected_ranks(None).world_size > 1:  # each process makes its own loader
        raise ValueError(problem)
    warn(problem)


def _is_alone(ranks: Ranks) -> bool:
    return ranks.world_size == 1 and ranks.processes is None


def _join(ranks: Ranks, facts: Facts) -> Rendezvous | None:
    """Publish facts to all ranks. None with one rank or without torch.distributed. Doesn't block."""
    distributed = torch_distributed()
    if _is_alone(ranks) or distributed is None:
        return None
    everyone = range(distributed.get_world_size())
    if ranks.processes is None and ranks.world_size != len(everyone):
        return None  # several processes form one consumer, as with tensor parallelism, but may not all have a loader
    processes = everyone if ranks.processes is None else ranks.processes
    name = "" if len(processes) == len(everyone) else f"ranks {','.join(map(str, processes))}"
    process = distributed.get_rank()
    facts = {**facts, _INDEX: ranks.rank, _PROCESS: process}
    return Rendezvous(default_store(distributed), process, processes, facts, name)


def default_store(distributed: Any) -> Any:
    """Return the store of the ranks. `distributed`: the module torch.distributed, initialised."""
    # Private, but stable since torch 1.8, and other libraries use it for the same purpose.
    return distributed.distributed_c10d._get_default_store()  # noqa: SLF001


def _exchange(ranks: Ranks, facts: Facts) -> list[Facts] | None:
    """Return the facts of all ranks, by consumer. None with one rank or without torch.distributed.

    Blocks as `Rendezvous.gather` does.
    """
    rendezvous = _join(ranks, facts)
    if rendezvous is None:
        return None
    answers = rendezvous.gather()
    claimed = [int(answer[_INDEX]) for answer in answers]
    if ranks.processes is None and sorted(claimed) != list(range(ranks.world_size)):
        raise ValueError(
            f"the ranks were started with consumer_index={claimed} (in the order of torch.distributed), but each needs "
            f"its own, from 0 to {ranks.world_size - 1}. Call start() without consumer_index"
        )
    if sorted(set(claimed)) != list(range(ranks.world_size)):
        raise ValueError(
            f"the ranks have the data-parallel coordinates {claimed} (in the order of torch.distributed), but "
            f"each from 0 to {ranks.world_size - 1} is needed. Give all ranks the same mesh, or each the rank and "
            f"world_size of its data"
        )
    return sorted(answers, key=lambda answer: int(answer[_INDEX]))


def _check_equal(answers: list[Facts]) -> None:
    """Check that all ranks report the same facts. Raises `ValueError` that names the first difference."""
    for other in answers:
        for name, value in answers[0].items():
            if name not in _MAY_DIFFER and other.get(name) != value:
                raise ValueError(
                    f"rank {other[_PROCESS]} has {name}={other.get(name)!r}, but rank {answers[0][_PROCESS]} has "
                    f"{name}={value!r}: they would load different data. Give all ranks the same value. {ONLY_SOME}"
                )


class RankVotes:
    """The ranks' votes on whether there is another batch. Loop's thread only.

    Before each batch, the ranks tell each other whether they have one, over a gloo group of their own. So the loops of
    all ranks run in step, as those of DistributedDataParallel do anyway.
    """

    def __init__(self, ranks: Ranks, hint: str = "") -> None:
        """Make the group. Blocks until all ranks are here. Raises `ValueError` if they can't talk to each other."""
        self._group: Any = None
        self._epoch = -1
        if ranks.world_size == 1:
            return
        distributed = torch_distributed()
        if distributed is None or distributed.get_world_size() < ranks.world_size:
            raise ValueError(
                f"equal_batches=True needs torch.distributed, because {ranks.source} counts {ranks.world_size} "
                f"processes; call torch.distributed.init_process_group() in all of them first{hint}"
            )
        self._group = distributed.new_group(backend="gloo")

    def all_have(self, has_batch: bool | None, batch: int) -> bool:
        """Return whether all ranks have a batch. Blocks until all have voted.

        `has_batch` None: an error has ended the loop here. `batch`: how many votes this epoch has had. Raises
        `RankMismatch` on all ranks if they aren't at the same one, or after an error on one of them.
        """
        if self._group is None:
            return bool(has_batch)
        import torch
        from torch import distributed

        self._epoch += not batch
        has = -1 - distributed.get_rank() if has_batch is None else int(has_batch)
        vote = torch.tensor([has, self._epoch, -self._epoch, batch, -batch])
        distributed.all_reduce(vote, distributed.ReduceOp.MIN, self._group)
        all_have, first_epoch, last_epoch, first, last = vote.tolist()
        if (first_epoch, first) == (-last_epoch, -last):
            if all_have < 0:
                raise RankMismatch(
                    f"rank {-1 - all_have} has ended its loop by an error before batch {batch} of epoch {self._epoch}. "
                    f"With equal_batches=True, all ranks end there"
                )
            return bool(all_have)
        places: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(places, (self._epoch, batch), self._group)
        self._epoch = -last_epoch  # so that all may begin the next one
        rank, other = places.index(max(places)), places.index(min(places))
        raise RankMismatch(
            f"rank {rank} asks for batch {places[rank][1]} of epoch {places[rank][0]}, but rank {other} for batch "
            f"{places[other][1]} of epoch {places[other][0]}: a rank has left its loop alone, by break or an error. "
            f"With equal_batches=True, all ranks must leave the loop after the same batch"
        )
