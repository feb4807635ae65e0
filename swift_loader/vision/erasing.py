"""Random erasing of images that are already on the device. Runs in the loop's thread, in `to_device`.

The algorithm is from Zhong, Zheng, Kang, Li and Yang, "Random Erasing Data Augmentation", arXiv:1708.04896, section
3.2. It has timm's options, too: rectangles filled per channel or per pixel, several rectangles per image, a part of the
batch left out. All random numbers depend on one key. They are drawn in timm's order, so a key erases the same as timm
does after `random.seed(key)` and `torch.manual_seed(key)`. The global generators aren't touched.
"""

from __future__ import annotations

import math
import random
from dataclasses import InitVar, dataclass
from typing import Any

import torch

from swift_loader.device.keys import batch_key

__all__ = ["RandomErasing"]

MODES = ("const", "rand", "pixel")

_MAX_ATTEMPTS = 10
"""Attempts to draw a rectangle that fits into the image. The paper tries for ever, timm ten times."""

Rectangle = tuple[slice, slice]
"""Rows and columns of an image."""


@dataclass(frozen=True)
class RandomErasing:
    """Overwrites random rectangles of normalised images, in place: `erase(images)` or `erase(images, key)`."""

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
    mode: str = "const"
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
        object.__setattr__(self, "mode", (self.mode or "const").lower())
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is unknown; it must be one of {', '.join(map(repr, MODES))}")
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability={self.probability} isn't a probability; it must be between 0 and 1")
        if not 0 < self.min_area <= self.max_area:
            raise ValueError(
                f"min_area={self.min_area} and max_area={self.max_area} aren't a range of areas; pass positive "
                f"fractions of an image's area, with min_area <= max_area"
            )
        if not 0 < self.min_aspect <= self._max_aspect:
            raise ValueError(
                f"min_aspect={self.min_aspect} and max_aspect={self._max_aspect} aren't a range of aspect ratios; pass "
                f"positive numbers, with min_aspect <= max_aspect"
            )
        if not 1 <= self.min_count <= self._max_count:
            raise ValueError(
                f"min_count={self.min_count} and max_count={self._max_count} aren't a range of counts; pass integers "
                f"of at least 1, with min_count <= max_count"
            )

    def __call__(self, images: torch.Tensor, key: int | None = None) -> torch.Tensor:
        """Erase rectangles of some images in place, and return all images.

        Args:
            images: `(B, C, H, W)`, or one image `(C, H, W)`; of any floating-point dtype, on any device.
            key: A 64-bit integer that all random numbers depend on; None: `batch_key()`, of the batch being moved.

        Raises:
            ValueError: The images have another shape.
            TypeError: The images don't have a floating-point dtype.
        """
        if images.dim() not in (3, 4):
            raise ValueError(f"images have the shape {tuple(images.shape)}; it must be (B, C, H, W) or (C, H, W)")
        if not images.is_floating_point():
            raise TypeError(f"images are {images.dtype}; they must be floating-point: normalise them before erasing")
        key = batch_key() if key is None else key
        rng = random.Random(key)  # noqa: S311 - an augmentation
        noise = None if self.mode == "const" else torch.Generator(images.device).manual_seed(key)
        if images.dim() == 3:  # noqa: PLR2004 - (C, H, W)
            self._erase(images, rng, noise)
            return images
        num_spared = len(images) // self.num_splits if self.num_splits > 1 else 0
        for index in range(num_spared, len(images)):
            self._erase(images[index], rng, noise)
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
        count = self.min_count
        if self._max_count > count:
            count = rng.randint(count, self._max_count)
        for _ in range(count):
            rectangle = self._draw_rectangle(image.shape[1], image.shape[2], count, rng)
            if rectangle is not None:
                self._fill(image[:, rectangle[0], rectangle[1]], noise)

    def _draw_rectangle(self, height: int, width: int, count: int, rng: random.Random) -> Rectangle | None:
        """Return one of `count` rectangles. Both sides are shorter than the image's; None if no attempt gave that."""
        log_aspects = math.log(self.min_aspect), math.log(self._max_aspect)
        for _ in range(_MAX_ATTEMPTS):
            area = rng.uniform(self.min_area, self.max_area) * (height * width) / count
            aspect = math.exp(rng.uniform(*log_aspects))
            num_rows, num_columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if num_rows < height and num_columns < width:
                top, left = rng.randint(0, height - num_rows), rng.randint(0, width - num_columns)
                return slice(top, top + num_rows), slice(left, left + num_columns)
        return None

    def _fill(self, patch: torch.Tensor, noise: torch.Generator | None) -> None:
        """Overwrite a part of an image, `(C, h, w)`."""
        if noise is None:
            patch.zero_()
            return
        # Drawn into separate memory: the patch isn't contiguous, and torch would fill it in another order.
        shape = patch.shape if self.mode == "pixel" else (len(patch), 1, 1)
        patch.copy_(torch.empty(shape, dtype=patch.dtype, device=patch.device).normal_(generator=noise))
