"""What to do instead of an option that SwiftLoader doesn't have: misspelt, or another loader's."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["refuse_unknown"]

_NO_SAMPLER = (
    "shuffle, nearby_shuffle and seed decide on the order, and each rank gets its own part of it by itself. For a "
    "subset, weights or an order of your own, give a dataset that looks the index up in a list, such as "
    "torch.utils.data.Subset"
)

_INSTEAD = {
    # torch.utils.data.DataLoader
    "sampler": _NO_SAMPLER,
    "batch_sampler": (
        "batches have batch_size samples, in the order that shuffle, nearby_shuffle and seed decide on. For batches of "
        "your own, give a dataset of whole batches, batch_size=1 and a collate_fn that returns samples[0]"
    ),
    "num_workers": "give worker_per_consumer, the worker processes of this rank",
    "generator": "give seed: all of the order and, with rng='sample', all draws follow from it",
    "worker_init_fn": (
        "set up in the constructor of dataset_class what each worker needs, with dataset_per_worker=True if workers "
        "can't share it; random generators are seeded already (rng='sample')"
    ),
    "persistent_workers": "leave it out: workers stay from epoch to epoch, until close()",
    "prefetch_factor": (
        "give data_queue_size, which counts the batches in flight of all workers together: prefetch_factor times the "
        "number of workers"
    ),
    "pin_memory_device": "leave it out: pin_memory=True is for CUDA; loader.start(device=...) moves batches by itself",
    "multiprocessing_context": (
        "give start_method: 'template' forks workers from a fresh interpreter, 'spawn' starts one for each; the "
        "training process is never forked"
    ),
    # torch.utils.data.DistributedSampler, and what ranks are told elsewhere
    "num_replicas": "give nb_consumer, or nothing: torch.distributed or the launcher says how many ranks there are",
    "world_size": "give nb_consumer, or nothing: torch.distributed or the launcher says how many ranks there are",
    "rank": "call loader.start(rank), or nothing: torch.distributed or the launcher says which rank this is",
    "consumer_index": "call loader.start(consumer_index)",
    # Of start(), and others' names
    "device": "call loader.start(device=...)",
    "to_device": "call loader.start(device=..., to_device=...)",
    "dtype": "call loader.start(device=..., dtype=...)",
    "epoch": "call loader.set_epoch(epoch)",
    "snapshot_every_n_steps": "leave it out: state_dict() is exact after every batch, at no cost",
}


def refuse_unknown(name: str, known: Sequence[str]) -> NoReturn:
    """Refuse an option that doesn't exist.

    Raises:
        TypeError: Always; says what to do instead, or names the closest option.
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    if name in _INSTEAD:
        hint = _INSTEAD[name]
    elif close:
        hint = f"did you mean {close[0]!r}?"
    else:
        hint = f"the options are {', '.join(known)}"
    raise TypeError(f"SwiftLoader has no option {name!r}; {hint}")
