"""What a DataLoader with worker threads can't do, and which of its datasets the threads share.

torch's `get_worker_info()` answers for the whole process, so in a thread it returns None. A map-style dataset doesn't
need it for its samples. A stream needs it to give each worker its share. The loader can't share it out to threads
either: they share the global generators, so a stream that draws would differ from thread to thread.
"""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from swift_loader.dataloader.datapipes import is_pipe
from swift_loader.dataloader.randomness import has_init_of_user, wanted_rng
from swift_loader.worker.seeding import Rng


def check_threads(loader: DataLoader[Any]) -> None:
    """Check that threads can do what a loader asks of its workers. Raises `ValueError` that says what to change."""
    instead = "worker_type='process'"
    if is_pipe(loader.dataset):
        raise ValueError(
            f"worker_type='thread' doesn't work with a DataPipe, which is shared out to processes; give {instead}"
        )
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers > 1:
        raise ValueError(
            f"num_workers={loader.num_workers} doesn't work with worker_type='thread' and an IterableDataset because "
            f"torch's get_worker_info() can't tell threads apart, and a stream that draws from the global generators "
            f"would differ from thread to thread; give num_workers=1 or {instead}"
        )
    if has_init_of_user(loader):
        raise ValueError(
            f"worker_init_fn doesn't work with worker_type='thread' because it sets up a process, and threads share "
            f"that of the training loop; leave it out, or give {instead}"
        )
    if wanted_rng(loader) is Rng.WORKER:
        raise ValueError(
            f"rng='worker' doesn't work with worker_type='thread' because threads share the random generators; give "
            f"rng='sample' or rng=None, or {instead}"
        )


def needs_copies(dataset: Any) -> bool:
    """Return whether each thread needs a dataset of its own, as each process has one.

    It does if iterating changes the dataset: a stream may be its own iterator, and a state tells what one worker did.
    """
    return isinstance(dataset, IterableDataset) or hasattr(dataset, "state_dict")


def copied(dataset: Any) -> Any:
    """Return a deep copy of a dataset. Raises `TypeError` if it can't be copied."""
    try:
        return copy.deepcopy(dataset)
    except Exception as error:
        raise TypeError(
            f"the dataset, a {type(dataset).__name__}, can't be copied ({error}). With worker_type='thread', an "
            f"IterableDataset or a dataset with a state_dict is copied for each worker; give it a __deepcopy__, or "
            f"worker_type='process'"
        ) from error
