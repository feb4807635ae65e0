"""The datasets and batch sizes of the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common.datasets import DictRows, Images, JpegPhotos, Rows

NUM_WORKERS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """A dataset and its batch size."""

    name: str
    dataset_class: type[Any]
    batch_size: int
    num_batches: int
    """Batches per epoch. There are hundreds, so that the gaps between epochs don't affect the rates."""
    title: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for the dataset, in addition to its length."""
    time_factor: float = 1.0
    """Factor for the measuring time. Larger for a case with few batches per second."""

    @property
    def dataset_kwargs(self) -> dict[str, Any]:
        """All keyword arguments of the dataset, including its length."""
        return {"length": self.batch_size * self.num_batches, **self.kwargs}

    def make_dataset(self) -> Any:
        """Return a new instance of the dataset."""
        return self.dataset_class(**self.dataset_kwargs)


CASES = (
    Case("jpeg", JpegPhotos, 16, 300, "JPEG photos decoded with Pillow, batch 16", time_factor=4.0),
    Case("uint8", Images, 64, 500, "images (3, 224, 224) uint8, batch 64", {"dtype": "uint8"}),
    Case("float32", Images, 64, 500, "images (3, 224, 224) float32, batch 64", {"dtype": "float32"}),
    Case("small", Rows, 256, 1000, "rows (16,) float32, batch 256"),
    Case("dict", DictRows, 16, 1000, "dicts of two int64[2048], batch 16"),
)

GAP_CASE = Case("gap", Images, 64, 20, "gap between epochs of 20 batches (uint8 images)", {"dtype": "uint8"})
