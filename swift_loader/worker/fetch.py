"""Fetches the samples of a batch, and handles those that fail.

A sample fails if the dataset raises an `Exception` for it. What happens then depends on the sample alone, as the
sample's content does: not on the worker, and not on what that worker built before.

PlannedSamples   a map-style dataset, by the indices that the plan or a sampler says
KeyedSamples     a map-style dataset, by whatever keys torch's sampler gives
StreamSamples    torch's IterableDataset: `worker.stream`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from swift_loader.batch.tree import type_name
from swift_loader.errors import EncodeError, TooManyErrors
from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.sampling.plan import Plan, PlanReader, PlanSettings
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.counters import CounterWriter
from swift_loader.transport.messages import FailureStage, Hung, SampleFailed
from swift_loader.transport.task import IndexArray, LostKeys, Task
from swift_loader.worker.failure import BuildError, describe_failure
from swift_loader.worker.seeding import Fetching, Rng, Seeding
from swift_loader.worker.torch_worker import Resume, Snapshot, TorchIdentity, TorchMode

# One by one -----------------------------------------------------------------------------------------------------------

# Measures the samples of a batch one by one, where that costs nothing next to fetching them.

_LONG_NS = 20_000
"""Samples that take so long are always measured: a reading of the clock takes 0.3 % of it."""

_EVERY = 64
"""Of batches with shorter samples, one of so many is measured."""

_INT64 = range(-(2**63), 2**63)


class SampleTimer:
    """Finds the slowest sample of each batch that it measures. Not thread-safe."""

    def __init__(self) -> None:
        self.is_due = True
        """Whether to measure the samples of the next batch: to call `fetch`."""
        self.slow_index = 0
        """Dataset index of the slowest sample of the batch."""
        self.slow_ns = 0
        """How long it took; 0: not measured. The caller sets it to 0 before each batch."""
        self._num_batches = 0

    def fetch(self, dataset: Any, keys: Sequence[Any], samples: list[Any], seeding: Seeding) -> None:
        """Append the samples of these keys, and measure each. What the dataset raises comes out of it."""
        slow_key, slow_ns, by_sample, clock = None, self.slow_ns, seeding.by_sample, time.perf_counter_ns
        began_ns = clock()
        try:
            for number, key in enumerate(keys, len(samples)):
                if by_sample:
                    seeding.begin_sample(number)
                samples.append(dataset[key])
                now_ns = clock()
                if now_ns - began_ns > slow_ns:
                    slow_key, slow_ns = key, now_ns - began_ns
                began_ns = now_ns
        finally:
            if type(slow_key) is int and slow_key in _INT64:  # a key of the DataLoader may be anything
                self.slow_index, self.slow_ns = slow_key, slow_ns

    def note_batch(self, fetch_ns: int, num_samples: int) -> None:
        """Record how long it took to fetch a batch, which decides about the next one."""
        self._num_batches += 1
        self.is_due = fetch_ns >= _LONG_NS * num_samples or not self._num_batches % _EVERY

    def __repr__(self) -> str:
        return f"<SampleTimer{' due' if self.is_due else ''}>"


MAX_REPLACEMENTS = 10
"""How many other samples are tried as a replacement for one that fails."""

_MAX_SHOWN_INDICES = 8


class OnError(str, Enum):
    """What the loader does with a sample that fails."""

    RAISE = "raise"
    """Raise its error in the loop, in place of its batch."""
    SKIP = "skip"
    """Leave it out of its batch."""
    REPLACE = "replace"
    """Put another sample in its place."""


class Fetched(NamedTuple):
    """The samples of a batch, and those that failed."""

    samples: Any
    """What is collated: a list of samples; in torch mode also what the dataset returned for the batch, or a single
    sample. The user's `collate_fn` may keep it."""
    failures: Sequence[SampleFailed]
    """In the order of the batch. The caller still has to set their generation and sequence."""
    num_samples: int


