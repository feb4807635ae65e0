"""Mixtures of many large sources, by swift_loader and by Grain. Samples are computed, so that only mixing takes time.

A mixer starts, yields the indices of batch after batch, says what it saves, and starts anew from that. All are in one
process: workers would hide what mixing costs.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from swift_loader import DataLoader, Mixture, ShuffleBatchSampler, SwiftLoader

NUM_ROWS = 10**9
"""Of each source."""
BATCH_SIZE = 250
SEED = 0

_ROW_BITS = 40


class Source:
    """10^9 rows. Row i is the number of the source, and i."""

    def __init__(self, number: int) -> None:
        self._base = number << _ROW_BITS

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> np.int64:
        if not 0 <= index < NUM_ROWS:
            raise IndexError(index)
        return np.int64(self._base + index)


def source_of(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return which source samples are from."""
    return samples >> _ROW_BITS


class MixerCase(NamedTuple):
    """A number of sources, and how often their weights change in the first 10^6 samples."""

    name: str
    num_sources: int
    num_changes: int

    def weights(self) -> list[list[float]]:
        """Return the weights of all sources, at first and after each change: 1, 1/2, 1/3 ..., then the other way."""
        weights = [1 / (number + 1) for number in range(self.num_sources)]
        return [weights[:: -1 if number % 2 else 1] for number in range(self.num_changes + 1)]


class Mixer(Protocol):
    """Yields batches of samples, `(BATCH_SIZE,)`, and says where it is."""

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Go on where the mixer is."""

    def state_dict(self) -> Any:
        """Return what another one needs to go on there, as plain JSON types."""


def make_mixture(case: MixerCase) -> Mixture:
    names = [f"source {number}" for number in range(case.num_sources)]
    every = 10**6 // (case.num_changes + 1)
    changes = {number * every: dict(zip(names, weights, strict=True)) for number, weights in enumerate(case.weights())}
    return Mixture({name: Source(number) for number, name in enumerate(names)}, changes)


class Orders:
    """Only the order: the indices of batches, without their samples."""

    def __init__(self, case: MixerCase, state: Any = None) -> None:
        self._mixture = make_mixture(case)
        self._sampler = ShuffleBatchSampler(self._mixture, BATCH_SIZE, seed=SEED, num_replicas=1, rank=0)
        if state is not None:
            self._sampler.load_state_dict(state)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (np.array(batch) for batch in self._sampler)

    def state_dict(self) -> Any:
        """Return the state of the sampler, the loader or the iterator."""
        return self._sampler.state_dict()


class Drop:
    """A DataLoader over the mixture."""

    def __init__(self, case: MixerCase, state: Any = None) -> None:
        mixture = make_mixture(case)
        sampler = ShuffleBatchSampler(mixture, BATCH_SIZE, seed=SEED, num_replicas=1, rank=0)
        self._loader: DataLoader[Any] = DataLoader(mixture, batch_sampler=sampler, collate_fn=np.stack)
        if state is not None:
            self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return iter(self._loader)

    def state_dict(self) -> Any:
        """Return the state of the sampler, the loader or the iterator."""
        return self._loader.state_dict()


class Swift:
    """A SwiftLoader over the mixture."""

    def __init__(self, case: MixerCase, state: Any = None) -> None:
        self._loader = SwiftLoader(dataset=make_mixture(case), batch_size=BATCH_SIZE, worker_per_consumer=0, seed=SEED)
        if state is not None:
            self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return iter(self._loader)

    def state_dict(self) -> Any:
        """Return the state of the sampler, the loader or the iterator."""
        return self._loader.state_dict()


class Grain:
    """Grain's mix of map-style datasets, which are shuffled and repeated one by one."""

    def __init__(self, case: MixerCase, state: Any = None) -> None:
        self._batches = iter(self.mix(case).batch(BATCH_SIZE))
        if state is not None:
            self._batches.set_state(state)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return self._batches

    def state_dict(self) -> Any:
        """Return the state of the sampler, the loader or the iterator."""
        return self._batches.get_state()

    def mix(self, case: MixerCase) -> Any:
        """Return the mix as an iterable dataset that reads in this thread."""
        import grain

        (weights,) = case.weights()
        return grain.MapDataset.mix(self.sources(case), weights).to_iter_dataset(self.reading())

    def sources(self, case: MixerCase) -> list[Any]:
        """Return the sources, each in an order of its own, epoch after epoch."""
        import grain

        numbers = range(case.num_sources)
        return [grain.MapDataset.source(Source(number)).shuffle(seed=SEED + number).repeat() for number in numbers]

    def reading(self) -> Any:
        """Return the options that read in this thread."""
        import grain

        return grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class GrainStreams(Grain):
    """Grain's mix of iterable datasets."""

    def mix(self, case: MixerCase) -> Any:
        """Return the mix of datasets that each read in this thread."""
        import grain

        (weights,) = case.weights()
        streams = [source.to_iter_dataset(self.reading()) for source in self.sources(case)]
        return grain.IterDataset.mix(streams, weights)


def mixers() -> dict[str, Callable[..., Mixer]]:
    """Return all whose package is installed, by name."""
    found: dict[str, Callable[..., Mixer]] = {"order alone": Orders, "DataLoader": Drop, "SwiftLoader": Swift}
    if importlib.util.find_spec("grain"):
        found |= {"Grain, map": Grain, "Grain, streams": GrainStreams}
    return found


def nbytes_of(state: Any) -> int:
    """Return the length of a saved state as JSON."""
    return len(json.dumps(state))
