"""Datasets by name, as functions of their length."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)


class Point(NamedTuple):
    x: torch.Tensor
    y: float


Untyped = namedtuple("Untyped", ["first", "second"])  # default_collate rebuilds both kinds


class Record:
    """A sample that torch's collate functions refuse."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Record({self.number})"


class Broken(Exception):
    """Can't be built from its text alone."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{text}, number {number}")


class Samples(Dataset[Any]):
    """Sample i is what a function returns for i."""

    def __init__(self, num_samples: int, sample: Callable[[int], Any]) -> None:
        self.num_samples, self.sample = num_samples, sample

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"no sample {index}")
        return self.sample(int(index))


class Unmeasured(Dataset[int]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __getitem__(self, index: int) -> int:
        return index % max(self.num_samples, 1)


class Whole(Samples):
    """Fetches a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Slices(Samples):
    """Takes any key: a number, or a list of numbers as a sample of its own."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index) * 10


class Numbers(Dataset[Any]):
    """Is measured once only, and yields what it knows about its worker."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, bool]:
        info = get_worker_info()
        return index, info is None or info.dataset is self


def broken_value(index: int) -> int:
    if index == 3:
        raise ValueError("sample 3 is broken")
    return index


def broken_own(index: int) -> int:
    if index % 5 == 4:
        raise Broken(index, "sample is broken")
    return index


def broken_stop(index: int) -> int:
    if index == 4:
        raise StopIteration("sample 4 stops")
    return index


SAMPLES: Mapping[str, Callable[[int], Any]] = {
    "tensor": lambda index: torch.full((2,), index, dtype=torch.float64),
    "array": lambda index: np.full((2, 2), index, np.float32),
    "strided": lambda index: torch.arange(index, index + 6).reshape(2, 3).T,
    "int": int,
    "floating": lambda index: index / 4,
    "text": lambda index: "s" * index,
    "is_odd": lambda index: index % 2 == 1,
    "nothing": lambda index: None,
    "mapping": lambda index: {
        "a": torch.tensor(index),
        "b": [index, str(index)],
        "c": {"d": np.float64(index), "e": (index,)},
    },
    "pair": lambda index: (torch.arange(3) + index, index),
    "listed": lambda index: [index, index / 2],
    "point": lambda index: Point(torch.tensor([index]), index / 2),
    "untyped": lambda index: Untyped(index, str(index)),
    "scalar": np.int16,
    "raw": lambda index: bytes([index]),
    "record": Record,
    "ragged": lambda index: torch.zeros(1 + index % 2),
    "uneven": lambda index: [index] * (1 + index % 3),
    "differing": lambda index: {"a": 1} if index % 4 else {"b": 1},
    "mixed": lambda index: index if index % 2 else float(index),
    "broken_value": broken_value,
    "broken_key": lambda index: index if index != 2 else {"a": 1}["no such\nkey"],
    "broken_own": broken_own,
    "broken_stop": broken_stop,
    "drawn": lambda index: (index, random.random(), np.random.random(), torch.rand(2)),
}


def samples(name: str, dataset_class: Any = Samples) -> Callable[[int], Any]:
    """Return what makes datasets of samples of a kind, given their length."""
    return lambda num_samples: dataset_class(num_samples, SAMPLES[name])


def _concatenated(num_samples: int) -> Any:
    make = samples("tensor")
    return ConcatDataset([make(num_samples // 2), make(num_samples - num_samples // 2)])


def _fields(num_samples: int) -> Any:
    return TensorDataset(torch.arange(num_samples), torch.arange(2.0 * num_samples).reshape(num_samples, 2))


MAPS: Mapping[str, Callable[[int], Any]] = {
    **{name: samples(name) for name in SAMPLES},
    "fields": _fields,
    "subset": lambda num_samples: Subset(samples("tensor")(num_samples + 3), list(range(num_samples + 2, 2, -1))),
    "subset of whole": lambda num_samples: Subset(samples("pair", Whole)(num_samples), range(num_samples)),
    "concatenated": _concatenated,
    "stacked": lambda num_samples: StackDataset(a=samples("tensor")(num_samples), b=samples("text")(num_samples)),
    "whole": samples("pair", Whole),
    "slices": samples("int", Slices),
    "unmeasured": Unmeasured,
    "worker's": Numbers,
    "list": lambda num_samples: [10 * index for index in range(num_samples)],
    "dictionary": lambda num_samples: {index: str(index) for index in range(num_samples)},
    "letters": lambda num_samples: {chr(97 + index): index for index in range(num_samples)},
}


class Stream(IterableDataset[Any]):
    """Yields what a function returns for 0, 1, 2, ..., in each worker."""

    def __init__(self, num_samples: int, sample: Callable[[int], Any] = int) -> None:
        self.num_samples, self.sample = num_samples, sample

    def __iter__(self) -> Iterator[Any]:
        return map(self.sample, range(self.num_samples))


class Sharded(Stream):
    """Each worker yields its share, with what it knows of itself."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.num_samples, step):
            seed = None if info is None else info.seed
            yield {"index": index, "first": first, "step": step, "seed": str(seed)}


class Unequal(Stream):
    """The first worker has nearly all; the last one has none."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None or info.id == 0:
            yield from range(self.num_samples)
        elif info.id < info.num_workers - 1:
            yield 1000


class Measured(Stream):
    """Has a length, and the right one without workers."""

    def __len__(self) -> int:
        return self.num_samples


class TooLong(Stream):
    def __len__(self) -> int:
        return self.num_samples // 2


class Single(Stream):
    """Is its own iterator, and continues where it stopped."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> int:
        self.position += 1
        if self.position > self.num_samples:
            self.position = 0
            raise StopIteration
        return self.position


class Refusing(Stream):
    def __iter__(self) -> Iterator[Any]:
        raise ValueError("sample stream is closed")


class Generated(Stream):
    """A generator, which is over after its error."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.num_samples):
            yield self.sample(index)


STREAMS: Mapping[str, Callable[[int], Any]] = {
    "plain": Stream,
    "tensors": samples("tensor", Stream),
    "mappings": samples("mapping", Stream),
    "texts": samples("text", Stream),
    "records": samples("record", Stream),
    "ragged": samples("ragged", Stream),
    "sharded": Sharded,
    "unequal": Unequal,
    "measured": Measured,
    "too long": TooLong,
    "single": Single,
    "refusing": Refusing,
    "broken": samples("broken_value", Stream),
    "broken generator": samples("broken_own", Generated),
    "drawn": samples("drawn", Stream),
    "chain": lambda num_samples: ChainDataset([Stream(num_samples), Stream(2)]),
}
