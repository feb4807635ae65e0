"""Which rank a sampler serves, and the seed that all ranks use."""

from __future__ import annotations

import torch
from torch.utils.data import Sampler

from swift_loader.checks import check_integer, check_optional_integer
from swift_loader.ranks.agreement import agree_on_seed
from swift_loader.ranks.ranks import Ranks, find_ranks

__all__ = ["ranks_of", "refuse_sampler", "seed_of"]


def ranks_of(num_replicas: int | None, rank: int | None) -> Ranks:
    """Return the rank and the number of ranks: those given, else torch.distributed's, else the launcher's, else one.

    Raises:
        ValueError: Only one of the two was given, or the rank isn't below the number of ranks.
    """
    if num_replicas is None and rank is None:
        return find_ranks(None, None)
    if num_replicas is None or rank is None:
        raise ValueError(
            f"num_replicas={num_replicas} and rank={rank} need each other; give both, or leave both out to take them "
            f"from torch.distributed or the launcher"
        )
    world_size = check_integer("num_replicas", num_replicas, 1)
    return Ranks(check_integer("rank", rank, 0, world_size - 1), world_size, "the arguments")


def seed_of(seed: int | None, ranks: Ranks, *, is_used: bool = True) -> int:
    """Return the seed given; else the seed of torch's default generator, rank 0's if there are several ranks.

    Without a seed, and with several ranks, it blocks until all ranks are here.

    Args:
        seed: What the user gave.
        ranks: Which rank this is.
        is_used: False if nothing depends on the seed. Then it never blocks.

    Raises:
        ValueError: No seed was given, and the ranks can't exchange one.
        RuntimeError: A rank didn't arrive.
    """
    chosen = check_optional_integer("seed", seed, 0)
    if chosen is not None:
        return chosen
    drawn = int(torch.initial_seed())
    return agree_on_seed(ranks, drawn) if is_used else drawn


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
