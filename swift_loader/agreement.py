"""Ranks tell each other what they are about to do, so that different configurations are an error, not different data.

They meet in the key-value store of torch.distributed, not in a collective: that needs no device and no stream, can't
get entangled with the user's own collectives, and ends with an error if a rank never comes.
"""

from __future__ import annotations

import json
import sys
import warnings
from datetime import timedelta
from typing import Any

from swift_loader.placement import Placement
from swift_loader.run import Run

__all__ = ["Facts", "agree_on_length", "agree_on_run"]

Facts = dict[str, int | str | bool]
"""What a rank says about itself, as plain JSON types."""

_PREFIX = "swift_loader"

_PATIENCE = timedelta(seconds=30)

_CLOCK = "seed from the clock"
"""The one fact in which ranks may differ."""


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
    answers = _exchange(
        placement,
        {
            **options,
            "seed": order.seed if run.has_own_seed else "rank 0's",
            "nearby_shuffle": order.window,
            "epoch": position.epoch,
            "position": position.num_samples,
            _CLOCK: order.seed,
        },
    )
    if answers is not None:
        _check_equal(answers)
        run.take_seed(int(answers[0][_CLOCK]))
    elif is_made_here and not run.has_own_seed:
        _refuse_own_seeds(run, placement)


def agree_on_length(placement: Placement, num_samples: int) -> None:
    """Make sure that the dataset is as long on all ranks.

    Raises:
        ValueError: It isn't.
        RuntimeError: A rank didn't come.
    """
    _check_equal(_exchange(placement, {"len(dataset)": num_samples}) or [])


def _refuse_own_seeds(run: Run, placement: Placement) -> None:
    """Say that ranks which can't talk to each other must be given a seed."""
    problem = (
        f"nb_consumer={placement.world_size}, but no seed was given and torch.distributed isn't initialised: if each "
        f"process makes its own loader, they go through different orders. Give seed="
    )
    if run.order.shuffle and placement.is_launched:
        raise ValueError(problem)
    warnings.warn(problem, stacklevel=4)


def _exchange(placement: Placement, facts: Facts) -> list[Facts] | None:
    """Return what all ranks say, by rank; None if there is nobody to ask, or no way.

    Blocks until all ranks have called it equally often, at most for the store's time-out (that of
    `init_process_group`).

    Raises:
        RuntimeError: A rank didn't come.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if placement.world_size == 1 or distributed is None:
        return None
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    if (placement.rank, placement.world_size) != (distributed.get_rank(), distributed.get_world_size()):
        return None  # several processes are one consumer, as with tensor parallelism
    # Not public, but what all libraries use that need the store, and stable since torch 1.8.
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
    meeting = store.add(f"{_PREFIX}/rank {placement.rank}", 1)
    store.set(f"{_PREFIX}/{meeting}/{placement.rank}", json.dumps(facts))
    keys = [f"{_PREFIX}/{meeting}/{rank}" for rank in range(placement.world_size)]
    _wait_patiently(store, keys, placement)
    return [json.loads(store.get(key)) for key in keys]


def _wait_patiently(store: Any, keys: list[str], placement: Placement) -> None:
    """Wait for what all ranks say; after a while tell the user for whom, and what may be wrong."""
    for rank, key in enumerate(keys):
        problem = (
            f"rank {placement.rank} has started its loader, but rank {rank} hasn't: all ranks must start theirs, in "
            f"the same order. For a loader that only one rank uses, give nb_consumer=1"
        )
        try:
            store.wait([key], min(store.timeout / 2, _PATIENCE))
            continue
        except Exception:  # what a time-out is depends on the kind of store
            warnings.warn(f"{problem}. Waiting on, for at most {store.timeout.total_seconds():g} s", stacklevel=5)
        try:
            store.wait([key])
        except Exception as error:
            raise RuntimeError(f"{problem} ({type(error).__name__}: {error})") from error


def _check_equal(answers: list[Facts]) -> None:
    """Make sure that all ranks say the same.

    Raises:
        ValueError: They don't; names the first difference.
    """
    for rank, other in enumerate(answers):
        for name, value in answers[0].items():
            if name != _CLOCK and other.get(name) != value:
                raise ValueError(
                    f"rank {rank} has {name}={other.get(name)!r}, but rank 0 has {name}={value!r}: they would go "
                    f"through different data; give all ranks the same"
                )
