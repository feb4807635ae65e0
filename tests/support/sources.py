"""Sources for a DevicePrefetcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

NUM_BATCHES = 6


def arrays() -> list[Any]:
    return [np.full(4, number) for number in range(NUM_BATCHES)]


class Counted:
    """A sized source that counts what it was asked for, and has a state."""

    def __init__(self) -> None:
        self.num_given = 0
        self.first = 0
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return NUM_BATCHES

    def __iter__(self) -> Iterator[Any]:
        first, self.first = self.first, 0
        for number in range(first, NUM_BATCHES):
            self.num_given = number + 1
            yield torch.tensor(number)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"nested": {"given": self.num_given}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = self.num_given = state["nested"]["given"]


class LikeDali:
    """Its own iterator, of lists of dicts; has to be reset between passes."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> LikeDali:
        return self

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        if self.number == NUM_BATCHES:
            raise StopIteration
        self.number += 1
        return [{"data": torch.tensor([self.number - 1])}]

    def reset(self) -> None:
        self.number = 0


class LikeFfcv:
    """Sized, of tuples of tensors."""

    def __len__(self) -> int:
        return NUM_BATCHES

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return iter([(torch.tensor([number]), torch.tensor([-number])) for number in range(NUM_BATCHES)])


def numbers(batches: Any) -> list[int]:
    return [int(batch) for batch in batches]
