"""Feeds of batches on the device, one per loader, each with the loader's usual options."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from common.turns import endless

from gpu.accelerator import Accelerator
from swift_loader import SwiftLoader


class Feed:
    """Gives batches on the device without end. Idle between calls."""

    def __init__(
        self, loader: Iterable[Any], finish: Callable[[Any], Any] | None = None, close: Callable[[], None] | None = None
    ) -> None:
        """Take over a loader.

        Args:
            loader: Gives the batches. Iterated over repeatedly.
            finish: Applied to each batch before the loop uses it. None: nothing.
            close: Ends the loader's processes. None: dropping the last reference ends them.
        """
        self._batches = endless(loader)
        self._finish = finish
        self._close = close

    def take(self) -> Any:
        """Return the next batch."""
        batch = next(self._batches)
        return batch if self._finish is None else self._finish(batch)

    def close(self) -> None:
        """End the processes. torch's are ended when the last reference to their loader goes."""
        self._batches.close()
        if self._close is not None:
            self._close()
        del self._batches, self._finish, self._close


def resident_feed(batches: Iterable[torch.Tensor]) -> Feed:
    """Return some batches that are on the device already, over and over."""
    return Feed(itertools.cycle(batches))


def torch_feed(loader: Iterable[Any], move: Callable[[Any], Any]) -> Feed:
    """Return a torch DataLoader's batches, moved by the loop, without waiting for the copy."""
    return Feed(loader, move)


def swift_feed(loader: SwiftLoader, accelerator: Accelerator, to_device: Callable[..., Any] | None = None) -> Feed:
    """Return a SwiftLoader's batches, moved by itself."""
    try:
        loader.start(device=accelerator.device, to_device=to_device)
    except BaseException:
        loader.close()
        raise
    return Feed(loader, close=loader.close)


def torch_loader_of(accelerator: Accelerator, dataset: Any, batch_size: int, num_workers: int) -> Iterable[Any]:
    """Return a torch DataLoader, set up for speed."""
    from torch.utils.data import DataLoader

    return DataLoader(
        dataset,
        batch_size,
        shuffle=True,
        num_workers=num_workers,
        multiprocessing_context="spawn",
        persistent_workers=True,
        prefetch_factor=4,
        pin_memory=accelerator.is_gpu,
    )


def swift_loader_of(make_dataset: partial[Any], batch_size: int, num_workers: int) -> SwiftLoader:
    """Return a SwiftLoader with its defaults, not started."""
    return SwiftLoader(
        make_dataset.func,
        make_dataset.keywords,
        batch_size=batch_size,
        nb_consumer=1,
        worker_per_consumer=num_workers,
        seed=1,
    )
