"""Map-style datasets that only need NumPy, so that their workers never import torch.

All samples are in memory, because the benchmarks measure the loader and not the disk. A few distinct samples represent
a long dataset: sample `i` is number `i % num_distinct` of them.
"""

from __future__ import annotations

import io
import random
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

_IMAGE_SHAPE = (3, 224, 224)
_PHOTO_SIZE = (224, 224)
_JPEG_QUALITY = 90
_PHOTOS = ("astronaut", "coffee", "chelsea", "rocket")
"""The photos that are in scikit-image's wheel. Others would be downloaded."""


class Images:
    """Images of shape (3, 224, 224), each in its own array."""

    def __init__(self, length: int, dtype: str = "uint8", num_distinct: int = 64) -> None:
        generator = np.random.default_rng(0)
        self._images = [
            generator.integers(0, 256, _IMAGE_SHAPE, dtype=np.uint8).astype(dtype) for _ in range(num_distinct)
        ]
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self._images[index % len(self._images)]


class Rows:
    """The rows of one `(length, 16) float32` array."""

    def __init__(self, length: int, width: int = 16) -> None:
        self._rows = np.random.default_rng(0).random((length, width), dtype=np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        return self._rows[index]


class DrawingRows(Rows):
    """Rows with random noise, sometimes reversed. They draw from the generators that transforms use."""

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        row = self._rows[index] + np.float32(np.random.standard_normal())
        return row[::-1] if random.random() < 0.5 else row


class DictRows:
    """Dicts of two `(2048,) int64` rows, like tokenised text."""

    def __init__(self, length: int, width: int = 2048, num_distinct: int = 256) -> None:
        generator = np.random.default_rng(0)
        self._ids = generator.integers(0, 50_000, (num_distinct, width), dtype=np.int64)
        self._mask = generator.integers(0, 2, (num_distinct, width), dtype=np.int64)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        row = index % len(self._ids)
        return {"ids": self._ids[row], "mask": self._mask[row]}


class JpegPhotos:
    """JPEG photos in memory. Pillow decodes them to `(224, 224, 3) uint8`."""

    def __init__(self, length: int) -> None:
        self._photos = [_encode(photo) for photo in load_photos()]
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        from PIL import Image

        photo = Image.open(io.BytesIO(self._photos[index % len(self._photos)]))
        return np.array(photo.convert("RGB").resize(_PHOTO_SIZE))


class SlowSamples:
    """Samples that sleep for some seconds, without using the CPU."""

    def __init__(self, length: int, seconds: float) -> None:
        self._length = length
        self._seconds = seconds

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        time.sleep(self._seconds)
        return index


class TimedSamples(SlowSamples):
    """Such samples that tell when they were begun, by `time.monotonic`."""

    def __getitem__(self, index: int) -> float:
        began = time.monotonic()
        super().__getitem__(index)
        return began


class SleepingSamples:
    """Rows of `(1024,) float32` that come after a sleep, as from a disk; some, always the same, sleep far longer."""

    SLOW_FACTOR = 50
    NBYTES = 4096

    def __init__(self, length: int, seconds: float, slow_share: float) -> None:
        self._row = np.zeros(self.NBYTES // 4, np.float32)
        is_slow = np.random.default_rng(0).random(length) < slow_share
        self._seconds = np.where(is_slow, self.SLOW_FACTOR * seconds, seconds).tolist()

    def __len__(self) -> int:
        return len(self._seconds)

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        time.sleep(self._seconds[index])
        return self._row


def load_photos() -> list[NDArray[np.uint8]]:
    from skimage import data
    from sklearn.datasets import load_sample_images

    return [*(getattr(data, name)() for name in _PHOTOS), *load_sample_images().images]


def _encode(photo: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(photo).save(file, "JPEG", quality=_JPEG_QUALITY)
    return file.getvalue()
