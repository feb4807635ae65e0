"""timm: its own `create_loader`, loading with `swift_loader.DataLoader`. Only the import changes.

Samplers, transforms, collate function and PrefetchLoader are timm's, so a run has timm's order and, without workers,
its random numbers. `swift_loader.vision.create_loader` puts in a PrefetchLoader of ours, too, and has more options.
"""

from __future__ import annotations

from typing import Any

try:
    import timm.data
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("swift_loader.integrations.timm needs timm: pip install timm", name="timm") from error

from swift_loader.dataloader.dataloader import DataLoader
from swift_loader.dataloader.options import converted


def create_loader(*arguments: Any, use_multi_epochs_loader: bool = False, **options: Any) -> Any:  # noqa: ARG001
    """Return what `timm.data.create_loader` returns.

    Args:
        arguments: As of `timm.data.create_loader`.
        use_multi_epochs_loader: Does nothing: workers stay from epoch to epoch anyway.
        options: As of `timm.data.create_loader`.
    """
    loader = timm.data.create_loader(*arguments, **options)
    if not hasattr(loader, "loader"):
        return converted(loader, DataLoader)
    loader.loader = converted(loader.loader, DataLoader)  # timm's PrefetchLoader moves and normalises what it gives
    return loader
