"""Measures normalised images/s on the device: torch's DataLoader, timm's PrefetchLoader, and swift_loader.

Images of (3, 224, 224) uint8 and their labels are in memory. The loaders collate and copy them, and normalise them on
the device to float32 with mean 0 and deviation 1. The loop does nothing with them.

- torch: `pin_memory=True`; the loop copies without blocking, and normalises.
- timm: `timm.data.loader.PrefetchLoader` around the same loader; left out if timm isn't installed.
- swift_loader: `start(device=..., to_device=...)`.
- vision: `swift_loader.vision.PrefetchLoader` around a `swift_loader.DataLoader`, as `create_loader` makes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from common.turns import measure_in_turns, table_with_ratios

import swift_loader
from gpu.accelerator import Accelerator
from gpu.datasets import LabelledImages
from gpu.feeds import Feed, swift_feed, swift_loader_of, torch_feed, torch_loader_of
from gpu.outcome import Outcome
from gpu.scale import Scale
from swift_loader.vision import PrefetchLoader

_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)
_NUM_BATCHES = 500


def measure_images(accelerator: Accelerator, scale: Scale) -> Outcome:
    """Return images/s for each loader that is installed."""
    feeds: dict[str, Feed] = {}
    missing: list[str] = []
    try:
        _start_feeds(feeds, missing, accelerator, scale)
        systems: dict[str, Callable[[], float]] = {
            name: partial(_rate, accelerator, scale, feed) for name, feed in feeds.items()
        }
        results = measure_in_turns("images", "images/s", systems, scale.rounds)
    finally:
        for feed in feeds.values():
            feed.close()
    notes = [f"{name}: not measured, not installed" for name in missing]
    if not accelerator.is_gpu:
        notes.append(accelerator.describe())
    title = f"batches of {scale.batch_size}, {scale.num_workers} workers"
    return Outcome("\n".join([title, table_with_ratios(results, "torch"), *notes]), results)


class Normalise:
    """Moves a batch of images and labels, and normalises the images there."""

    def __init__(self, device: torch.device) -> None:
        shape = (1, 3, 1, 1)
        self._mean = torch.tensor([255 * mean for mean in _MEAN], device=device).view(shape)
        self._std = torch.tensor([255 * std for std in _STD], device=device).view(shape)

    def __call__(self, batch: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 images and labels on the device."""
        images, labels = swift_loader.to_device(batch, device)
        return images.float().sub_(self._mean).div_(self._std), labels


def _start_feeds(feeds: dict[str, Feed], missing: list[str], accelerator: Accelerator, scale: Scale) -> None:
    """Add the feeds to a dict, one by one, so that those that did start can be closed; tell which there aren't."""
    make_dataset = partial(LabelledImages, length=_NUM_BATCHES * scale.batch_size, num_distinct=scale.num_distinct)
    sizes = scale.batch_size, scale.num_workers
    normalise = Normalise(accelerator.device)
    loader = torch_loader_of(accelerator, make_dataset(), *sizes)
    feeds["torch"] = torch_feed(loader, partial(normalise, device=accelerator.device))
    try:
        timm = import_module("timm.data.loader").PrefetchLoader
    except ImportError:
        missing.append("timm")
    else:
        feeds["timm"] = Feed(_wrap(timm, torch_loader_of(accelerator, make_dataset(), *sizes), accelerator))
    feeds["swift_loader"] = swift_feed(swift_loader_of(make_dataset, *sizes), accelerator, normalise)
    shared = {"shuffle": True, "persistent_workers": True, "pin_memory": accelerator.is_gpu}
    ours = swift_loader.DataLoader(make_dataset(), scale.batch_size, num_workers=scale.num_workers, **shared)
    feeds["vision"] = Feed(_wrap(PrefetchLoader, ours, accelerator), close=ours.close)


def _wrap(prefetcher: Callable[..., Iterable[Any]], loader: Any, accelerator: Accelerator) -> Iterable[Any]:
    return prefetcher(loader, mean=_MEAN, std=_STD, channels=3, device=accelerator.device, img_dtype=torch.float32)


def _rate(accelerator: Accelerator, scale: Scale, feed: Feed) -> float:
    """Return images/s between two moments at which the device is idle, when what was ready before is used up."""
    for _ in range(scale.num_uncounted_steps):
        feed.take()
    accelerator.synchronize()
    count = 0
    begin = now = time.perf_counter()
    while now - begin < scale.turn_s:
        images, _ = feed.take()
        count += len(images)
        now = time.perf_counter()
    accelerator.synchronize()
    return count / (time.perf_counter() - begin)
