"""Ranks tell each other what they are about to do: different configurations are an error, not different data."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from swift_loader.meeting import ONLY_SOME, Facts, Meeting
from swift_loader.placement import Placement, is_one_of_many
from swift_loader.run import Run

__all__ = ["Facts", "agree_on_length", "agree_on_run", "report_failure"]

_CLOCK = "seed from the clock"
_INDEX = "consumer_index"
_MAY_DIFFER = (_CLOCK, _INDEX)

_LENGTH = "len(dataset)"


def agree_on_run(run: Run, placement: Placement, options: Facts, *, is_made_here: bool) -> None:
    """Make sure that all ranks do the same, and give them rank 0's seed if none was chosen.

    Args:
        run: What this rank is about to do.
        placement: Which rank this is.
        options: What it was told besides.
        is_made_here: Whether this process made the loader, rather than having got it from one that made it for all.

    Raises:
        ValueError: They were told different things, or each has drawn a seed of its own.
        RuntimeError: A rank didn't come.
    """
    if placement.world_size == 1:
        return
    order, position = run.order, run.progress.position
    facts = {
        **options,
        "seed": order.seed if run.has_own_seed else "rank 0's",
        "nearby_shuffle": order.window,
        "epoch": position.epoch,
        "position": position.num_samples,
        _CLOCK: order.seed,
    }
    answers = _exchange(placement, facts)
    if answers is not None:
        _check_equal(answers)
        run.take_seed(int(answers[0][_CLOCK]))
    elif is_made_here and not run.has_own_seed:
        _refuse_own_seeds(run, placement)


def agree_on_length(placement: Placement, num_samples: int) -> None:
    """Make sure that the dataset is as long on all ranks.

    Raises:
        ValueError: It isn't, or couldn't be built on one of them.
        RuntimeError: A rank didn't come.
    """
    _check_equal(_exchange(placement, {_LENGTH: num_samples}) or [])


def report_failure(placement: Placement, error: BaseException) -> None:
    """Tell the ranks that are about to `agree_on_length` that this one can't. Doesn't block."""
    _join(placement, {_LENGTH: f"none, because of {type(error).__name__}"})


def _refuse_own_seeds(run: Run, placement: Placement) -> None:
    """Say that ranks which can't ask each other must be given a seed, where it decides on the order."""
    if not run.order.shuffle:
        return
    problem = (
        f"there are {placement.world_size} consumers, but no seed was given, and this process can't ask the others for "
        f"theirs (torch.distributed isn't initialised, or doesn't count the same ranks): if each makes its own loader, "
        f"they go through different orders. Give seed="
    )
    if is_one_of_many():
        raise ValueError(problem)
    warnings.warn(problem, stacklevel=4)


def _join(placement: Placement, facts: Facts) -> Meeting | None:
    """Tell all ranks the facts of this one; return None if there is nobody to tell, or no way. Doesn't block."""
    distributed: Any = sys.modules.get("torch.distributed")
    if placement.world_size == 1 or distributed is None:
        return None
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    if placement.world_size != distributed.get_world_size():
        return None  # several processes are one consumer, as with tensor parallelism
    # Not public, but what libraries use that need the store, and stable since torch 1.8.
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
    return Meeting.join(store, distributed.get_rank(), placement.world_size, {**facts, _INDEX: placement.rank})


def _exchange(placement: Placement, facts: Facts) -> list[Facts] | None:
    """Return what all ranks say, by consumer; None if there is nobody to ask, or no way. Blocks as `Meeting.gather`."""
    meeting = _join(placement, facts)
    if meeting is None:
        return None
    answers = meeting.gather()
    claimed = [answer[_INDEX] for answer in answers]
    if sorted(claimed) != list(range(placement.world_size)):
        raise ValueError(
            f"the ranks were started with consumer_index={claimed}, in the order of torch.distributed; each must have "
            f"its own. Call start() without it"
        )
    return sorted(answers, key=lambda answer: int(answer[_INDEX]))


def _check_equal(answers: list[Facts]) -> None:
    """Make sure that all ranks say the same.

    Raises:
        ValueError: They don't; names the first difference.
    """
    for rank, other in enumerate(answers):
        for name, value in answers[0].items():
            if name not in _MAY_DIFFER and other.get(name) != value:
                raise ValueError(
                    f"rank {rank} has {name}={other.get(name)!r}, but rank 0 has {name}={value!r}: they would go "
                    f"through different data; give all ranks the same. {ONLY_SOME}"
                )
