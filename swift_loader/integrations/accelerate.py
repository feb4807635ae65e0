"""Accelerate: loaders that it prepares load with `swift_loader.DataLoader`.

`Accelerator.prepare` wraps a loader in one of its own classes, which shards it and moves the batches to the device.
Inside, it makes a new DataLoader, of torch's class whatever the given one was. `keep_class` puts a
`swift_loader.DataLoader` in its place. It runs by itself when Accelerate meets the first `swift_loader.DataLoader`.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import ref

try:
    import accelerate.accelerator
    from accelerate import PartialState
    from accelerate.data_loader import DataLoaderDispatcher
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "swift_loader.integrations.accelerate needs Accelerate: pip install accelerate", name="accelerate"
    ) from error

from torch.utils.data import DataLoader as TorchDataLoader

from swift_loader.dataloader.dataloader import DataLoader
from swift_loader.dataloader.options import converted

_OURS = "_keeps_swift_loader"
"""An attribute of our function, and of what others wrap around it."""


def keep_class(kind: type[TorchDataLoader[Any]]) -> None:
    """Make Accelerate load with `kind` where it prepares a loader of that class. Other loaders stay as they are."""
    prepare = accelerate.accelerator.prepare_data_loader
    if hasattr(prepare, _OURS):
        return

    @functools.wraps(prepare)
    def prepare_and_keep(
        dataloader: Any, *arguments: Any, use_stateful_dataloader: bool = False, **options: Any
    ) -> Any:
        if not isinstance(dataloader, kind):
            return prepare(dataloader, *arguments, use_stateful_dataloader=use_stateful_dataloader, **options)
        # torchdata's loader would draw from the generator.
        prepared = load_with(kind, prepare(dataloader, *arguments, **options), like=dataloader)
        waits_for_rank_0 = isinstance(prepared, DataLoaderDispatcher) and PartialState().process_index
        if use_stateful_dataloader and not waits_for_rank_0:
            prepared.use_stateful_dataloader = True  # `save_state` saves its position
        return prepared

    vars(prepare_and_keep)[_OURS] = True
    accelerate.accelerator.prepare_data_loader = prepare_and_keep


def _before_prepare(*_: Any) -> None:
    """Let Accelerate keep the class of a loader that it is about to prepare."""
    keep_class(DataLoader)


def load_with(kind: type[TorchDataLoader[Any]], prepared: Any, like: Any = None) -> Any:
    """Make a loader that Accelerate has prepared load with a DataLoader of class `kind`, and return it.

    Args:
        kind: `swift_loader.DataLoader`.
        prepared: What `Accelerator.prepare` returned. Nobody has iterated over it yet.
        like: The DataLoader that was given to `prepare`. Options that torch doesn't have are taken from it.
    """
    inner = getattr(prepared, "base_dataloader", None)
    if isinstance(inner, TorchDataLoader) and not isinstance(inner, kind):
        prepared.base_dataloader = converted(inner, kind, like)
        prepared.dl_state_dict = {}  # what the prepared loader says before its first batch: nothing to resume
        if isinstance(prepared, DataLoaderDispatcher) and not prepared.split_batches:  # rank 0 loads for all ranks
            prepared.adjust_state_dict_for_prefetch = _WholeSteps(prepared, PartialState().num_processes)
    return prepared


class _WholeSteps:
    """Corrects the state of a loader that loads for all ranks, and is some ranks' batches ahead of the training loop.

    Accelerate takes the state before each batch that it fetches. A step needs one batch for each rank, so only the
    state before the first of them says where the loop is. Accelerate has a correction of its own, for torchdata's
    loader, which only fits some of its states.
    """

    def __init__(self, prepared: Any, num_ranks: int) -> None:
        self._prepared = ref(prepared)
        self._num_ranks = num_ranks
        self._latest: dict[str, Any] = {}

    def __call__(self) -> None:
        """Put the right state in the place of the present one. Accelerate calls it after taking a state."""
        prepared: Any = self._prepared()  # calls this
        if prepared.end_of_dataloader or prepared.dl_state_dict["_snapshot"]["_snapshot_step"] % self._num_ranks == 0:
            self._latest = prepared.dl_state_dict
        prepared.dl_state_dict = self._latest
