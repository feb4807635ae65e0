"""What training frameworks need beside the loader, one module per framework. Only that module imports the framework.

Fabric needs nothing: it saves and loads any object with `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

_ABOUT_BATCHES = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
"""Options that depend on each other."""


def converted(loader: TorchDataLoader[Any], kind: Any, like: Any = None) -> Any:
    """Return a `kind`, a DataLoader, with the same dataset, samplers and options. `loader` hasn't been iterated over.

    Options that torch doesn't have are taken from `like`, if it has them.
    """
    options: dict[str, Any] = {}
    for name in inspect.signature(kind.__init__).parameters.keys() - _ABOUT_BATCHES - {"self", "dataset"}:
        owner = loader if hasattr(loader, name) else like
        if hasattr(owner, name):
            options[name] = getattr(owner, name)
    if not loader.num_workers:
        options["prefetch_factor"] = None  # torch refuses another one
    if loader.batch_size is None and loader.batch_sampler is not None:
        return kind(loader.dataset, batch_sampler=loader.batch_sampler, **options)
    if not isinstance(loader.dataset, IterableDataset):
        options["sampler"] = loader.sampler
    return kind(loader.dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **options)
