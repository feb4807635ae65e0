"""What timm's `create_loader` does, by a SwiftLoader: under timm's names, so that one import changes.

    from swift_loader.vision import create_loader

    dataset     timm's, with the transform that timm makes for these options                      worker
    collate     bytes `(B, C, H, W) uint8` and targets, in the memory they are sent in            worker
    stage       moves the bytes, then converts, normalises and erases on the device               loop's thread
    prefetch    `PrefetchLoader`: any loader with such a stage behind it, and what training loops ask of it
    create      `create_loader`: all of it, from timm's options; alone imports timm

A batch has the bits that timm's would have for the same samples and draws. What is drawn depends on the sample, and on
the device on the batch: not on workers, nor on what was built before, and so it is the same after a resume.
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
    """Import a public name when it is first used: a worker imports this package for its collate alone."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
