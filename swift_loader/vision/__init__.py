"""timm's `create_loader`, built on this package's loaders. The names are timm's, so only the import changes.

    from swift_loader.vision import create_loader

    dataset     timm's, with the transform that timm makes for these options                      worker
    collate     images `(B, C, H, W) uint8` and targets, written into the memory they are sent in worker
    stage       moves the bytes, then converts, normalises and erases on the device               loop's thread
    prefetch    `PrefetchLoader`: any loader with such a stage, and the interface of timm's PrefetchLoader
    create      `create_loader`: all of this, from timm's options

A SwiftLoader gives each sample once per epoch. For repeats, several sizes, a number of batches and streams:

    shares      which samples of an epoch a rank gets, each once or several times                 pure
    schedule    how many samples each batch has, and images of which size
    batches     the batch sampler of these two, with a key for each sample's random numbers       loop's thread
    places      the dataset that builds samples by their keys                                     worker
    epochs      `EpochLoader`: a DataLoader with epochs and states as a SwiftLoader has them      loop's thread
    sources     chooses between the two

For the same samples and the same random numbers, a batch has the same bits as timm's. The random numbers depend on the
sample, and on the device on the batch. They don't depend on workers or on earlier batches, so they are the same after a
resume. Those of a stream depend on the worker.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift_loader.vision.collate import fast_collate, tensor_collate
    from swift_loader.vision.create import create_loader
    from swift_loader.vision.erasing import RandomErasing
    from swift_loader.vision.prefetch import PrefetchLoader
    from swift_loader.vision.stage import ImageStage

__all__ = ["ImageStage", "PrefetchLoader", "RandomErasing", "create_loader", "fast_collate", "tensor_collate"]

_HOMES = {
    "ImageStage": "stage",
    "PrefetchLoader": "prefetch",
    "RandomErasing": "erasing",
    "create_loader": "create",
    "fast_collate": "collate",
    "tensor_collate": "collate",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, because a worker imports this package only for its collate function."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
