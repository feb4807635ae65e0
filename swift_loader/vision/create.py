"""`create_loader`: timm's own, with a DataLoader of this package put in. Runs in the trainer.

timm makes transforms, samplers and options. It imports timm when it is called.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, Literal

import torch
from torch.utils.data import RandomSampler

from swift_loader.checks import check_integer
from swift_loader.dataloader.dataloader import DataLoader
from swift_loader.dataloader.options import converted
from swift_loader.ranks.ranks import expected_ranks, find_ranks
from swift_loader.samplers.base import chain_of
from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.vision.prefetch import PrefetchLoader


def create_loader(
    *arguments: Any,
    channels_last: bool = False,
    seed: int | None = None,
    in_order: bool = True,
    on_error: Literal["raise", "skip"] = "raise",
    max_errors: float | None = None,
    timeout: float = 0,
    worker_restarts: int = 3,
    stall_warning: float | None = 60.0,
    **options: Any,
) -> PrefetchLoader | ImageLoader:
    """Set timm's transform on a dataset, and return a loader of it, with timm's samplers. Starts no worker.

    Args:
        arguments: As of `timm.data.create_loader`: dataset, input size, batch size, and so on.
        channels_last: With the prefetcher: True delivers images in torch's channels_last memory format.
        seed: Integer of at least 0, as a DataLoader's [`seed`](dataloader.md#random-draws). With `distributed=True`,
            the rank is added. The order is the same as without it if a sampler of timm's or `DistributedSampler`
            determines it.
        in_order: False delivers batches as soon as they are built.
        on_error: What happens to a sample that [raises](failures.md#a-sample-fails), as for a DataLoader.
        max_errors: How many samples may fail in an epoch, as for a DataLoader. None: no limit.
        timeout: Seconds that the loop waits for a batch before it gets `WorkerStalled`. 0: no limit.
        worker_restarts: How many times in a row a [dead worker](failures.md#a-worker-dies) is replaced.
        stall_warning: Seconds that a worker may spend on a batch that the loop waits for, before a warning shows its
            Python stack. None or 0: no warning.
        options: As of `timm.data.create_loader`. `use_multi_epochs_loader` does nothing. `device` may be a string; the
            default is the current accelerator, else the CPU. With the prefetcher, `pin_memory` does nothing: batches
            for a GPU are page-locked.

    Returns:
        A `PrefetchLoader`; with `use_prefetcher=False`, the DataLoader itself.

    Raises:
        ImportError: timm isn't installed.
        TypeError: timm has no such option, or a value has the wrong type.
        ValueError: A value is out of range.
    """
    from timm.data import create_loader as create

    given = signature(create).bind(*arguments, **options).arguments
    made = create(**{**given, "device": torch.device("cpu"), "use_multi_epochs_loader": False})
    has_prefetcher = given.get("use_prefetcher", True)
    loader = made.loader if has_prefetcher else made
    if seed is not None:
        seed = check_integer("seed", seed, 0) + (find_ranks(None, None).rank if given.get("distributed") else 0)
        loader.generator = torch.Generator()  # which the seed determines
        for sampler in chain_of(loader.batch_sampler, loader.sampler):
            if isinstance(sampler, RandomSampler):
                sampler.generator = loader.generator
    if has_prefetcher:  # it copies to a GPU from page-locked memory
        is_gpu = torch.device(given.get("device") or "cuda").type == "cuda"
        loader.pin_memory = is_gpu and torch.cuda.is_available()
    vars(loader).update(
        seed=seed,
        in_order=in_order,
        on_error=on_error,
        max_errors=max_errors,
        timeout=timeout,
        worker_restarts=worker_restarts,
        stall_warning=stall_warning,
    )
    ours: ImageLoader = converted(loader, ImageLoader)
    if not has_prefetcher:
        return ours
    stage = {name: given[name] for name in signature(PrefetchLoader).parameters if name in given}
    erasing = made.random_erasing  # None in evaluation
    stage |= {"re_num_splits": erasing.num_splits} if erasing else {"re_prob": 0.0}
    return PrefetchLoader(ours, channels=made.mean.shape[1], channels_last=channels_last, **stage)


class ImageLoader(DataLoader[Any]):
    """A DataLoader that tells a `DevicePrefetcher` its place, so that random erasing resumes."""

    def device_key(self) -> int:
        """Return the key of the last batch, see `device.prefetch.batch_key`."""
        epoch: Any = self._latest
        place = epoch.number, epoch.num_yielded - 1, expected_ranks(None).rank
        return derive_key(epoch.draws.begun.base_seed, Purpose.DEVICE.value, *place)
