"""Delivers batches of images on the device, ready for a model, from any loader. Runs in the loop's thread.

    SwiftLoader, not started    is started here with an `ImageStage` as its `to_device`: one copy, ahead of the loop
    any other loader            a DevicePrefetcher takes the next batch from it after each one that the loop gets

Nothing starts before the first `next`, or `start()`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from swift_loader.dataloader.dataloader import DataLoader as SwiftDataLoader
from swift_loader.device.prefetch import LazyPass
from swift_loader.device.prefetcher import DevicePrefetcher
from swift_loader.device.target import default_device, device_of
from swift_loader.loader import SwiftLoader
from swift_loader.notices import warn
from swift_loader.report.report import Report
from swift_loader.vision.erasing import RandomErasing
from swift_loader.vision.stage import IMAGENET_MEAN, IMAGENET_STD, ImageStage

if TYPE_CHECKING:
    from types import TracebackType

    from swift_loader.vision.stage import PerChannel

__all__ = ["PrefetchLoader"]


class PrefetchLoader:
    """Yields `(images, targets)` on the device. Images are `(B, C, H, W)`, normalised and, if asked for, erased.

    It has the interface of timm's PrefetchLoader and of a SwiftLoader. `len`, `set_epoch`, `state_dict` and
    `load_state_dict` are the loader's, and count the batches that the loop has got, not those prefetched.
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
        """Configure the stage. Starts nothing, and takes nothing from the loader yet.

        Args:
            loader: A SwiftLoader, preferably not started, or any iterable of `(images, targets)`.
            mean: Mean per channel, or one number for all channels, of pixels from 0 to 1.
            std: Standard deviation per channel, or one number for all channels, of pixels from 0 to 1.
            channels: Number of channels of the images.
            device: Where batches go. The default is the current accelerator, else the CPU. A CUDA device that doesn't
                exist is replaced by the CPU, with a warning.
            img_dtype: dtype of the delivered images; None: float32.
            fp16: The same as `img_dtype=torch.float16`; timm's older option.
            re_prob: Probability that random erasing applies to an image.
            re_mode: How to fill an erased rectangle, see `RandomErasing.mode`.
            re_count: Maximum number of rectangles per image.
            re_num_splits: If 2 or more: don't erase from the first of this many equal parts of a batch.
            channels_last: Whether images have torch's channels_last memory format.

        Raises:
            TypeError: `loader` isn't iterable, or a value has the wrong type.
            ValueError: A value is out of range.
        """
        erasing = None
        if re_prob:
            erasing = RandomErasing(re_prob, mode=re_mode, max_count=re_count, num_splits=re_num_splits)
        dtype = torch.float16 if fp16 else img_dtype
        self.stage = ImageStage(mean, std, channels, dtype, channels_last=channels_last, erasing=erasing)
        self.device = _usable_device(device)
        self.loader = loader
        """The loader. Setting `mixup_enabled` replaces a SwiftLoader with a new one."""
        self._source: SwiftLoader | DevicePrefetcher | None = None
        """The object to iterate over; None: a SwiftLoader that must be started first."""
        self._consumer_index: int | None = None
        if not _is_fresh(loader):
            self._source = self._prefetcher()

    # Life -------------------------------------------------------------------------------------------------------------

    def start(self, consumer_index: int | None = None) -> None:
        """Start a SwiftLoader now, instead of at the first pass. Blocks until a trial batch has arrived.

        Args:
            consumer_index: Which part of the dataset this process gets, see `SwiftLoader.start`.

        Raises:
            TypeError: The loader isn't a SwiftLoader.
            RuntimeError: The loader is already running.
        """
        if not isinstance(self.loader, SwiftLoader):
            raise TypeError(f"a {type(self.loader).__name__} can't be started; iterate over this loader instead")
        self.loader.start(consumer_index, device=self.device, to_device=self.stage)
        self._source, self._consumer_index = self.loader, consumer_index

    def close(self) -> None:
        """Close the loader, if it has a `close`. Batches that the user keeps stay valid. Idempotent."""
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
        """Return an iterator over one pass. The pass starts with its first `next`."""
        return LazyPass(self._begin_pass)

    def _begin_pass(self) -> Callable[[], Any]:
        """Start a pass, and the loader if it isn't running."""
        if self._source is None:
            if _is_fresh(self.loader):
                self.start(self._consumer_index)
            else:  # the user has started or closed it since; if it is closed, the pass raises
                self._source = self._prefetcher()
        return iter(self._source).__next__  # type: ignore[arg-type] # start() has set it

    def __len__(self) -> int:
        """Return the loader's length: the number of batches of an epoch."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self._state_owner.set_epoch(epoch)

    def state_dict(self) -> Any:
        """Return the loader's state after the last batch that the loop got; {} if the loader has no state."""
        return self._state_owner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at this state with the next pass. An iterator already in use becomes invalid."""
        self._state_owner.load_state_dict(state)

    @property
    def mixup_enabled(self) -> bool:
        """Whether the collate function mixes samples, as timm's `FastCollateMixup` does; False if it can't.

        Set it between passes. A SwiftLoader is replaced by one with another collate function, see `with_collate_fn`: it
        starts again at the next pass, its workers follow the new setting, and an iterator in use becomes invalid. For
        any other loader, only the collate function in this process is changed: workers that persist keep the old
        setting.
        """
        return bool(getattr(self.collate_fn, "mixup_enabled", False))

    @mixup_enabled.setter
    def mixup_enabled(self, enabled: bool) -> None:
        collate_fn = self.collate_fn
        if not hasattr(collate_fn, "mixup_enabled"):
            if enabled:
                warn("mixup_enabled = True has no effect: the collate_fn can't mix; pass timm's FastCollateMixup")
        elif not isinstance(self.loader, SwiftLoader):
            collate_fn.mixup_enabled = enabled
        elif bool(enabled) is not self.mixup_enabled:
            changed = copy.copy(collate_fn)
            changed.mixup_enabled = enabled
            self._replace_collate_fn(self.loader, changed)

    # Attributes -------------------------------------------------------------------------------------------------------

    dataset = property(attrgetter("loader.dataset"), doc="The loader's dataset.")
    sampler = property(attrgetter("loader.sampler"), doc="The loader's sampler; a SwiftLoader's has a `set_epoch`.")
    batch_sampler = property(attrgetter("loader.batch_sampler"), doc="The loader's; None for a SwiftLoader.")
    batch_size = property(attrgetter("loader.batch_size"), doc="The loader's batch size.")

    @property
    def collate_fn(self) -> Any:
        """The loader's collate function; None for a SwiftLoader's default."""
        return getattr(self.loader, "collate_fn", None)

    def report(self) -> Report:
        """Return what was measured of the loader so far, see `SwiftLoader.report`; empty for torch's DataLoader."""
        return self.loader.report() if isinstance(self.loader, (SwiftLoader, SwiftDataLoader)) else Report()

    def __repr__(self) -> str:
        return f"<PrefetchLoader to {self.device} as {self.stage.img_dtype} of {self.loader!r}>"

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _state_owner(self) -> Any:
        """The object that knows how many batches the loop has got."""
        return self.loader if self._source is None else self._source

    def _prefetcher(self) -> DevicePrefetcher:
        return DevicePrefetcher(self.loader, self.device, self.stage)

    def _replace_collate_fn(self, loader: SwiftLoader, collate_fn: Any) -> None:
        """Replace the loader. If it is behind a prefetcher, it is ahead: the new one resumes at the loop's state."""
        state = self._source.state_dict() if isinstance(self._source, DevicePrefetcher) else None
        self.loader = loader.with_collate_fn(collate_fn)
        if state is not None:
            self.loader.load_state_dict(state)
        self._source = None


def _is_fresh(loader: Any) -> bool:
    """Return whether this is a SwiftLoader that hasn't been started."""
    return isinstance(loader, SwiftLoader) and not loader.has_started


def _usable_device(device: torch.device | str | int | None) -> torch.device:
    """Return the device to use: the CPU, with a warning, instead of a CUDA device that doesn't exist."""
    if device is None:
        return default_device()
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        warn(f"device={device!r}, but torch finds no CUDA device: images stay on the CPU; pass device='cpu', or none")
        return torch.device("cpu")
    return device_of(device)