class Fetcher:
    """Fetches the samples of one dataset. Not thread-safe."""

    def __init__(
        self,
        dataset: Any,
        num_samples: int,
        on_error: OnError,
        seeding: Seeding,
        definitions: Definitions,
        hung: Mapping[tuple[int, Any], Hung] | None = None,
        is_interrupt: Callable[[BaseException], bool] = lambda _: False,
    ) -> None:
        """Prepare to fetch. `is_interrupt` returns whether an error is an interrupt, and not the sample's.

        `hung`: the samples that fail, by epoch and dataset index. There may be more later.
        """
        self.counters = CounterWriter()
        """Show how far it is."""
        self.timer = SampleTimer()
        """Measures single samples."""
        self._is_interrupt = is_interrupt
        self._num_samples = num_samples
        self._on_error = on_error
        self._hung = {} if hung is None else hung
        self._seeding = seeding
        self._definitions = definitions
        self._get_items: Callable[[list[int]], Sequence[Any]] | None = getattr(dataset, "__getitems__", None)
        self._gives_single_samples = _has_own_get_item(dataset)
        has_singles = self._gives_single_samples or self._get_items is None
        self._singles: Any = dataset if has_singles else _Singles(dataset.__getitems__)
        """Returns one sample for an index."""

    def fetch(self, seed: int, epoch: int, indices: list[int]) -> Fetched:
        """Return the samples of a batch. Calls `Seeding.begin`; the caller calls `Seeding.needs_rebuild`.

        Raises `BuildError` if a sample failed, and it can't be skipped or replaced; `__cause__` is its exception.
        """
        seeding = self._seeding
        get_items = None if seeding.by_sample and self._gives_single_samples else self._get_items
        in_bulk = get_items is not None and self._gives_single_samples
        samples = self.counters.begin(in_bulk=get_items is not None)
        fetching = Fetching(seed, epoch, indices, samples, in_bulk=in_bulk)
        seeding.begin(fetching)
        if get_items is not None and self._fetch_in_bulk(fetching, get_items):
            return Fetched(samples.copy(), (), len(samples))
        failures: list[SampleFailed] = []
        while len(samples) < len(fetching.indices):
            try:
                self._fetch_one_by_one(fetching)
            except Exception as error:
                if self._is_interrupt(error):
                    raise BuildError(FailureStage.FETCH, fetching.index) from error
                self._do_without(harmless(error), fetching, failures)
        return Fetched(samples.copy(), failures, len(samples))

    def _fetch_in_bulk(self, fetching: Fetching, get_items: Callable[[list[int]], Sequence[Any]]) -> bool:
        """Fetch all samples at once. Return False if one of them failed: then they must be fetched one by one."""
        indices = fetching.indices
        try:
            if self._hung and self._first_hung(fetching) is not None:
                raise TimeoutError  # so fetch them one by one
            fetching.samples.extend(_check_count(get_items(list(indices)), len(indices)))
        except Exception as error:
            if self._on_error is OnError.RAISE:
                raise BuildError(FailureStage.FETCH) from harmless(error)  # it isn't known which index failed
            fetching.fetch_one_by_one()
            self.counters.fetch_one_by_one()
            return False
        return True

    def _fetch_one_by_one(self, fetching: Fetching) -> None:
        """Fetch the remaining samples one by one. At any time, the list's length tells which one is being fetched."""
        dataset, samples, seeding = self._singles, fetching.samples, self._seeding
        hung = self._first_hung(fetching) if self._hung else None
        left = fetching.indices[len(samples) : hung] if samples or hung is not None else fetching.indices
        if self.timer.is_due:
            self.timer.fetch(dataset, left, samples, seeding)
        elif seeding.by_sample:
            for number, index in enumerate(left, len(samples)):
                seeding.begin_sample(number)
                samples.append(dataset[index])
        else:
            for index in left:
                samples.append(dataset[index])
        if hung is not None:
            raise TimeoutError(self._hung[fetching.epoch, fetching.index].why)

    def _first_hung(self, fetching: Fetching) -> int | None:
        """Return the position of the next sample at which a worker hung in this epoch; None if there is none left."""
        positions = range(len(fetching.samples), len(fetching.indices))
        return next((at for at in positions if (fetching.epoch, fetching.indices[at]) in self._hung), None)

    def _do_without(self, error: Exception, fetching: Fetching, failures: list[SampleFailed]) -> None:
        """Leave out or replace the failed sample, and record its failure.

        The exception is converted to a message at once: if it were kept, its traceback's frames would keep the samples.
        """
        index, position, replaced_by = fetching.index, len(fetching.samples), None
        if self._on_error is OnError.RAISE:
            raise BuildError(FailureStage.FETCH, index) from error
        if self._on_error is OnError.REPLACE:
            replaced_by = self._replace(error, fetching)
        else:
            position += len(failures)  # all of them were left out
            self._seeding.leave_out(fetching)
            self.counters.leave_out()
        failure = describe_failure(error, FailureStage.FETCH, self._definitions, index=index)
        failures.append(SampleFailed(position, replaced_by, failure))
        if not fetching.indices:
            raise BuildError(FailureStage.FETCH, failures=failures) from _nothing_left(error, fetching.epoch, failures)

    def _replace(self, error: Exception, fetching: Fetching) -> int:
        """Fetch another sample in place of the failed one; return its dataset index."""
        failed, others = fetching.index, list[str]()
        known = self._hung.get((fetching.epoch, failed))
        for attempt in range(known.num_replacements if known else 0, MAX_REPLACEMENTS if self._num_samples > 1 else 0):
            key = derive_key(fetching.seed, Purpose.REPLACEMENT.value, fetching.epoch, failed, attempt)
            index = (failed + 1 + key % (self._num_samples - 1)) % self._num_samples  # any index except `failed`
            if (fetching.epoch, index) in self._hung:
                others.append(f"{index} (hangs)")
                continue
            number = len(fetching.samples)
            self._seeding.replace(fetching, index)
            if self._seeding.by_sample:
                self._seeding.begin_sample(number)
            try:
                fetching.samples.append(self._singles[index])
                return index
            except Exception as other_error:
                others.append(f"{index} ({type_name(other_error)})")
        tried = (
            f"all samples that were tried failed, too: dataset indices {', '.join(others)}"
            if others
            else "the dataset has no other sample"
        )
        note = f"The loader found no replacement for dataset index {failed} (on_error='replace'): {tried}"
        raise BuildError(FailureStage.FETCH, failed, note=note) from error


