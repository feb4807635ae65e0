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
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper


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
    """Has no length."""

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


def tensor(index: int) -> torch.Tensor:
    return torch.full((2,), index, dtype=torch.float64)


def array(index: int) -> Any:
    return np.full((2, 2), index, np.float32)


def strided(index: int) -> torch.Tensor:
    return torch.arange(index, index + 6).reshape(2, 3).T


def floating(index: int) -> float:
    return index / 4


def text(index: int) -> str:
    return "s" * index


def is_odd(index: int) -> bool:
    return index % 2 == 1


def nothing(index: int) -> None:
    return None


def mapping(index: int) -> dict[str, Any]:
    return {"a": torch.tensor(index), "b": [index, str(index)], "c": {"d": np.float64(index), "e": (index,)}}


def pair(index: int) -> tuple[torch.Tensor, int]:
    return torch.arange(3) + index, index


def listed(index: int) -> list[float]:
    return [index, index / 2]


def point(index: int) -> Point:
    return Point(torch.tensor([index]), index / 2)


def untyped(index: int) -> Any:
    return Untyped(index, str(index))


def scalar(index: int) -> Any:
    return np.int16(index)


def raw(index: int) -> bytes:
    return bytes([index])


def ragged(index: int) -> torch.Tensor:
    return torch.zeros(1 + index % 2)


def uneven(index: int) -> list[int]:
    return [index] * (1 + index % 3)


def differing(index: int) -> dict[str, int]:
    return {"a": 1} if index % 4 else {"b": 1}


def mixed(index: int) -> Any:
    return index if index % 2 else float(index)


def broken_value(index: int) -> int:
    if index == 3:
        raise ValueError("sample 3 is broken")
    return index


def broken_key(index: int) -> int:
    return index if index != 2 else {0: 1}["no such\nkey"]  # type: ignore[index]


def broken_own(index: int) -> int:
    if index % 5 == 4:
        raise Broken(index, "sample is broken")
    return index


def broken_stop(index: int) -> int:
    if index == 4:
        raise StopIteration("sample 4 stops")
    return index


def drawn(index: int) -> tuple[Any, ...]:
    return index, random.random(), np.random.random(), torch.rand(2)


def _concatenated(num_samples: int) -> Any:
    return ConcatDataset([Samples(num_samples // 2, tensor), Samples(num_samples - num_samples // 2, tensor)])


def _stacked(num_samples: int) -> Any:
    return StackDataset(a=Samples(num_samples, tensor), b=Samples(num_samples, text))


def _fields(num_samples: int) -> Any:
    return TensorDataset(torch.arange(num_samples), torch.arange(2.0 * num_samples).reshape(num_samples, 2))


_FUNCTIONS: tuple[Callable[[int], Any], ...] = (
    tensor,
    array,
    strided,
    int,
    floating,
    text,
    is_odd,
    nothing,
    mapping,
    pair,
    listed,
    point,
    untyped,
    scalar,
    raw,
    Record,
    ragged,
    uneven,
    differing,
    mixed,
    broken_value,
    broken_key,
    broken_own,
    broken_stop,
    drawn,
)


def _samples_of(sample: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda num_samples: Samples(num_samples, sample)


MAPS: Mapping[str, Callable[[int], Any]] = {
    **{function.__name__: _samples_of(function) for function in _FUNCTIONS},
    "fields": _fields,
    "subset": lambda num_samples: Subset(Samples(num_samples + 3, tensor), list(range(num_samples + 2, 2, -1))),
    "subset of whole": lambda num_samples: Subset(Whole(num_samples, pair), range(num_samples)),
    "concatenated": _concatenated,
    "stacked": _stacked,
    "whole": lambda num_samples: Whole(num_samples, pair),
    "slices": lambda num_samples: Slices(num_samples, int),
    "unmeasured": Unmeasured,
    "worker's": Numbers,
    "list": lambda num_samples: [10 * index for index in range(num_samples)],
    "dictionary": lambda num_samples: {index: str(index) for index in range(num_samples)},
    "map pipe": lambda num_samples: SequenceWrapper(range(num_samples)).map(floating),
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
    """Yields more than it says."""

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
    """Can't be iterated."""

    def __iter__(self) -> Iterator[Any]:
        raise ValueError("sample stream is closed")


class Generated(Stream):
    """A generator, which is over after its error."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.num_samples):
            yield self.sample(index)


STREAMS: Mapping[str, Callable[[int], Any]] = {
    "plain": Stream,
    "tensors": lambda num_samples: Stream(num_samples, tensor),
    "mappings": lambda num_samples: Stream(num_samples, mapping),
    "texts": lambda num_samples: Stream(num_samples, text),
    "records": lambda num_samples: Stream(num_samples, Record),
    "ragged": lambda num_samples: Stream(num_samples, ragged),
    "sharded": Sharded,
    "unequal": Unequal,
    "measured": Measured,
    "too long": TooLong,
    "single": Single,
    "refusing": Refusing,
    "broken": lambda num_samples: Stream(num_samples, broken_value),
    "broken generator": lambda num_samples: Generated(num_samples, broken_own),
    "drawn": lambda num_samples: Stream(num_samples, drawn),
    "pipe": lambda num_samples: IterableWrapper(range(num_samples)),
    "shuffled pipe": lambda num_samples: IterableWrapper(range(num_samples)).shuffle(buffer_size=9).sharding_filter(),
    "chain": lambda num_samples: ChainDataset([Stream(num_samples), Stream(2)]),
}
