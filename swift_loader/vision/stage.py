"""Moves a batch of images to the device as bytes, and converts, normalises and erases it there.

Bytes are a quarter of the size of floats. Runs in the loop's thread, in `to_device`, on the stream of the copies. It
never writes to the batch on the host, which may be a view of shared memory.
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
"""Mean of red, green and blue in ImageNet's training images, for pixels from 0 to 1; as in torchvision and timm."""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of the same."""

_MAX_BYTE = 255

PerChannel = float | Sequence[float]


@dataclass(frozen=True)
class ImageStage:
    """Moves `(images, targets, ...)` to a device, and prepares the images there for a model.

    Pass it as `to_device=` to `SwiftLoader.start` or `DevicePrefetcher`. It can be pickled, and shared by loaders.
    """

    mean: PerChannel = IMAGENET_MEAN
    """Mean of pixels from 0 to 1: one number per channel, or one for all. With another count of numbers, their average
    is used for all channels, with a warning, as in timm."""
    std: PerChannel = IMAGENET_STD
    """Standard deviation of pixels from 0 to 1, in the same form as `mean`."""
    channels: int = 3
    """Number of channels of the images."""
    img_dtype: torch.dtype | None = None
    """dtype of the delivered images, and of all computation; None: float32."""
    channels_last: bool = False
    """Whether delivered images have torch's channels_last memory format, which convolutions on GPUs prefer."""
    erasing: RandomErasing | None = None
    """Random erasing, keyed by batch; None: no erasing."""

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise ValueError(f"channels={self.channels} is too small; it must be at least 1")
        dtype = torch.float32 if self.img_dtype is None else self.img_dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"img_dtype={dtype!r} isn't a floating-point dtype; pass one, such as torch.bfloat16")
        object.__setattr__(self, "img_dtype", dtype)
        for name in ("mean", "std"):
            object.__setattr__(self, name, _per_channel(name, getattr(self, name), self.channels))
        if isinstance(self.std, tuple) and min(self.std) <= 0:
            raise ValueError(f"std={self.std} has values that aren't positive; pass positive ones to divide images by")

    def __call__(self, batch: Any, device: torch.device | str | int) -> tuple[Any, ...]:
        """Return the batch on the device, always as a tuple.

        Args:
            batch: A tuple or list `(images, targets, ...)`; everything in it is moved. Images are `(B, C, H, W)`, with
                pixels from 0 to 255, as uint8 or any other numbers.
            device: Where the batch goes.

        Raises:
            TypeError: The batch isn't a tuple or list, or its images aren't an array or a tensor.
            ValueError: The images have another shape, or another number of channels.
        """
        if not isinstance(batch, (tuple, list)) or not batch:
            raise TypeError(
                f"the batch is a {type(batch).__name__}; it must be (images, targets), or longer; return that from the "
                f"collate_fn, as fast_collate does, or pass your own to_device"
            )
        images, *others = to_device(list(batch), device)
        self._check(images)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)  # faster as bytes; later steps keep it
        normalized = self._normalize(images)
        if self.erasing is not None:
            normalized = self.erasing(normalized)
        return normalized, *others

    def _normalize(self, images: torch.Tensor) -> torch.Tensor:
        """Return `(images / 255 - mean) / std`, in new memory."""
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
                f"the batch's images have {images.shape[1]} channels, but channels={self.channels}; pass channels, "
                f"mean and std for such images, or convert the images in the dataset"
            )


def _per_channel(name: str, values: Any, channels: int) -> tuple[float, ...]:
    """Return one number for each channel."""
    numbers = np.asarray(values)
    if numbers.dtype.kind not in "iuf" or numbers.ndim > 1 or not numbers.size or not np.isfinite(numbers).all():
        raise ValueError(f"{name}={values!r} can't normalise images; pass one finite number per channel, or only one")
    if numbers.size in (1, channels):
        return tuple(float(number) for number in np.broadcast_to(numbers, channels))
    average = float(np.mean(numbers))
    warn(
        f"{name} has {numbers.size} values for {channels} channels: their average, {average:g}, is used for all; pass "
        f"one value per channel, or a single one"
    )
    return (average,) * channels


@functools.lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return values for pixels from 0 to 1, scaled for pixels from 0 to 255, as `(1, C, 1, 1)`. Cached per device."""
    scaled = [value * _MAX_BYTE for value in values]
    assert all(map(math.isfinite, scaled))
    with torch.inference_mode(mode=False):  # else a training loop couldn't use a tensor cached by an evaluating one
        return torch.tensor(scaled, dtype=dtype, device=device).view(1, -1, 1, 1)
