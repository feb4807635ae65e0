"""DataLoader, the drop-in class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, Sampler

from swift_loader.dataloader.inline import InlineEpoch
from swift_loader.dataloader.iterator import Epoch, LoaderIterator
from swift_loader.dataloader.state import LoaderPosition

__all__ = ["DataLoader"]

_Batch_co = TypeVar("_Batch_co", covariant=True)

_TORCH_OPTIONS = frozenset(inspect.signature(TorchDataLoader.__init__).parameters)
"""The options that the installed torch knows."""


class DataLoader(TorchDataLoader[_Batch_co]):
    """`torch.utils.data.DataLoader` with one import changed."""

    def __init__(
        self,
        dataset: Dataset[_Batch_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        options: dict[str, Any] = {
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "pin_memory_device": pin_memory_device,
            "in_order": in_order,
        }
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            **{name: value for name, value in options.items() if name in _TORCH_OPTIONS},
        )
        self.in_order = in_order
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._latest: LoaderIterator | None = None
        self._prepared: LoaderIterator | None = None
        self._loaded: LoaderPosition | None = None

    def __iter__(self) -> Any:
        if self._prepared is not None:
            self._latest, self._prepared = self._prepared, None
            return self._latest
        self._latest = self._begin()
        return self._latest

    def _begin(self) -> LoaderIterator:
        resume, self._loaded = self._loaded, None
        epoch = 0 if self._latest is None else self._latest.position().draws.epoch + 1
        source: Epoch = InlineEpoch(self, epoch, resume)
        return LoaderIterator(self, source, pin_device=None)

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded.to_dict()
        if self._latest is None and self._prepared is None:
            self._prepared = self._begin()
        current = self._prepared or self._latest
        return current.position().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prepared = self._latest = None
        self._loaded = LoaderPosition.from_dict(state) if state else None
