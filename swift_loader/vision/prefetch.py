"""Delivers batches of images on the device, ready for a model, from any loader. Runs in the loop's thread.

`PrefetchLoader` is a DevicePrefetcher: it takes the next batch from the loader before it hands out the current one.
`ImageStage` moves a batch as bytes, which are a quarter of the size of floats, and prepares it on the device, on the
stream of the copies. It never writes to the batch on the host, which may be a view of shared memory.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch

from swift_loader.device.move import to_device
from swift_loader.device.prefetch import DevicePrefetcher, batch_key
from swift_loader.errors import warn
from swift_loader.report.report import Report

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of red, green and blue in ImageNet's training images, for pixels from 0 to 1; as in torchvision and timm."""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of the same."""

_ERASING_MODES = ("const", "rand", "pixel")

_MAX_ATTEMPTS = 10
"""Attempts to draw a rectangle that fits into the image. The paper tries for ever, timm ten times."""

PerChannel = float | Sequence[float]


@dataclass(frozen=True)
class RandomErasing:
    """Overwrites random rectangles of normalised images, in place: `erase(images)` or `erase(images, key)`.

    The algorithm is from Zhong, Zheng, Kang, Li and Yang, "Random Erasing Data Augmentation", arXiv:1708.04896, section
    3.2, with timm's options. All random numbers depend on one key. They are drawn in timm's order, so a key erases the
    same as timm does after `random.seed(key)` and `torch.manual_seed(key)`. The global generators aren't touched.
    """

    probability: float = 0.5
    """Probability that an image is erased from, 0 to 1."""
    min_area: float = 0.02
    """Minimum area of all rectangles of an image together, as a fraction of the image's area."""
    max_area: float = 1 / 3
    """Maximum area of all rectangles of an image together, as a fraction of the image's area."""
    min_aspect: float = 0.3
    """Minimum of a rectangle's height divided by its width."""
    max_aspect: float | None = None
    """Maximum of a rectangle's height divided by its width; None: `1 / min_aspect`."""
    mode: Literal["const", "rand", "pixel"] = "const"
    """Content of the rectangles: zeros (`"const"`), one normal random number per channel (`"rand"`), or one per channel
    and pixel (`"pixel"`)."""
    min_count: int = 1
    """Minimum number of rectangles per erased image."""
    max_count: int | None = None
    """Maximum number of rectangles per erased image; None: `min_count`."""
    num_splits: int = 0
    """If 2 or more: don't erase from the first of this many equal parts of a batch."""
    device: InitVar[Any] = None
    """Accepted because timm has it, without effect: images are erased on their own device."""

    def __post_init__(self, device: Any) -> None:
        mode: str = self.mode
        object.__setattr__(self, "mode", (mode or "const").lower())  # as timm
        if self.mode not in _ERASING_MODES:
            raise ValueError(f"mode={self.mode!r} is unknown; it must be one of {', '.join(map(repr, _ERASING_MODES))}")
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability={self.probability} isn't a probability; it must be between 0 and 1")
        ranges = {
            "area": ("areas, as fractions of an image's area", self.min_area, self.max_area),
            "aspect": ("aspect ratios", self.min_aspect, self._max_aspect),
            "count": ("counts", self.min_count, self._max_count),
        }
        for name, (what, least, most) in ranges.items():
            if not 0 < least <= most:
                raise ValueError(
                    f"min_{name}={least} and max_{name}={most} aren't a range of {what}; pass positive numbers, with "
                    f"min_{name} <= max_{name}"
                )

    def __call__(self, images: torch.Tensor, key: int | None = None) -> torch.Tensor:
        """Erase rectangles of some images in place, and return all images.

        Args:
            images: `(B, C, H, W)`, or one image `(C, H, W)`; of any floating-point dtype, on any device.
            key: A 64-bit integer that all random numbers depend on; None: `batch_key()`, of the batch being moved.
        """
        if images.dim() not in (3, 4):
            raise ValueError(f"images have the shape {tuple(images.shape)}; it must be (B, C, H, W) or (C, H, W)")
        if not images.is_floating_point():
            raise TypeError(f"images are {images.dtype}; they must be floating-point: normalise them before erasing")
        key = batch_key() if key is None else key
        rng = random.Random(key)  # noqa: S311 - an augmentation
        noise = None if self.mode == "const" else torch.Generator(images.device).manual_seed(key)
        batch = images.unsqueeze(0) if images.dim() == 3 else images  # noqa: PLR2004 - (C, H, W)
        num_spared = len(batch) // self.num_splits if self.num_splits > 1 and batch is images else 0
        for image in batch[num_spared:]:
            self._erase(image, rng, noise)
        return images

    @property
    def _max_aspect(self) -> float:
        return self.max_aspect or 1 / self.min_aspect

    @property
    def _max_count(self) -> int:
        return self.max_count or self.min_count

    def _erase(self, image: torch.Tensor, rng: random.Random, noise: torch.Generator | None) -> None:
        """Erase from one image, with the given probability."""
        if rng.random() > self.probability:
            return
        count = rng.randint(self.min_count, self._max_count) if self._max_count > self.min_count else self.min_count
        height, width = image.shape[1:]
        log_aspects = math.log(self.min_aspect), math.log(self._max_aspect)
        for _ in range(count):
            for _attempt in range(_MAX_ATTEMPTS):
                area = rng.uniform(self.min_area, self.max_area) * (height * width) / count
                aspect = math.exp(rng.uniform(*log_aspects))
                num_rows, num_columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
                if num_rows < height and num_columns < width:
                    top, left = rng.randint(0, height - num_rows), rng.randint(0, width - num_columns)
                    self._fill(image[:, top : top + num_rows, left : left + num_columns], noise)
                    break

    def _fill(self, patch: torch.Tensor, noise: torch.Generator | None) -> None:
        """Overwrite a part of an image, `(C, h, w)`."""
        if noise is None:
            patch.zero_()
            return
        # Drawn into separate memory: the patch isn't contiguous, and torch would fill it in another order.
        shape = patch.shape if self.mode == "pixel" else (len(patch), 1, 1)
        patch.copy_(torch.empty(shape, dtype=patch.dtype, device=patch.device).normal_(generator=noise))


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
        """
        if not isinstance(batch, (tuple, list)) or not batch:
            raise TypeError(
                f"the batch is a {type(batch).__name__}; it must be (images, targets), or longer; return that from the "
                f"collate_fn, or pass your own to_device"
            )
        images, *others = to_device(list(batch), device)
        if not isinstance(images, torch.Tensor):
            raise TypeError(f"the batch's images are a {type(images).__name__}; they must be an array or a tensor")
        if images.dim() != 4:  # noqa: PLR2004 - (B, C, H, W)
            raise ValueError(f"the batch's images have the shape {tuple(images.shape)}; it must be (B, C, H, W)")
        if images.shape[1] != self.channels:
            raise ValueError(
                f"the batch's images have {images.shape[1]} channels, but channels={self.channels}; pass channels, "
                f"mean and std for such images, or convert the images in the dataset"
            )
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)  # faster as bytes; later steps keep it
        mean, std = (_constant(values, self.img_dtype, images.device) for values in (self.mean, self.std))
        is_new = images.dtype != self.img_dtype  # else the memory may be the host's
        normalized = (images.to(self.img_dtype).sub_(mean) if is_new else images.sub(mean)).div_(std)
        if self.erasing is not None:
            normalized = self.erasing(normalized)
        return normalized, *others


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
    scaled = [value * 255 for value in values]
    with torch.inference_mode(mode=False):  # else a training loop couldn't use a tensor cached by an evaluating one
        return torch.tensor(scaled, dtype=dtype, device=device).view(1, -1, 1, 1)


class PrefetchLoader(DevicePrefetcher):
    """Yields `(images, targets)` on the device. Images are `(B, C, H, W)`, normalised and, if asked for, erased.

    It has the interface of timm's PrefetchLoader. `len`, `set_epoch`, `state_dict` and `load_state_dict` are the
    loader's, and count the batches that the loop has got, not those prefetched.
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
        re_mode: Literal["const", "rand", "pixel"] = "const",
        re_count: int = 1,
        re_num_splits: int = 0,
        channels_last: bool = False,
    ) -> None:
        """Configure the stage. Starts nothing, and takes nothing from the loader yet.

        Args:
            loader: Any iterable of `(images, targets)`.
            mean: Mean of pixels from 0 to 1: one number per channel, or one for all.
            std: Standard deviation of the same.
            channels: Number of channels of the images.
            device: Where batches go. The default is the current accelerator, else the CPU. Without CUDA, the CPU
                replaces a CUDA device, with a warning.
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
        erasing = RandomErasing(re_prob, mode=re_mode, max_count=re_count, num_splits=re_num_splits)
        self.stage = ImageStage(
            mean,
            std,
            channels,
            torch.float16 if fp16 else img_dtype,
            channels_last=channels_last,
            erasing=erasing if re_prob else None,
        )
        if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
            warn(f"device={device!r}, but torch finds no CUDA device: images stay on the CPU; pass device='cpu'")
            device = "cpu"
        super().__init__(loader, device, self.stage)

    loader = property(attrgetter("_source"), doc="The loader.")

    def close(self) -> None:
        """Drop the batches that were moved ahead, and close the loader if it has a `close`. Idempotent.

        Batches that the user keeps stay valid.
        """
        super().close()
        getattr(self.loader, "close", lambda: None)()

    @property
    def mixup_enabled(self) -> bool:
        """Whether the collate function mixes samples, as timm's `FastCollateMixup` does; False if it can't.

        Set it between passes. A DataLoader gets new workers at the next pass, also with `persistent_workers`. The
        workers of a SwiftLoader don't see it, so that is a TypeError.
        """
        return bool(getattr(self.collate_fn, "mixup_enabled", False))

    @mixup_enabled.setter
    def mixup_enabled(self, enabled: bool) -> None:
        if bool(enabled) is self.mixup_enabled:
            return
        if not hasattr(self.collate_fn, "mixup_enabled"):
            warn("mixup_enabled = True has no effect: the collate_fn can't mix; pass timm's FastCollateMixup")
        elif hasattr(self.loader, "with_collate_fn"):
            raise TypeError(
                f"mixup_enabled can't be set for a {type(self.loader).__name__}, whose workers keep their collate_fn; "
                f"use a DataLoader, or put a new PrefetchLoader around loader.with_collate_fn(...)"
            )
        else:
            self.collate_fn.mixup_enabled = enabled
            if getattr(self.loader, "_iterator", None) is not None:
                self.loader._iterator = None  # noqa: SLF001 - as programs do it with torch's

    @property
    def collate_fn(self) -> Any:
        """The loader's collate function; None if it has none."""
        return getattr(self.loader, "collate_fn", None)

    def report(self) -> Report:
        """Return what was measured of the loader so far, see `SwiftLoader.report`; empty for torch's DataLoader."""
        report: Report = getattr(self.loader, "report", Report)()
        return report

    def __repr__(self) -> str:
        return f"<PrefetchLoader to {self.device} as {self.stage.img_dtype} of {self.loader!r}>"
