"""Values for the arguments of a DataLoader, by name.

Each is a function that makes a new value: samplers and generators have states, so the two classes can't share one.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

Generator = torch.Generator | None


class Drawing(Sampler[int]):
    """Draws each index from the global generators when it is asked for it."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.num_samples):
            a, b = random.randrange(self.num_samples), np.random.randint(self.num_samples)
            yield (a + int(b) + int(torch.randint(self.num_samples, ()))) % self.num_samples


class Eager(Drawing):
    """Draws all when its iterator is made."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.num_samples).tolist())

    def __len__(self) -> int:
        return self.num_samples


class Bare:
    """An iterator without `__iter__`."""

    def __init__(self, num_samples: int) -> None:
        self.left = num_samples

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


class Barely:
    """No Sampler; makes iterators without `__iter__`."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Any:
        return Bare(self.num_samples)


class Old:
    """Iterable the old way, by `__getitem__`."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __getitem__(self, position: int) -> int:
        if position >= self.num_samples:
            raise IndexError
        return self.num_samples - 1 - position


class Failing(Sampler[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items) + 1

    def __iter__(self) -> Iterator[Any]:
        yield from self.items
        raise ValueError("the sampler is broken")


class Unusable(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        raise ValueError("the sampler is closed")


class OwnBatches(BatchSampler):
    """Batches in reverse."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield batch[::-1]


class Growing:
    """Batches of 1, 2, 3, ... samples, drawn at once; has no length."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[list[int]]:
        order, size = torch.randperm(self.num_samples).tolist(), 1
        while order:
            yield order[:size]
            order, size = order[size:], size + 1


def _distributed(num_samples: int, *, drop_last: bool) -> Any:
    return DistributedSampler(range(num_samples), 3, 1, seed=5, drop_last=drop_last)  # type: ignore[arg-type]


def _weighted(num_samples: int, generator: Generator, *, replacement: bool) -> Any:
    return WeightedRandomSampler([1.0 + i % 3 for i in range(num_samples)], num_samples, replacement, generator)


def _batches(num_samples: int, *, drop_last: bool) -> list[list[int]]:
    return list(BatchSampler(range(num_samples), 3, drop_last))


Make = Callable[[int, Generator], dict[str, Any]]

ORDERS: Mapping[str, Make] = {
    "default": lambda n, g: {},
    "in order": lambda n, g: {"shuffle": False},
    "shuffled": lambda n, g: {"shuffle": True},
    "random": lambda n, g: {"sampler": RandomSampler(range(n), generator=g)},
    "replaced": lambda n, g: {"sampler": RandomSampler(range(n), replacement=True, num_samples=2 * n + 1)},
    "more": lambda n, g: {"sampler": RandomSampler(range(n), num_samples=2 * n + 2, generator=g)},
    "weighted": lambda n, g: {"sampler": _weighted(n, g, replacement=True)},
    "weighted once": lambda n, g: {"sampler": _weighted(n, g, replacement=False)},
    "subset": lambda n, g: {"sampler": SubsetRandomSampler(range(0, n, 2), g)},
    "distributed": lambda n, g: {"sampler": _distributed(n, drop_last=False)},
    "distributed drop": lambda n, g: {"sampler": _distributed(n, drop_last=True)},
    "list": lambda n, g: {"sampler": list(range(n))[::-1]},
    "range": lambda n, g: {"sampler": range(0, n, 3)},
    "set": lambda n, g: {"sampler": dict.fromkeys(range(n))},
    "generator": lambda n, g: {"sampler": (i for i in range(n))},
    "tensors": lambda n, g: {"sampler": torch.arange(n)},
    "numpy": lambda n, g: {"sampler": np.arange(n)},
    "letters": lambda n, g: {"sampler": [chr(97 + i) for i in range(n)]},
    "lists": lambda n, g: {"sampler": [[i, i] for i in range(n)]},
    "outside": lambda n, g: {"sampler": [*range(n), n, 0]},
    "drawing": lambda n, g: {"sampler": Drawing(n)},
    "eager": lambda n, g: {"sampler": Eager(n)},
    "bare": lambda n, g: {"sampler": Barely(n)},
    "old": lambda n, g: {"sampler": Old(n)},
    "failing": lambda n, g: {"sampler": Failing(list(range(n)))},
    "unusable": lambda n, g: {"sampler": Unusable()},
    "batches": lambda n, g: {"batch_sampler": BatchSampler(SequentialSampler(range(n)), 4, drop_last=True)},
    "random batches": lambda n, g: {"batch_sampler": BatchSampler(RandomSampler(range(n), generator=g), 3, False)},
    "eager batches": lambda n, g: {"batch_sampler": BatchSampler(Eager(n), 3, False)},
    "listed batches": lambda n, g: {"batch_sampler": _batches(n, drop_last=False)},
    "tuples": lambda n, g: {"batch_sampler": [tuple(batch) for batch in _batches(n, drop_last=True)]},
    "ranges": lambda n, g: {"batch_sampler": [range(start, min(start + 2, n)) for start in range(0, n, 2)]},
    "empty batches": lambda n, g: {"batch_sampler": [[], *_batches(n, drop_last=False), []]},
    "own batches": lambda n, g: {"batch_sampler": OwnBatches(RandomSampler(range(n), generator=g), 4, False)},
    "growing batches": lambda n, g: {"batch_sampler": Growing(n)},
    "failing batches": lambda n, g: {"batch_sampler": Failing(_batches(n, drop_last=True))},
}
"""Functions of the dataset's length and a generator: what says which samples come when."""


def identity(samples: Any) -> Any:
    return samples


def count(samples: Any) -> tuple[int, str]:
    return len(samples), type(samples).__name__


def reversed_default(samples: Any) -> Any:
    return default_collate(samples[::-1])


def refuse(samples: Any) -> Any:
    raise RuntimeError(f"can't collate a {type(samples).__name__}")


class Padding:
    """Pads tensors to one length; fails for anything else."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self, samples: Any) -> Any:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=self.value)


COLLATES: Mapping[str, Callable[[], Any]] = {
    "none": lambda: None,
    "default": lambda: default_collate,
    "identity": lambda: identity,
    "count": lambda: count,
    "reversed": lambda: reversed_default,
    "refuse": lambda: refuse,
    "padding": lambda: Padding(-1),
    "partial": lambda: functools.partial(map_first, torch.as_tensor),
}


def map_first(function: Callable[[Any], Any], samples: Any) -> Any:
    return [function(samples[0]), len(samples)]


def init_quietly(worker_id: int) -> None:
    torch.set_num_threads(1)


def init_badly(worker_id: int) -> None:
    if worker_id == 0:
        raise ValueError("worker 0 can't be initialised")


INITS: Mapping[str, Callable[[], Any]] = {
    "none": lambda: None,
    "quiet": lambda: init_quietly,
    "bad": lambda: init_badly,
}
