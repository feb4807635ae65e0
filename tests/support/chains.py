"""Chains of stops: a run of a drop-in DataLoader, each part of which continues the state of the one before."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

Make = Callable[..., Any]
"""Returns a new loader, with new samplers and a new dataset, given the number of workers and maybe further options."""

_MAX_TAKEN = 3
"""How many batches a part of a chain takes at most before it stops."""

_AT_END = 0.1
"""How many of the parts stop only when the loop has met the end of an epoch."""


def plain(batch: Any) -> Any:
    """Return a batch as numbers, lists and strings, to compare."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    return [plain(one) for one in batch] if isinstance(batch, (list, tuple)) else batch


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def run_whole(make: Make, num_workers: int, num_epochs: int) -> list[list[Any]]:
    """Return the batches of each epoch of a run that isn't stopped."""
    loader = make(num_workers)
    return [[plain(batch) for batch in _epoch(loader, epoch)] for epoch in range(num_epochs)]


def _epoch(loader: Any, epoch: int, seed: int | None = None) -> Iterator[Any]:
    """Begin an epoch, with the global generators as they are for it in each run, or seeded otherwise."""
    seed_all(epoch if seed is None else seed)
    for part in (loader.dataset, loader.sampler, loader.batch_sampler):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    return iter(loader)


@dataclass(frozen=True, slots=True)
class Chain:
    """How a run is stopped."""

    make: Make
    num_workers: tuple[int, ...]
    """Each part has one of these numbers of workers."""
    seed: int = 0
    in_json: bool = True

    def run(self, num_stops: int, num_epochs: int) -> list[list[Any]]:
        """Return the batches of each epoch, in a run that is stopped at random batches.

        Once it was stopped that often, it goes on to the end.
        """
        choices = random.Random(self.seed)
        epochs: list[list[Any]] = [[]]
        state: dict[str, Any] | None = None
        for part in range(num_stops + 1):
            loader, seed = self.make(choices.choice(self.num_workers)), None
            if state is not None:
                loader.load_state_dict(state)
                seed = None if state["_iterator_finished"] else choices.getrandbits(30)
            iterator = _epoch(loader, len(epochs) - 1, seed)
            if part == num_stops:
                self._run_to_end(iterator, loader, epochs, num_epochs)
                break
            if choices.random() < _AT_END:
                epochs[-1] += map(plain, iterator)
                epochs.append([])
            else:
                self._take(iterator, loader, epochs, choices.randint(0, _MAX_TAKEN))
            assert len(epochs) <= num_epochs, f"the run ended after {part} stops; give it more epochs"
            state = loader.state_dict()
            if self.in_json:
                state = json.loads(json.dumps(state))
            del loader, iterator
        return epochs

    def _take(self, iterator: Iterator[Any], loader: Any, epochs: list[list[Any]], num_batches: int) -> None:
        """Take that many batches, also of the next epoch."""
        while True:
            batches = [plain(batch) for batch in islice(iterator, num_batches)]
            epochs[-1] += batches
            num_batches -= len(batches)
            if not num_batches:
                return
            epochs.append([])
            iterator = _epoch(loader, len(epochs) - 1)

    def _run_to_end(self, iterator: Iterator[Any], loader: Any, epochs: list[list[Any]], num_epochs: int) -> None:
        epochs[-1] += map(plain, iterator)
        later = range(len(epochs), num_epochs)
        epochs += [[plain(batch) for batch in _epoch(loader, epoch)] for epoch in later]
