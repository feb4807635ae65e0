"""Which of torch's workers builds batches, and what a new base seed means to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class TorchIdentity(Protocol):
    """One of the workers of a DataLoader: a process (`worker.torch_worker`), or a thread."""

    @property
    def worker_id(self) -> int:
        """Which of the n workers it is, from 0."""
        ...

    def use_seed(self, base_seed: int) -> None:
        """Begin a generation with this seed."""
        ...


@dataclass(frozen=True, slots=True)
class TorchThread:
    """A worker thread. It has no generators of its own, and `get_worker_info()` can't tell it from other threads."""

    worker_id: int

    def use_seed(self, base_seed: int) -> None:
        """Do nothing. `sample_rng()` is keyed by the seed in any case."""
