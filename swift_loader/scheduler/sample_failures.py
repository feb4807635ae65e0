"""Keeps what workers report about failed samples, until the batch is delivered."""

from __future__ import annotations

from typing import Any

from swift_loader.scheduler.events import Built, Failed, SampleFailed


class SampleFailures:
    """The failed samples of batches that aren't delivered."""

    def __init__(self) -> None:
        self.by_batch: dict[tuple[int, int, int], dict[int, Any]] = {}
        """By (worker, generation, sequence), then by position. The worker is part of the key because a report of a
        worker that dies doesn't hold for the rebuilt batch."""

    def note(self, event: SampleFailed, generation: int) -> None:
        """Record a report, if it is about a batch of this generation."""
        if event.generation == generation:
            self.by_batch.setdefault((event.worker, event.generation, event.sequence), {})[event.position] = (
                event.failure
            )

    def take(self, answer: Built | Failed) -> tuple[Any, ...]:
        """Remove and return the failures of the batch that was answered so."""
        return tuple(self.by_batch.pop((answer.worker, answer.generation, answer.sequence), {}).values())

    def take_all(self) -> list[Any]:
        """Remove and return all failures."""
        failures = [failure for by_position in self.by_batch.values() for failure in by_position.values()]
        self.by_batch.clear()
        return failures
