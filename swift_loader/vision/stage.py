"""What becomes of a batch of images on the device: moved as bytes, then converted, normalised and erased from there.

Bytes are a quarter of what the floats would be to copy. Runs in the loop's thread, in `to_device`, on the stream that
copies run on. The batch on the host isn't written: it may be a view of shared memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from swift_loader.device.move import to_device
from swift_loader.notices import warn
from swift_loader.vision.erasing import RandomErasing

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "ImageStage"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Of the red, green and blue of ImageNet's training images, from 0 to 1; as in torchvision and timm."""
IMAGENET_STD = (0.229, 0.224, 0.225)

_MAX_BYTE = 255

PerChannel = float | Sequence[float]


@dataclass(frozen=True)
class ImageStage:
    """Moves `(images, targets, ...)` to a device, and makes the images there what a model wants.

    For `to_device=` of `SwiftLoader.start` and of `DevicePrefetcher`. Can be pickled, and be used by several loaders.
    """

    mean: PerChannel = IMAGENET_MEAN
    """Of pixels from 0 to 1: one number per channel, or one for all. From another number of them, the average is used
    for all, with a warning, as timm does."""
    std: PerChannel = IMAGENET_STD
    channels: int = 3
    img_dtype: torch.dtype | None = None
    """Of the images that come out; None: float32. All is computed in it."""
    channels_last: bool = False
    """Whether the images that come out have their channels side by side in memory, as convolutions on GPUs like it."""
    erasing: RandomErasing | None = None
    """Its draws are keyed by the batch."""

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise ValueError(f"channels={self.channels} is too small; it must be at least 1")
        dtype = torch.float32 if self.img_dtype is None else self.img_dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"img_dtype={dtype!r} is no floating-point dtype of torch, as torch.bfloat16 is")
        object.__setattr__(self, "img_dtype", dtype)
        for name in ("mean", "std"):
            object.__setattr__(self, name, _per_channel(name, getattr(self, name), self.channels))
        if isinstance(self.std, tuple) and min(self.std) <= 0:
            raise ValueError(f"std={self.std} has values that aren't positive; images are divided by them")

    def __call__(self, batch: Any, device: torch.device | str | int) -> tuple[Any, ...]:
        """Return the batch on the device, as a tuple, whatever sequence it was.

        Args:
            batch: `(images, targets)`, and anything further, which is moved, too. Images are `(B, C, H, W)`, of pixels
                from 0 to 255: uint8, or any other numbers.
            device: Where to.

        Raises:
            TypeError: The batch is no tuple or list that begins with numbers.
            ValueError: The images have another shape, or another number of channels.
        """
        if not isinstance(batch, (tuple, list)) or not batch:
            raise TypeError(
                f"the batch is a {type(batch).__name__}; it must be (images, targets), or longer; have the collate_fn "
                f"return that, as fast_collate does, or move batches by a to_device of your own"
            )
        images, *others = to_device(list(batch), device)
        self._check(images)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)  # while they are bytes; what follows keeps it
        normalized = self._normalize(images)
        if self.erasing is not None:
            normalized = self.erasing(normalized)
        return normalized, *others

    def _normalize(self, images: torch.Tensor) -> torch.Tensor:
        """Return images of mean 0 and deviation 1, in new memory."""
        mean, std = (_constant(values, self.img_dtype, images.device) for values in (self.mean, self.std))
        is_new = images.dtype != self.img_dtype
        centered = images.to(self.img_dtype).sub_(mean) if is_new else images.sub(mean)
        return centered.div_(std)

    def _check(self, images: Any) -> None:
        if not isinstance(images, torch.Tensor):
            raise TypeError(f"the batch's images are a {type(images).__name__}; they must be an array or a tensor")
        if images.dim() != 4:  # noqa: PLR2004 - (B, C, H, W)
            raise ValueError(f"the batch's images have the shape {tuple(images.shape)}; it must be (B, C, H, W)")
        if images.shape[1] != self.channels:
            raise ValueError(
                f"the batch's images have {images.shape[1]} channels, but channels={self.channels}; give channels, "
                f"mean and std for such images, or convert them in the dataset"
            )


def _per_channel(name: str, values: Any, channels: int) -> tuple[float, ...]:
    """Return one number for each channel."""
    numbers = np.asarray(values)
    if numbers.dtype.kind not in "iuf" or numbers.ndim > 1 or not numbers.size or not np.isfinite(numbers).all():
        raise ValueError(f"{name}={values!r} isn't what images are normalised by; give one finite number per channel")
    if numbers.size in (1, channels):
        return tuple(float(number) for number in np.broadcast_to(numbers, channels))
    average = float(np.mean(numbers))
    warn(
        f"{name} has {numbers.size} values for {channels} channels: their average, {average:g}, is used for all; give "
        f"one value per channel, or a single one"
    )
    return (average,) * channels


@functools.lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers for pixels from 0 to 1 as what they are for bytes, `(1, C, 1, 1)`; made once per device."""
    scaled = [value * _MAX_BYTE for value in values]
    assert all(map(math.isfinite, scaled))
    with torch.inference_mode(mode=False):  # else a loop that trains couldn't use what one that evaluates has made
        return torch.tensor(scaled, dtype=dtype, device=device).view(1, -1, 1, 1)
