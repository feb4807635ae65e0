"""`ImageDecoder`: files of images become arrays, by the fastest library that is installed. Runs in the worker.

simplejpeg and Pillow have the same libjpeg-turbo in them, and give the same pixels. simplejpeg takes two thirds of the
time, because it decodes straight into the array. It gets only what both read alike: JPEGs in RGB, YCbCr or grey that
are intact. Pillow gets all else, so which library is there changes no pixel and no error.

torch resizes `uint8` in a quarter of Pillow's time. An array that is collated later is copied once more, into the
memory that its batch is sent in: 14 us of 1,200 for 256 by 256 pixels. Decoding straight into it would save less.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from swift_loader.checks import check_flag, check_integer

try:
    from PIL import Image, UnidentifiedImageError
except ImportError as error:
    raise ImportError("swift_loader.vision.ImageDecoder needs Pillow: pip install pillow", name="PIL") from error
try:
    import simplejpeg
except ImportError:
    simplejpeg = None

ImageSource = str | PathLike[str] | bytes | bytearray | memoryview
"""The path of a file, or a file's content."""

_JPEG = b"\xff\xd8\xff"
_DIVISORS = (8, 4, 2)
"""Pillow has no others. libjpeg-turbo's 6/8 would change pixels by 4 on average, where these change them by 0.7."""


@dataclass(frozen=True)
class ImageDecoder:
    """Decodes files of images to arrays `(height, width, 3) uint8` in RGB. It can be pickled.

        dataset = ImageFolder("photos", loader=ImageDecoder().image, transform=...)  # torchvision's
        pixels = ImageDecoder(size=256)("cat.jpg")

    Without `size`, the pixels are those of Pillow's `Image.open(path).convert("RGB")`. So nothing rotates a photo by
    its EXIF orientation, and transparency is dropped.
    """

    size: int | tuple[int, int] | None = None
    """`(height, width)` to resize to; or the length of the shorter side, as of torchvision's `Resize`. None: as in the
    file. Resizing is torch's, with antialiasing. Its pixels differ from Pillow's by at most 1 of 255, bicubic by 2."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How to resize."""
    dct_scaling: bool = False
    """True decodes a JPEG at 1/2, 1/4 or 1/8 of its size if that isn't smaller than `size`, and then resizes. It is
    faster for large photos, and the image is sharper: pixels differ by 1 to 5 of 255 on average."""
    library: Literal["simplejpeg", "pillow"] | None = None
    """What decodes JPEGs. None becomes `"simplejpeg"` if it is installed, else `"pillow"`."""

    def __post_init__(self) -> None:
        sides = self.size if isinstance(self.size, tuple) else () if self.size is None else (self.size,)
        if isinstance(self.size, tuple) and len(sides) != 2:  # noqa: PLR2004 - height and width
            raise ValueError(f"size={self.size} must be (height, width), the length of the shorter side, or None")
        for side in sides:
            check_integer("size", side, 1)
        check_flag("dct_scaling", self.dct_scaling)
        for name, allowed in (("interpolation", ("bilinear", "bicubic")), ("library", (None, "simplejpeg", "pillow"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; it must be one of {allowed}")
        if self.library == "simplejpeg" and simplejpeg is None:
            raise ImportError("library='simplejpeg' isn't installed: pip install simplejpeg", name="simplejpeg")
        if self.library is None:
            object.__setattr__(self, "library", "pillow" if simplejpeg is None else "simplejpeg")

    def __call__(self, source: ImageSource) -> NDArray[np.uint8]:
        """Return the image as an array `(height, width, 3)`, C-contiguous and writable.

        Args:
            source: The path of a file, or a file's content: any object with the buffer protocol.

        Raises:
            OSError: The file can't be read.
            ValueError: It is truncated, damaged or no image; the cause is Pillow's exception.
        """
        path = Path(source) if isinstance(source, (str, PathLike)) else None
        data: Any = source if path is None else path.read_bytes()
        try:
            pixels, height, width = self._decode_jpeg(data) or self._decode(data)
        except MemoryError:
            raise
        except Exception as error:
            name = f"an image of {memoryview(data).nbytes} bytes" if path is None else f"{path}"
            reason = "it has no format that Pillow knows" if isinstance(error, UnidentifiedImageError) else f"{error}"
            raise ValueError(f"{name} can't be decoded: {reason}; replace the file, or leave it out") from error
        if (target := self._target(height, width)) == pixels.shape[:2]:
            return pixels
        # With these strides, torch knows that the channels are last, and leaves them there.
        image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
        resized = torch.nn.functional.interpolate(image, target, mode=self.interpolation, antialias=True)
        return resized[0].permute(1, 2, 0).contiguous().numpy()

    def image(self, source: ImageSource) -> Image.Image:
        """Return the image as Pillow's, for transforms of such images. Arguments and errors are those of a call."""
        return Image.fromarray(self(source))

    def _decode_jpeg(self, data: Any) -> tuple[NDArray[np.uint8], int, int] | None:
        """Return what `_decode` does, by simplejpeg; None: that is for Pillow."""
        if self.library != "simplejpeg" or simplejpeg is None or bytes(memoryview(data)[:3]) != _JPEG:
            return None
        try:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
            if colorspace not in {"RGB", "YCbCr", "Gray"} or height * width > (Image.MAX_IMAGE_PIXELS or np.inf):
                return None
            divisor = self._divisor(height, width)
            # The smallest scale that gives this size is 1 / divisor.
            least = {"min_height": -(-height // divisor), "min_width": -(-width // divisor)} if divisor > 1 else {}
            return simplejpeg.decode_jpeg(data, **least), height, width
        except ValueError:  # Pillow knows whether it is damaged beyond use
            return None

    def _decode(self, data: Any) -> tuple[NDArray[np.uint8], int, int]:
        """Return the pixels of an image that may be smaller than in the file, and its height and width in the file."""
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            divisor = self._divisor(height, width)
            if divisor > 1:
                image.draft(None, (width // divisor, height // divisor))  # only JPEGs can
            return np.array(image if image.mode == "RGB" else image.convert("RGB")), height, width

    def _target(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of the decoded image, for one that has these in its file."""
        if self.size is None:
            return height, width
        if isinstance(self.size, tuple):
            return self.size
        shorter = min(height, width)
        return int(self.size * height / shorter), int(self.size * width / shorter)

    def _divisor(self, height: int, width: int) -> int:
        """Return the divisor of the smallest scale at which an image isn't smaller than wanted."""
        if self.size is None or not self.dct_scaling or max(height, width) < 8:  # noqa: PLR2004 - smaller than a block
            return 1
        least_height, least_width = self._target(height, width)
        fits = (one for one in _DIVISORS if height // one >= least_height and width // one >= least_width)
        return next(fits, 1)
