"""Where the samples of a batch come from.

PlannedSamples   a map-style dataset, by the indices that the plan or a sampler says        worker.samples
KeyedSamples     a map-style dataset, by whatever keys torch's sampler gives                worker.keyed_samples
StreamSamples    torch's IterableDataset                                                    worker.stream
"""

from __future__ import annotations

from typing import Any, Protocol

from swift_loader.errors import EncodeError
from swift_loader.sampling.plan import Plan, PlanReader, PlanSettings
from swift_loader.transport.counters import CounterWriter
from swift_loader.transport.index_array import IndexArray
from swift_loader.transport.messages import FailureStage
from swift_loader.transport.task import LostKeys, Task
from swift_loader.worker.failure import BuildError
from swift_loader.worker.fetch import Fetched, Fetcher
from swift_loader.worker.sample_timer import SampleTimer
from swift_loader.worker.seeding import Seeding


class Samples(Protocol):
    """Gives the samples of a task. Not thread-safe."""

    seeding: Seeding
    """Seeds the batches."""
    state: bytes | None
    """A packed `Snapshot` after the last batch, if one is due."""

    @property
    def timer(self) -> SampleTimer:
        """Measures single samples."""
        ...

    @property
    def counters(self) -> CounterWriter:
        """Show how far the current batch is."""
        ...

    def use_plan(self, plan: PlanSettings, resume: bytes | None, turn: int) -> None:
        """Give the samples of another plan from now on; see `NewPlan`."""
        ...

    def fetch(self, task: Task) -> Fetched:
        """Return the samples of a batch. Calls `Seeding.begin`; the caller calls `Seeding.needs_rebuild`.

        Raises:
            BuildError: The user's code raised; `__cause__` is its exception.
            StreamEnd: There is no batch left for this task.
        """
        ...


class PlannedSamples:
    """Samples of a map-style dataset whose length is known."""

    state: bytes | None = None
    """Such a dataset has no state."""

    def __init__(self, fetcher: Fetcher, seeding: Seeding, num_samples: int, plan: PlanSettings) -> None:
        self.seeding = seeding
        self._fetcher = fetcher
        self._num_samples = num_samples
        self._reader = PlanReader(Plan.of(num_samples, plan))

    @property
    def timer(self) -> SampleTimer:
        """Measures single samples."""
        return self._fetcher.timer

    @property
    def counters(self) -> CounterWriter:
        """Show how far the current batch is."""
        return self._fetcher.counters

    def use_plan(self, plan: PlanSettings, resume: bytes | None, turn: int) -> None:  # noqa: ARG002 - has no state
        """Give the samples of another plan from now on."""
        self._reader = PlanReader(Plan.of(self._num_samples, plan))

    def fetch(self, task: Task) -> Fetched:
        """Return the samples of a batch."""
        if task.indices is None:
            indices = self._reader.batch(task.epoch, task.step).indices.tolist()
        else:
            indices = list(checked_keys(task))
        return self._fetcher.fetch(self._reader.plan.settings.order.seed, task.epoch, indices)


def checked_keys(task: Task) -> Any:
    """Return the keys of a task.

    Raises:
        BuildError: They couldn't be sent.
    """
    if isinstance(task.indices, LostKeys):
        raise BuildError(FailureStage.FETCH) from EncodeError(task.indices.reason)
    return task.indices.to_list() if isinstance(task.indices, IndexArray) else task.indices
