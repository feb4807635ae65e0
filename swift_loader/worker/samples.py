"""Where the samples of a batch come from.

PlannedSamples   a map-style dataset, by the indices that the plan or a sampler says        worker.samples
KeyedSamples     a map-style dataset, by whatever keys torch's sampler gives                worker.samples
StreamSamples    torch's IterableDataset                                                    worker.stream
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from swift_loader.errors import EncodeError
from swift_loader.sampling.plan import Plan, PlanReader, PlanSettings
from swift_loader.transport.counters import CounterWriter
from swift_loader.transport.messages import FailureStage
from swift_loader.transport.task import IndexArray, LostKeys, Task
from swift_loader.worker.failure import BuildError
from swift_loader.worker.fetch import Fetched, Fetcher, SampleTimer, harmless
from swift_loader.worker.seeding import Fetching, Rng, Seeding
from swift_loader.worker.torch_mode import Resume, Snapshot, TorchMode
from swift_loader.worker.torch_worker import TorchIdentity


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

        Raises `BuildError` if the user's code raised; `__cause__` is its exception. Raises `StreamEnd` if there is no
        batch left for this task.
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
    """Return the keys of a task. Raises `BuildError` if they couldn't be sent."""
    if isinstance(task.indices, LostKeys):
        raise BuildError(FailureStage.FETCH) from EncodeError(task.indices.reason)
    return task.indices.to_list() if isinstance(task.indices, IndexArray) else task.indices


# The samples of a map-style dataset, as torch fetches them: by any keys, without asking for its length.
#
# A batch is `dataset.__getitems__(keys)` if the dataset has that, else `[dataset[key] for key in keys]`. Random draws
# are keyed by the sample's position in the epoch, not by its key: a sampler may repeat a key, and each time other
# numbers must be drawn. Those of `__getitems__` are keyed by the position of the batch: what it returns needn't be
# samples.

POSITION_BITS = 32
"""Of a position's 64 bits, those that number the samples of a batch. The others number the batches."""


class KeyedSamples:
    """Samples by the keys that a sampler chose."""

    def __init__(self, dataset: Any, mode: TorchMode, rng: Rng, seed: int, worker: TorchIdentity | None) -> None:
        """`dataset`: map-style. Its state, if it has one, is part of the snapshots. `mode`: how torch's workers do it.

        `seed`: the base seed that the generators were seeded with. `worker` None: nothing here is a worker.
        """
        # A batch that is built twice would change the dataset's state twice.
        self.seeding = Seeding(rng, by_sample=rng is Rng.SAMPLE and hasattr(dataset, "state_dict"))
        self.counters = CounterWriter()
        self.timer = SampleTimer()
        self.state: bytes | None = None
        self._dataset = dataset
        self._mode = mode
        self._seed = seed
        self._worker = worker
        self._get_items: Callable[[Any], Sequence[Any]] | None = getattr(dataset, "__getitems__", None)
        self._num_batches = 0

    def use_plan(self, plan: PlanSettings, resume: bytes | None, turn: int) -> None:  # noqa: ARG002 - it has no turns
        """Use another base seed from now on. Continue with the dataset's saved state, if there is one.

        Raises `BuildError` if the dataset doesn't accept its state.
        """
        self._seed = plan.order.seed
        if self._worker is not None:
            self._worker.use_seed(self._seed)
        self._num_batches = 0
        snapshot = Resume.unpack(resume).snapshot if resume is not None else None
        if snapshot is not None:
            self._load(snapshot)

    def _load(self, snapshot: bytes) -> None:
        try:
            unpacked = Snapshot.unpack(snapshot)
            self._num_batches = unpacked.num_batches
            if unpacked.dataset is not None:
                self._dataset.load_state_dict(unpacked.dataset)
        except Exception as error:
            raise BuildError(FailureStage.LOAD) from error

    def fetch(self, task: Task) -> Fetched:
        """Return the samples of a batch, or its only sample if batches aren't collated."""
        self.state = None
        keys = checked_keys(task)
        fetched = self._fetch_batch(task, keys) if self._mode.auto_collation else self._fetch_single(task, keys)
        self._num_batches += 1
        every = self._mode.snapshot_every
        if every and not (self._num_batches - 1) % every and hasattr(self._dataset, "state_dict"):
            self.state = self._snapshot()
        return fetched

    def _fetch_single(self, task: Task, key: Any) -> Fetched:
        samples = self.counters.begin(in_bulk=False)
        self.seeding.begin(Fetching(self._seed, task.epoch, _positions(task.step, 1), samples))
        self._fetch_one_by_one([key], samples)
        return Fetched(samples[0], (), 1)

    def _fetch_batch(self, task: Task, keys: Any) -> Fetched:
        get_items = self._get_items
        samples = self.counters.begin(in_bulk=bool(get_items))
        try:
            listed = list(keys)
        except Exception as error:
            raise BuildError(FailureStage.FETCH) from harmless(error)
        self.seeding.begin(Fetching(self._seed, task.epoch, _positions(task.step, len(listed)), samples))
        if not get_items:
            self._fetch_one_by_one(listed, samples)
            return Fetched(samples.copy(), (), len(listed))
        if self.seeding.by_sample and listed:
            self.seeding.begin_sample(0)
        try:
            return Fetched(get_items(keys), (), len(listed))
        except Exception as error:
            raise BuildError(FailureStage.FETCH) from harmless(error)  # it isn't known which sample failed

    def _fetch_one_by_one(self, keys: list[Any], samples: list[Any]) -> None:
        """Fetch all samples. At any time, the list's length tells which one is being fetched."""
        dataset, seeding = self._dataset, self.seeding
        try:
            if self.timer.is_due:
                self.timer.fetch(dataset, keys, samples, seeding)
            elif seeding.by_sample:
                for number, key in enumerate(keys):
                    seeding.begin_sample(number)
                    samples.append(dataset[key])
            else:
                for key in keys:
                    samples.append(dataset[key])  # noqa: PERF401 - the length must be right at any time
        except Exception as error:
            failed = keys[len(samples)]
            raise BuildError(FailureStage.FETCH, failed if type(failed) is int else None) from harmless(error)

    def _snapshot(self) -> bytes:
        try:
            worker_id = 0 if self._worker is None else self._worker.worker_id
            return Snapshot(self._num_batches, dataset=self._dataset.state_dict(), worker_id=worker_id).pack()
        except Exception as error:
            raise BuildError(FailureStage.SAVE) from error

    def __repr__(self) -> str:
        return f"<KeyedSamples, {self._num_batches} batches>"


def _positions(step: int, num_samples: int) -> range:
    """Return what the draws of a batch's samples are keyed by: unique in the epoch."""
    first = step << POSITION_BITS
    return range(first, first + num_samples)