class _Singles:
    """Adds `__getitem__` to a dataset that only has `__getitems__`."""

    def __init__(self, get_items: Callable[[list[int]], Sequence[Any]]) -> None:
        self._get_items = get_items

    def __getitem__(self, index: int) -> Any:
        return _check_count(self._get_items([index]), 1)[0]


def _has_own_get_item(dataset: Any) -> bool:
    """Return whether the dataset has a `__getitem__` other than torch's, which only raises NotImplementedError."""
    torch_data = sys.modules.get("torch.utils.data")
    method = getattr(type(dataset), "__getitem__", None)
    return method is not None and (torch_data is None or method is not torch_data.Dataset.__getitem__)


def _check_count(samples: Sequence[Any], expected: int) -> Sequence[Any]:
    if len(samples) != expected:
        raise ValueError(f"__getitems__ returned {len(samples)} samples for {expected} indices; return one per index")
    return samples


def harmless(error: Exception) -> Exception:
    """Return an exception that can be raised from `next` without ending the epoch, so no StopIteration."""
    if not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(
        "the dataset raised StopIteration, which would end the training loop's epoch early; raise another exception"
    )
    wrapped.__cause__ = error
    return wrapped


def _nothing_left(error: Exception, epoch: int, failures: Sequence[SampleFailed]) -> TooManyErrors:
    indices = [failed.failure.index for failed in failures]
    none_left = TooManyErrors(
        f"all {len(indices)} samples of a batch of epoch {epoch} failed (dataset indices {_shown(indices)}). A batch "
        f"can't be left out, because all ranks must have the same number of batches. Fix the samples, use a larger "
        f"batch_size, or pass on_error='replace'"
    )
    none_left.__cause__ = error
    return none_left


def _shown(indices: Sequence[int | None]) -> str:
    shown = ", ".join(str(index) for index in indices[:_MAX_SHOWN_INDICES])
    return f"{shown}, ..." if len(indices) > _MAX_SHOWN_INDICES else shown


# Where the samples come from ------------------------------------------------------------------------------------------


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
