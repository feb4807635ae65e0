"""Batches of images on the device, ready for a model: any loader, with an `ImageStage` behind it. In the loop's thread.

    SwiftLoader, not started    started here with the stage as its `to_device`: one copy, ahead as it gets ready
    anything else               a DevicePrefetcher asks it for a batch after each that the loop is given

Nothing begins before the first `next`, or `start()`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from swift_loader.device.destination import default_device, device_of
from swift_loader.device.prefetcher import DevicePrefetcher
from swift_loader.loader import SwiftLoader
from swift_loader.notices import warn
from swift_loader.vision.erasing import RandomErasing
from swift_loader.vision.stage import IMAGENET_MEAN, IMAGENET_STD, ImageStage

if TYPE_CHECKING:
    from types import TracebackType

    from swift_loader.vision.stage import PerChannel

__all__ = ["PrefetchLoader"]


class PrefetchLoader:
    """Yields `(images, targets)` on the device: images `(B, C, H, W)`, normalised, perhaps erased from.

    Has what timm's has, and what a SwiftLoader has: `len`, `set_epoch`, `state_dict` and `load_state_dict` are the
    loader's, as the loop has got to know it.
    """

    def __init__(  # noqa: PLR0917 - timm's, in timm's order
        self,
        loader: Any,
        mean: PerChannel = IMAGENET_MEAN,
        std: PerChannel = IMAGENET_STD,
        channels: int = 3,
        device: torch.device | str | int | None = None,
        img_dtype: torch.dtype | None = None,
        fp16: bool = False,
        re_prob: float = 0.0,
        re_mode: str = "const",
        re_count: int = 1,
        re_num_splits: int = 0,
        channels_last: bool = False,
    ) -> None:
        """Get ready; starts nothing, and takes nothing from the loader yet.

        Args:
            loader: A SwiftLoader, best one that hasn't started, or any iterable of `(images, targets)`.
            mean: Of pixels from 0 to 1, per channel, or one number for all.
            std: Likewise.
            channels: Of the images.
            device: Where to; by default the current accelerator, else the CPU. CUDA where there is none becomes the
                CPU, with a warning.
            img_dtype: Of the images that come out; None: float32.
            fp16: The same as `img_dtype=torch.float16`, which timm had before.
            re_prob: The probability with which random erasing takes something from an image.
            re_mode: What that is filled with, see `RandomErasing.mode`.
            re_count: At most how many rectangles per image.
            re_num_splits: From 2 on: the first of so many equal parts of a batch is left alone.
            channels_last: Whether images have their channels side by side in memory.

        Raises:
            TypeError: `loader` can't be iterated over, or a value of the wrong type.
            ValueError: A value out of its range.
        """
        erasing = None
        if re_prob:
            erasing = RandomErasing(re_prob, mode=re_mode, max_count=re_count, num_splits=re_num_splits)
        dtype = torch.float16 if fp16 else img_dtype
        self.stage = ImageStage(mean, std, channels, dtype, channels_last=channels_last, erasing=erasing)
        self.device = _usable_device(device)
        self.loader = loader
        """Another one after `mixup_enabled` was set, if it is a SwiftLoader."""
        self._source: SwiftLoader | DevicePrefetcher | None = None
        """What passes are begun on; None: a SwiftLoader that is to be started first."""
        self._consumer_index: int | None = None
        if not _is_fresh(loader):
            self._source = self._prefetcher()

    # Life -------------------------------------------------------------------------------------------------------------

    def start(self, consumer_index: int | None = None) -> None:
        """Start a SwiftLoader, which the first pass does otherwise. Blocks until a trial batch has arrived.

        Args:
            consumer_index: Which part of the dataset is this process's, see `SwiftLoader.start`.

        Raises:
            TypeError: The loader is no SwiftLoader.
            RuntimeError: It runs already.
        """
        if not isinstance(self.loader, SwiftLoader):
            raise TypeError(f"a {type(self.loader).__name__} can't be started; it begins when it is iterated over")
        self.loader.start(consumer_index, device=self.device, to_device=self.stage)
        self._source, self._consumer_index = self.loader, consumer_index

    def close(self) -> None:
        """Close the loader, if it can be. Idempotent; batches the user has stay valid."""
        if callable(getattr(self.loader, "close", None)):
            self.loader.close()

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Iteration --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Return an iterator over a pass, which begins with its first `next`."""
        return _Pass(self)

    def open_pass(self) -> Iterator[tuple[Any, ...]]:
        """Begin a pass; starts what isn't running yet. Called by the iterator."""
        if self._source is None:
            if _is_fresh(self.loader):
                self.start(self._consumer_index)
            else:  # the user has started it meanwhile, or closed it: then the pass says so
                self._source = self._prefetcher()
        return iter(self._source)  # type: ignore[arg-type] # start() has set it

    def __len__(self) -> int:
        """The loader's: batches of an epoch."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass is."""
        self._known.set_epoch(epoch)

    def state_dict(self) -> Any:
        """Return the loader's state after the batch that the loop was given last; {} if it has none."""
        return self._known.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the loader go on where this state was taken, with the next pass; an iterator in use can't go on."""
        self._known.load_state_dict(state)

    @property
    def mixup_enabled(self) -> bool:
        """Whether the collate function mixes samples, as timm's `FastCollateMixup` does; False if it can't.

        To be set between passes. It gives a SwiftLoader another collate function, `with_collate_fn`: that starts again
        at the next pass, and its workers mix, or don't; an iterator in use can't go on. Of another loader, the collate
        function of this process is told: workers that it keeps from pass to pass go on as before.
        """
        return bool(getattr(_collate_fn_of(self.loader), "mixup_enabled", False))

    @mixup_enabled.setter
    def mixup_enabled(self, enabled: bool) -> None:
        collate_fn = _collate_fn_of(self.loader)
        if not hasattr(collate_fn, "mixup_enabled"):
            if enabled:
                warn("mixup_enabled = True changes nothing: the collate_fn can't mix; give timm's FastCollateMixup")
        elif not isinstance(self.loader, SwiftLoader):
            collate_fn.mixup_enabled = enabled
        elif bool(enabled) is not self.mixup_enabled:
            changed = copy.copy(collate_fn)
            changed.mixup_enabled = enabled
            self._replace_collate_fn(self.loader, changed)

    # What it is -------------------------------------------------------------------------------------------------------

    @property
    def dataset(self) -> Any:
        """The loader's."""
        return self.loader.dataset

    @property
    def sampler(self) -> Any:
        """The loader's; a SwiftLoader's has `set_epoch`, which is the loader's."""
        return self.loader.sampler

    @property
    def batch_sampler(self) -> Any:
        """The loader's; a SwiftLoader has none."""
        return self.loader.batch_sampler

    @property
    def batch_size(self) -> Any:
        """The loader's."""
        return self.loader.batch_size

    @property
    def collate_fn(self) -> Any:
        """The loader's; None is a SwiftLoader's default."""
        return _collate_fn_of(self.loader)

    def report(self) -> dict[str, Any]:
        """Return the times of a SwiftLoader's stages so far; empty for any other loader."""
        return self.loader.report() if isinstance(self.loader, SwiftLoader) else {}

    def __repr__(self) -> str:
        return f"<PrefetchLoader to {self.device} as {self.stage.img_dtype} of {self.loader!r}>"

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _known(self) -> Any:
        """What knows how far the loop has got."""
        return self.loader if self._source is None else self._source

    def _prefetcher(self) -> DevicePrefetcher:
        return DevicePrefetcher(self.loader, self.device, self.stage)

    def _replace_collate_fn(self, loader: SwiftLoader, collate_fn: Any) -> None:
        """Go on with another loader; one behind a prefetcher is ahead of the loop, and is taken back to it."""
        state = self._source.state_dict() if isinstance(self._source, DevicePrefetcher) else None
        self.loader = loader.with_collate_fn(collate_fn)
        if state is not None:
            self.loader.load_state_dict(state)
        self._source = None


class _Pass:
    """What `iter(loader)` returns."""

    def __init__(self, owner: PrefetchLoader) -> None:
        self._owner = owner
        self._batches: Iterator[tuple[Any, ...]] | None = None

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> tuple[Any, ...]:
        if self._batches is None:
            self._batches = self._owner.open_pass()
        return next(self._batches)


def _is_fresh(loader: Any) -> bool:
    """Return whether this is a SwiftLoader that can be started."""
    return isinstance(loader, SwiftLoader) and not loader.has_started


def _collate_fn_of(loader: Any) -> Any:
    return getattr(loader, "collate_fn", None)


def _usable_device(device: torch.device | str | int | None) -> torch.device:
    """Return a device; the CPU instead of a CUDA device that doesn't exist."""
    if device is None:
        return default_device()
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        warn(f"device={device!r}, but torch finds no CUDA device: images stay on the CPU; give device='cpu', or none")
        return torch.device("cpu")
    return device_of(device)
