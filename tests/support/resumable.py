"""Loaders to resume: of all kinds of samplers, and of streams."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from swift_loader import DataLoader, ShuffleSampler, distributed
from tests.support.chains import Make
from tests.support.helpers import LIKE_A_FORK
from tests.support.samplers import MAKERS, NUM_SAMPLES, GlobalRandom

WEIGHTS = np.random.default_rng(2).random(NUM_SAMPLES).tolist()


class Numbers:
    """The numbers 0 to 102."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Lists(Numbers):
    """Gives a list of numbers for a list of indices."""

    def __getitem__(self, index: Any) -> Any:
        return list(index)


class Remembering(Numbers):
    """Counts its samples, and gives the count with each. Its state is larger than a message."""

    bulk = bytes(300_000)

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return index, self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "bulk": self.bulk}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert state["bulk"] == self.bulk


class Drawing(Numbers):
    """Each sample draws from all global generators."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.random()), torch.rand(2)


class PythonSampler(Sampler[int]):
    """Shuffles with `random` when it begins, and draws from it while it goes on."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(NUM_SAMPLES))
        random.shuffle(order)
        for index in order:
            yield index if random.random() < 0.5 else 0

    def __len__(self) -> int:
        return NUM_SAMPLES


class ShareIterator:
    """Gives the numbers of a share. Has a state."""

    def __init__(self, share: range) -> None:
        self.share, self.at = share, 0

    def __iter__(self) -> ShareIterator:
        return self

    def __next__(self) -> int:
        if self.at >= len(self.share):
            raise StopIteration
        self.at += 1
        return self.share[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StatefulIterators(Sampler[int]):
    """Counts backwards. Has no state, but its iterators do."""

    def __iter__(self) -> Iterator[int]:
        return ShareIterator(range(NUM_SAMPLES)[::-1])


class MixedBatchSampler(Sampler[list[int]]):
    """Draws from all generators."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(26):
            yield [random.randrange(50), int(np.random.randint(50)), int(torch.randint(50, ()))]


def streaming(kind: str, **options: Any) -> Make:
    """Return what makes loaders of a stream of the package `datasets`."""
    import datasets

    def dataset() -> Any:
        plain = datasets.IterableDataset.from_generator(_examples, gen_kwargs={"shards": [0, 1, 2, 3]})
        if kind == "shuffled":
            return plain.shuffle(seed=3, buffer_size=10)
        if kind == "mapped":
            return plain.map(_negated)
        if kind == "interleaved":
            mixed = datasets.interleave_datasets([plain, plain.map(_negated)], seed=4, probabilities=[0.5, 0.5])
            return mixed.shuffle(seed=1, buffer_size=5)
        return plain

    return _of(lambda: {"batch_size": 4} | options, dataset)


def _examples(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for number in range(15):
            yield {"x": shard * 100 + number}


def _negated(example: dict[str, int]) -> dict[str, int]:
    return {"x": -1 - example["x"]}


def _loader(dataset: Any, num_workers: int, **options: Any) -> DataLoader[Any]:
    own: dict[str, Any] = dict(LIKE_A_FORK) if num_workers else {}
    return DataLoader(dataset, num_workers=num_workers, **{**own, **options})


def _of(make_options: Any, dataset: Any = Numbers) -> Make:
    def make(num_workers: int, **more: Any) -> DataLoader[Any]:
        return _loader(dataset(), num_workers, **make_options(), **more)

    return make


def _sampled(make_sampler: Callable[[], Any], dataset: Any = Numbers) -> Make:
    return _of(lambda: {"batch_size": 4, "sampler": make_sampler()}, dataset)


def _batches_of(name: str) -> Callable[[], dict[str, Any]]:
    return lambda: {"batch_sampler": MAKERS[name](1, 0)}


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


SAMPLED: dict[str, Make] = {
    "in order": _of(lambda: {"batch_size": 4}),
    "shuffle": _of(lambda: {"batch_size": 4, "shuffle": True}),
    "shuffle, drop_last": _of(lambda: {"batch_size": 4, "shuffle": True, "drop_last": True}),
    "shuffle, generator": _of(lambda: {"batch_size": 4, "shuffle": True, "generator": _seeded()}),
    "random, own generator": _sampled(lambda: RandomSampler(Numbers(), generator=_seeded())),
    "random, replaced": _sampled(lambda: RandomSampler(Numbers(), replacement=True, num_samples=90)),
    "subset": _sampled(lambda: SubsetRandomSampler(range(0, 103, 2))),
    "weighted": _sampled(lambda: WeightedRandomSampler(WEIGHTS, NUM_SAMPLES)),
    "weighted, generator": _sampled(lambda: WeightedRandomSampler(WEIGHTS, NUM_SAMPLES, generator=_seeded())),
    "distributed": _sampled(lambda: DistributedSampler(Numbers(), num_replicas=2, rank=1, seed=3)),  # type: ignore[arg-type]
    "own shuffle": _sampled(lambda: ShuffleSampler(NUM_SAMPLES, 1, num_replicas=1, rank=0)),
    "own shuffled batches": _of(_batches_of("shuffle batches")),
    "weighted over ranks": _sampled(lambda: distributed(WeightedRandomSampler(WEIGHTS, 200), 2, 1, seed=3)),
    "buckets": _of(_batches_of("buckets")),
    "tokens": _of(_batches_of("tokens")),
    "random": _sampled(PythonSampler),
    "np.random": _sampled(GlobalRandom),
    "all generators": _of(lambda: {"batch_sampler": MixedBatchSampler()}),
    "batches in a list": _of(lambda: {"batch_sampler": [[3 * n % 103, 7 * n % 103] for n in range(26)]}),
    "shuffled batches": _of(lambda: {"batch_sampler": BatchSampler(RandomSampler(Numbers()), 4, drop_last=True)}),
    "iterators with a state": _sampled(StatefulIterators),
    "single samples, iterators with a state": _of(lambda: {"batch_size": None, "sampler": StatefulIterators()}),
    "single samples": _of(lambda: {"batch_size": None, "shuffle": True}),
    "single batches": _of(
        lambda: {"batch_size": None, "sampler": BatchSampler(RandomSampler(Numbers()), 4, drop_last=False)},
        Lists,
    ),
}


DRAWING: dict[str, Make] = {
    "in order": _of(lambda: {"batch_size": 4}, Drawing),
    "shuffle": _of(lambda: {"batch_size": 4, "shuffle": True}, Drawing),
    "weighted, generator": _sampled(lambda: WeightedRandomSampler(WEIGHTS, NUM_SAMPLES, generator=_seeded()), Drawing),
    "single samples": _of(lambda: {"batch_size": None, "shuffle": True}, Drawing),
    "buckets": _of(_batches_of("buckets"), Drawing),
}


class Shards(IterableDataset[int]):
    """Gives each worker every n-th number: unequal shares."""

    def __init__(self, length: int = 107) -> None:
        self.length = length

    def _share(self) -> range:
        info = get_worker_info()
        worker_id, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        # The later workers have less.
        return range(worker_id, self.length - 17 * worker_id, num_workers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._share())


class IteratorState(Shards):
    """Its iterators have a state."""

    def __iter__(self) -> Iterator[int]:
        return ShareIterator(self._share())


class DatasetState(Shards):
    """Has a state itself: as torchdata's protocol has it, a generator that goes on where the state was."""

    def __init__(self, length: int = 107) -> None:
        super().__init__(length)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        share = self._share()
        while self.at < len(share):
            self.at += 1
            yield share[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class SelfIterator(DatasetState):
    """Is its own iterator, with a state."""

    def __iter__(self) -> Iterator[int]:
        self.share = self._share()
        self.at = 0
        return self

    def __next__(self) -> int:
        if self.at >= len(self.share):
            raise StopIteration
        self.at += 1
        return self.share[self.at - 1]


STREAMS: dict[str, Make] = {
    "no state": _of(lambda: {"batch_size": 4}, Shards),
    "no state, drop_last": _of(lambda: {"batch_size": 4, "drop_last": True}, Shards),
    "no state, single samples": _of(lambda: {"batch_size": None}, Shards),
    "iterator": _of(lambda: {"batch_size": 4}, IteratorState),
    "iterator, drop_last": _of(lambda: {"batch_size": 4, "drop_last": True}, IteratorState),
    "iterator, single samples": _of(lambda: {"batch_size": None}, IteratorState),
    "iterator, rare snapshots": _of(lambda: {"batch_size": 4, "snapshot_every_n_steps": 3}, IteratorState),
    "dataset": _of(lambda: {"batch_size": 4}, DatasetState),
    "dataset, drop_last": _of(lambda: {"batch_size": 4, "drop_last": True}, DatasetState),
    "dataset, rare snapshots": _of(lambda: {"batch_size": 4, "snapshot_every_n_steps": 3}, DatasetState),
    "dataset, no snapshots": _of(lambda: {"batch_size": 4, "snapshot_every_n_steps": 0}, DatasetState),
    "own iterator": _of(lambda: {"batch_size": 4}, SelfIterator),
}


class Everything(Shards):
    """Gives all numbers in each worker."""

    def _share(self) -> range:
        return range(self.length)


class EverythingShuffled(Everything):
    """Gives all numbers in an order that it draws, and a number that it draws with each."""

    def __iter__(self) -> Iterator[Any]:
        order = list(self._share())
        random.shuffle(order)
        return ((number, float(np.random.random()), float(torch.rand(()))) for number in order)


class EverythingIteratorState(Everything, IteratorState):
    """Its iterators have a state."""


class EverythingDatasetState(Everything, DatasetState):
    """Has a state itself."""


class EverythingSelfIterator(Everything, SelfIterator):
    """Is its own iterator, with a state."""


def drawing_collate(samples: list[Any]) -> list[Any]:
    """Add what all generators draw."""
    return [samples, random.random(), float(np.random.random()), float(torch.rand(()))]


SHARED: dict[str, Make] = {
    "no state": _of(lambda: {"batch_size": 4, "shard_stream": True}, Everything),
    "no state, drop_last": _of(lambda: {"batch_size": 4, "drop_last": True, "shard_stream": True}, Everything),
    "no state, single samples": _of(lambda: {"batch_size": None, "shard_stream": "workers"}, Everything),
    "iterator": _of(lambda: {"batch_size": 4, "shard_stream": True}, EverythingIteratorState),
    "iterator, rare snapshots": _of(
        lambda: {"batch_size": 4, "shard_stream": True, "snapshot_every_n_steps": 3}, EverythingIteratorState
    ),
    "dataset": _of(lambda: {"batch_size": 4, "shard_stream": True}, EverythingDatasetState),
    "dataset, no snapshots": _of(
        lambda: {"batch_size": 4, "shard_stream": True, "snapshot_every_n_steps": 0}, EverythingDatasetState
    ),
    "own iterator": _of(lambda: {"batch_size": 4, "shard_stream": True}, EverythingSelfIterator),
}
"""Streams that the loader shares out."""

SHARED_DRAWING = _of(
    lambda: {"batch_size": 4, "shard_stream": True, "collate_fn": drawing_collate, "generator": _seeded()},
    EverythingShuffled,
)
"""A stream that draws, whose `collate_fn` draws as well."""
