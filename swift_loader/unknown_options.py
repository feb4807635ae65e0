"""Error messages for options that SwiftLoader doesn't have: misspelt ones and those of other loaders."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

_NO_SAMPLER = (
    "shuffle, nearby_shuffle and seed determine the order, and each rank gets its own part automatically. For a "
    "subset, weights or your own order, give a dataset that looks up the index in a list, such as "
    "torch.utils.data.Subset"
)

_INSTEAD = {
    # torch.utils.data.DataLoader
    "sampler": _NO_SAMPLER,
    "batch_sampler": (
        "batches have batch_size samples, in the order that shuffle, nearby_shuffle and seed determine. For your own "
        "batches, give a dataset of whole batches, batch_size=1 and a collate_fn that returns samples[0]"
    ),
    "workers": "give worker_per_consumer, the number of worker processes of this rank",
    "num_workers": "give worker_per_consumer, the number of worker processes of this rank",
    "generator": "give seed: it determines the order and, with rng='sample', all random draws",
    "worker_init_fn": (
        "set up what each worker needs in the constructor of dataset_class, with dataset_per_worker=True if workers "
        "can't share it; random generators are seeded automatically (rng='sample')"
    ),
    "persistent_workers": "leave it out: workers stay from epoch to epoch, until close()",
    "prefetch_factor": (
        "give data_queue_size, the batches in flight of all workers together: prefetch_factor times the number of "
        "workers"
    ),
    "pin_memory_device": "leave it out: pin_memory=True is for CUDA, and loader.start(device=...) moves batches itself",
    "multiprocessing_context": (
        "give start_method: 'template' forks workers from one fresh interpreter, 'spawn' starts a fresh one for each "
        "worker; 'fork' forks the training process"
    ),
    # torch.utils.data.DistributedSampler, and other names for ranks
    "num_replicas": "give nb_consumer, or leave it out to use the world size of torch.distributed or the launcher",
    "world_size": "give nb_consumer, or leave it out to use the world size of torch.distributed or the launcher",
    "rank": "call loader.start(rank), or leave it out to use the rank in torch.distributed or the launcher",
    "consumer_index": "call loader.start(consumer_index)",
    # Removed; until 0.3
    "share_dataset": "leave it out: each rank has a dataset of its own. Give memory-mapped data, which ranks share",
    # Parameters of start(), and names from other loaders
    "device": "call loader.start(device=...)",
    "to_device": "call loader.start(device=..., to_device=...)",
    "dtype": "call loader.start(device=..., dtype=...)",
    "resume": "call loader.load_state_dict(state)",
    "prefetch": "give data_queue_size, the batches in flight of all workers together",
    "epochs": "leave it out: each `for` loop over the loader is one epoch",
    "epoch": "call loader.set_epoch(epoch)",
    "snapshot_every_n_steps": "leave it out: state_dict() is exact after every batch and costs nothing",
}


_INSTEAD_IN_CREATE_LOADER = {
    "shuffle": "is_training=True shuffles",
    "drop_last": "is_training=True leaves out an incomplete last batch",
    "worker_per_consumer": "give num_workers, the worker processes of this rank",
    "nb_consumer": "give distributed=True: torch.distributed or the launcher says how many ranks there are",
    "start_method": "make a SwiftLoader with it, and put a PrefetchLoader around that",
    "data_queue_size": "make a SwiftLoader with it, and put a PrefetchLoader around that",
}

INSTEAD_OF = {"SwiftLoader": _INSTEAD, "create_loader": _INSTEAD_IN_CREATE_LOADER}


def refuse_unknown(unknown: Iterable[str], owner: str, function: Callable[..., Any], *more: str) -> None:
    """Refuse options that don't exist.

    Args:
        unknown: Names that the function has no parameter for.
        owner: What the user called, a key of `INSTEAD_OF`.
        function: Its parameters are the options.
        more: Further options.

    Raises:
        TypeError: There is one. For the first, the message says what to do instead, or names the closest option.
    """
    for name in unknown:
        parameters = inspect.signature(function).parameters.values()
        known = [parameter.name for parameter in parameters if parameter.name not in ("self", "unknown")]
        raise TypeError(f"{owner} has no option {name!r}; {_hint(name, [*known, *more], INSTEAD_OF[owner])}")


def _hint(name: str, known: list[str], instead: dict[str, str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    if name in instead:
        return instead[name]
    return f"did you mean {close[0]!r}?" if close else f"the options are {', '.join(known)}"
