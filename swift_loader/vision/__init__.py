"""timm's `create_loader`, with this package's loader put in. The names are timm's, so only the import changes.

    from swift_loader.vision import create_loader

    create      `create_loader`: timm's own, with our DataLoader and our PrefetchLoader put in
    decode      `ImageDecoder`: image files to arrays or Pillow's images, for a dataset of your own
    prefetch    `PrefetchLoader`: any loader, with an `ImageStage` that moves, normalises and erases on the device

For the same samples and the same random numbers, a batch has the same bits as timm's. The random numbers of samples are
those of a DataLoader, and those on the device depend on the batch. So they are the same after a resume.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift_loader.vision.create import create_loader
    from swift_loader.vision.decode import ImageDecoder
    from swift_loader.vision.prefetch import ImageStage, PrefetchLoader, RandomErasing

__all__ = ["ImageDecoder", "ImageStage", "PrefetchLoader", "RandomErasing", "create_loader"]
_HOMES = {"ImageDecoder": "decode", "create_loader": "create"}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, because a worker needs only `ImageDecoder`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'prefetch')}"), name)
