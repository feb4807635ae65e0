"""Keeps what a stream draws from the global generators apart from what `collate_fn` draws.

All workers of a shared stream read the same samples, also where these are random, but each collates batches of its own.
"""

from __future__ import annotations

from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.worker.generators import GeneratorStates, seed_generators


class StreamDraws:
    """The generators' states as the stream has left them. Not thread-safe, as the generators aren't."""

    def __init__(self) -> None:
        self._states: GeneratorStates | None = None

    def forget(self) -> None:
        """Let the stream begin with the generators as they are."""
        self._states = None

    def enter(self) -> None:
        """Continue with the stream's states. Takes 30 us."""
        if self._states is not None:
            self._states.restore()

    def leave(self, seed: int, epoch: int, batch: int) -> None:
        """Save the stream's states, and seed for the collation of a batch. Takes 60 us."""
        self._states = GeneratorStates.take()
        seed_generators(derive_key(seed, Purpose.COLLATE.value, epoch, batch))
