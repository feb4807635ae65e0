"""timm's `create_loader`, built on this package's loaders. The names are timm's, so only the import changes.

    from swift_loader.vision import create_loader

    create      `create_loader`: chooses and configures what follows, from timm's options
    decode      `ImageDecoder`: image files to arrays or Pillow's images, for a dataset of your own
    collate     what runs in the worker: images `(B, C, H, W) uint8` and targets, in the memory they are sent in
    prefetch    `PrefetchLoader`: any loader, with an `ImageStage` that moves, normalises and erases on the device

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
    from swift_loader.vision.decode import ImageDecoder
    from swift_loader.vision.prefetch import ImageStage, PrefetchLoader, RandomErasing

__all__ = [
    "ImageDecoder",
    "ImageStage",
    "PrefetchLoader",
    "RandomErasing",
    "create_loader",
    "fast_collate",
    "tensor_collate",
]
_HOMES = {"ImageDecoder": "decode", "create_loader": "create", "fast_collate": "collate", "tensor_collate": "collate"}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, because a worker imports this package only for its collate function."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'prefetch')}"), name)
