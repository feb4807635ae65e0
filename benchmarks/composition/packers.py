"""Ways to make batches of samples of different lengths. Each goes through all samples once.

It yields the batches' shapes, and then None, while its processes still live. A padded batch is as long as its longest
sample. A packed one is a row of `max_tokens` tokens, in which samples stand one after another: all have one shape.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from swift_loader import DataLoader, PackCollate, PackedDataset, TokenBudgetBatchSampler

Lengths = NDArray[np.int64]
NUM_WORKERS = 2
SEED = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """One batch: what the model computes, and the lengths of the samples in it. A piece of a cut sample is one."""

    rows: int
    columns: int
    lengths: list[int]


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Samples of these lengths, whose tokens are ones."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._tokens = torch.ones(int(lengths.max(initial=0)), dtype=torch.int32)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[: self._lengths[index]].clone()}


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate to one padded batch."""
    ids = [sample["input_ids"] for sample in samples]
    return {"input_ids": pad_sequence(ids, batch_first=True), "lengths": torch.tensor([len(one) for one in ids])}


def _shapes(loader: Iterable[dict[str, torch.Tensor]]) -> Iterator[Shape | None]:
    for batch in loader:
        if "cu_seqlens" in batch:  # padding is a document at the end, of zeros
            lengths = batch["cu_seqlens"].diff()[: len(batch["cu_seqlens"]) - 1 - (int(batch["input_ids"][-1]) == 0)]
            yield Shape(1, len(batch["input_ids"]), lengths.tolist())
        else:
            rows, columns = batch["input_ids"].shape
            yield Shape(rows, columns, batch["lengths"].tolist())
    yield None


def fixed(lengths: Lengths, max_tokens: int) -> Iterator[Shape | None]:
    """Shuffled batches of as many samples as fit on average. Some are beyond the budget."""
    torch.manual_seed(SEED)
    size = max(1, round(max_tokens / lengths.mean()))
    yield from _shapes(make_loader(Samples(lengths), batch_size=size, shuffle=True, collate_fn=pad))


def budget(lengths: Lengths, max_tokens: int, **options: Any) -> Iterator[Shape | None]:
    """Batches of swift_loader's TokenBudgetBatchSampler."""
    sampler = TokenBudgetBatchSampler(lengths, max_tokens, seed=SEED, num_replicas=1, rank=0, **options)
    collate = pad if options.get("padded", True) else PackCollate(pad_to=max_tokens)
    yield from _shapes(make_loader(Samples(lengths), batch_sampler=sampler, collate_fn=collate))


def cut(lengths: Lengths, max_tokens: int) -> Iterator[Shape | None]:
    """Windows of swift_loader's PackedDataset, which cuts samples."""
    windows = PackedDataset(Samples(lengths), lengths, max_tokens, drop_last=False, seed=SEED)
    yield from _shapes(make_loader(windows, batch_size=None, shuffle=True))


def make_loader(dataset: Any, **options: Any) -> DataLoader[dict[str, torch.Tensor]]:
    """Return swift_loader's. Its workers stay after the pass, so that their CPU time can be read."""
    return DataLoader(dataset, num_workers=NUM_WORKERS, persistent_workers=True, **options)


def odb(lengths: Lengths, max_tokens: int, buffer_size: int) -> Iterator[Shape | None]:
    """Batches of online-dynamic-batching, by its own loader. It groups `buffer_size` samples at a time."""
    from odb import ODBDataLoader

    torch.manual_seed(SEED)
    torch.multiprocessing.set_sharing_strategy("file_system")  # else, each sample takes a descriptor
    loader = ODBDataLoader(
        Samples(lengths),
        token_budget=max_tokens,
        shuffle=True,
        num_workers=NUM_WORKERS,
        prefetch_factor=-(-buffer_size // NUM_WORKERS),
        collate_fn=pad,
    )
    yield from _shapes(loader)


def grain(lengths: Lengths, max_tokens: int, packer: str, num_bins: int) -> Iterator[Shape | None]:
    """Rows of one of Grain's packers, in this process."""
    import grain
    from grain import experimental

    source = grain.MapDataset.source(_ArraySource(lengths)).shuffle(seed=SEED)
    parent = source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    struct = {"input_ids": max_tokens}
    if packer == "cut":
        packed = experimental.ConcatThenSplitIterDataset(parent, length_struct=struct)
    else:
        of_name = {"first": experimental.FirstFitPackIterDataset, "best": experimental.BestFitPackIterDataset}
        packed = of_name[packer](parent, length_struct=struct, num_packing_bins=num_bins, seed=SEED)
    for row in packed:
        segments = row["input_ids_segment_ids"]
        yield Shape(1, len(segments), np.bincount(segments)[1:].tolist())
    yield None


class _ArraySource:
    """The samples as Grain takes them."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths, self._tokens = lengths, np.ones(int(lengths.max(initial=0)), np.int32)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int32]]:
        return {"input_ids": self._tokens[: self._lengths[index]]}


Packer = Callable[[Lengths, int], Iterator[Shape | None]]


def packers() -> dict[str, Packer]:
    """Return all whose package is installed, by name."""
    found: dict[str, Packer] = {"fixed size": fixed, "padded": partial(budget, padded=True)}
    found["padded, balance=4"] = partial(budget, balance=4)
    if importlib.util.find_spec("odb"):
        found["ODB, 256 samples"] = partial(odb, buffer_size=256)
        found["ODB, 10,000 samples"] = partial(odb, buffer_size=10_000)
    found["packed, next fit"] = partial(budget, padded=False)
    found["packed, best fit"] = partial(budget, padded=False, fit="best")
    found["packed, cut"] = cut
    if importlib.util.find_spec("grain"):
        found["Grain, first fit, 64 rows"] = partial(grain, packer="first", num_bins=64)
        found["Grain, best fit, 64 rows"] = partial(grain, packer="best", num_bins=64)
        found["Grain, cut"] = partial(grain, packer="cut", num_bins=0)
    return found
