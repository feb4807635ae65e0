"""The loaders that benchmarks/dataloader.py compares: the same arguments for torch's class and for ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from common.datasets import DictRows, Images, Rows
from torch.utils.data import IterableDataset, WeightedRandomSampler, get_worker_info

NUM_WORKERS = 2


class Stream(IterableDataset[Any]):
    """The samples of a map-style dataset as a stream. Each worker gives its share."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self._dataset[index] for index in range(first, len(self._dataset), step))


@dataclass(frozen=True, slots=True)
class LoaderCase:
    """A dataset, and how its samples are chosen."""

    name: str
    dataset_class: type[Any]
    kwargs: dict[str, Any]
    batch_size: int
    num_batches: int
    order: str = "shuffle"
    """"shuffle", "sampler" or "stream"."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for both classes."""
        length = self.batch_size * self.num_batches
        dataset = self.dataset_class(length, **self.kwargs)
        arguments: dict[str, Any] = {"dataset": dataset, "batch_size": self.batch_size, "num_workers": NUM_WORKERS}
        if self.order == "shuffle":
            return {**arguments, "shuffle": True}
        if self.order == "stream":
            return {**arguments, "dataset": Stream(dataset)}
        weights = torch.rand(length, generator=torch.Generator().manual_seed(1))
        return {**arguments, "sampler": WeightedRandomSampler(weights.tolist(), length)}


CASES = (
    LoaderCase("uint8", Images, {"dtype": "uint8"}, 64, 500),
    LoaderCase("float32", Images, {"dtype": "float32"}, 64, 300),
    LoaderCase("small", Rows, {}, 256, 1000),
    LoaderCase("dict", DictRows, {}, 16, 1000),
    LoaderCase("sampler", Rows, {}, 256, 1000, "sampler"),
    LoaderCase("stream", Rows, {}, 256, 1000, "stream"),
)
