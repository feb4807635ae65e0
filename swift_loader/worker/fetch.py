"""Fetches the samples of a batch, and handles those that fail.

A sample fails if the dataset raises an `Exception` for it. What happens then depends on the sample alone, as the
sample's content does: not on the worker, and not on what that worker built before.

PlannedSamples   a map-style dataset, by the indices that the plan says
KeyedSamples     a map-style dataset, by whatever keys torch's sampler gives
StreamSamples    torch's IterableDataset: `worker.stream`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, cast

from swift_loader.batch.digests import digest_of, leaves_of
from swift_loader.batch.tree import type_name
from swift_loader.errors import OF_ALL_SAMPLES, EncodeError, TooManyErrors, noted
from swift_loader.runtime import is_interrupt
from swift_loader.sampling.integers import as_integer
from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.sampling.plan import Plan, PlanReader, PlanSettings
from swift_loader.transport.by_value import Definitions
from swift_loader.transport.messages import FailureStage, Hung, SampleFailed
from swift_loader.transport.segments import CounterWriter
from swift_loader.transport.task import IndexArray, LostKeys, Task
from swift_loader.worker.failure import BuildError, describe_failure
from swift_loader.worker.mapped import Ahead
from swift_loader.worker.seeding import Fetching, Rng, Seeding
from swift_loader.worker.torch_worker import Resume, Snapshot, TorchIdentity, TorchMode, is_stateful


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
    """What is collated: a list of samples, which the user's `collate_fn` may keep; in torch mode also what the dataset
    returned for the batch, or a single sample."""
    failures: Sequence[SampleFailed]
    """In the order of the batch. The caller still has to set their generation and sequence."""
    num_samples: int


_LONG_NS = 20_000
"""Samples that take so long are always measured: a reading of the clock takes 0.3 % of it."""

_EVERY = 64
"""Of batches with shorter samples, one of so many is measured."""

_INT64 = range(-(2**63), 2**63)


class Samples:
    """Gives the samples of a task, and finds the slowest one of each batch that it measures. Not thread-safe."""

    state: bytes | None = None
    """A packed `Snapshot` after the last batch, if one is due."""

    coming: Callable[[], Iterable[Task]] = tuple
    """Returns the tasks after the present one."""

    def __init__(self, seeding: Seeding, dataset: Any = None) -> None:
        self.seeding = seeding
        """Seeds the batches."""
        self.counters = CounterWriter()
        """Show how far the current batch is."""
        self.ahead = Ahead.of(dataset)
        """Stands for the dataset if it is mapped: reads samples before they are asked for."""
        if self.ahead is not None:
            self.ahead.counters = self.counters
            seeding.by_sample = True  # else what a sample draws makes the batch be read twice
        self.slow_index = 0
        """Dataset index of the slowest sample of the batch."""
        self.slow_ns = 0
        """How long it took; 0: not measured. The caller sets it to 0 before each batch."""
        self._is_measured = True
        """Whether to measure the samples of the next batch."""
        self._num_noted = 0

    def use_plan(self, plan: PlanSettings, resume: bytes | None = None, turn: int = 0) -> None:
        """Give the samples of another plan from now on; see `NewPlan`."""
        raise NotImplementedError

    def fetch(self, task: Task) -> Fetched:
        """Return the samples of a batch. Calls `Seeding.begin`; the caller calls `Seeding.needs_rebuild`.

        Raises `BuildError` if the user's code raised; `__cause__` is its exception. Raises `StreamEnd` if there is no
        batch left for this task.
        """
        raise NotImplementedError

    def _read_ahead(self, task: Task, keys_of: Callable[[Task], Sequence[Any]]) -> None:
        """Begin to read the samples of a task, and then those of the tasks after it. Only of a mapped dataset."""
        if self.ahead is not None:
            self.ahead.begin((task.generation, task.sequence), keys_of(task))
            self.ahead.follow(((one.generation, one.sequence), partial(keys_of, one)) for one in self.coming())

    def take_reads(self) -> tuple[int, int, bool]:
        """Return how long a batch has waited for reads, how long these took, and whether it reads ahead."""
        return (0, 0, False) if self.ahead is None else (*self.ahead.measured(), True)

    def note_batch(self, fetch_ns: int, num_samples: int) -> None:
        """Record how long it took to fetch a batch, which decides whether the next one is measured."""
        self._num_noted += 1
        self._is_measured = fetch_ns >= _LONG_NS * num_samples or not self._num_noted % _EVERY

    def _fetch_each(self, dataset: Any, keys: Sequence[Any]) -> None:
        """Append the samples of these keys. At any time, the list's length tells which one is being fetched.

        What the dataset raises comes out of it.
        """
        samples, seeding = self.counters.samples, self.seeding
        by_sample = seeding.by_sample
        if not self._is_measured and not by_sample:
            for key in keys:
                samples.append(dataset[key])
            return
        slow_key, slow_ns, clock = None, self.slow_ns, time.perf_counter_ns
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


def _keys_of(task: Task) -> Any:
    """Return the keys of a task. Raises `BuildError` if they couldn't be sent."""
    if isinstance(task.indices, LostKeys):
        raise BuildError(FailureStage.FETCH) from EncodeError(task.indices.reason)
    return task.indices.to_list() if isinstance(task.indices, IndexArray) else task.indices


# By the plan ----------------------------------------------------------------------------------------------------------

MAX_REPLACEMENTS = 10
"""How many other samples are tried as a replacement for one that fails."""

_MAX_SHOWN_INDICES = 8


class PlannedSamples(Samples):
    """Samples of a map-style dataset whose length is known."""

    def __init__(
        self,
        dataset: Any,
        num_samples: int,
        on_error: OnError,
        seeding: Seeding,
        definitions: Definitions,
        hung: Mapping[tuple[int, Any], Hung] | None = None,
        *,
        has_handlers: bool = False,
    ) -> None:
        """Prepare to fetch. `use_plan` comes before the first task.

        `hung`: the samples that fail, by epoch and dataset index. There may be more later. `has_handlers`: whether what
        a signal handler raises is the program's, and not an error of the sample that it interrupts.
        """
        super().__init__(seeding, dataset)
        self._reader: PlanReader | None = None
        self._has_handlers = has_handlers
        self._num_samples = num_samples
        self._on_error = on_error
        self._hung = {} if hung is None else hung
        self._definitions = definitions
        self._get_items: Any = None if self.ahead is not None else getattr(dataset, "__getitems__", None)
        self._gives_single_samples = _gives_single_samples(dataset)
        """Whether `__getitem__` gives the samples of `__getitems__`."""
        self._may_fail_singly = True
        """False: `__getitems__` returns whole batches, from which no sample can be left out."""
        has_singles = self._gives_single_samples or self._get_items is None
        self.singles: Any = self.ahead or (dataset if has_singles else _Singles(self._get_items))
        """Returns one sample for an index."""

    def use_plan(self, plan: PlanSettings, resume: bytes | None = None, turn: int = 0) -> None:  # noqa: ARG002
        """Give the samples of another plan from now on. There is no state to resume from."""
        self._reader = PlanReader(Plan.of(self._num_samples, plan))

    def fetch(self, task: Task) -> Fetched:
        """Return the samples of a batch."""
        indices, reader = self._indices(task), cast(PlanReader, self._reader)
        try:
            self._read_ahead(task, self._without_hung)
        except Exception as error:
            raise BuildError(FailureStage.FETCH) from error
        return self.fetch_indices(reader.plan.settings.order.seed, task.epoch, indices)

    def _indices(self, task: Task) -> list[int]:
        assert self._reader is not None, "use_plan comes first"
        is_planned = task.indices is None
        return self._reader.batch(task.epoch, task.step).indices.tolist() if is_planned else list(_keys_of(task))

    def _without_hung(self, task: Task) -> list[int]:
        """Return the indices that are to be read."""
        with suppress(BuildError):
            return [index for index in self._indices(task) if (task.epoch, index) not in self._hung]
        return []

    def fetch_indices(self, seed: int, epoch: int, indices: list[int]) -> Fetched:
        """Return these samples. The caller calls `Seeding.needs_rebuild`.

        Raises `BuildError` if a sample failed, and it can't be skipped or replaced; `__cause__` is its exception.
        """
        seeding = self.seeding
        get_items = None if seeding.by_sample and self._gives_single_samples else self._get_items
        samples = self.counters.begin(in_bulk=get_items is not None)
        is_keyed_apart = get_items is not None and self._gives_single_samples
        fetching = Fetching(seed, epoch, indices, samples, in_bulk=is_keyed_apart)
        seeding.begin(fetching)
        failures: list[SampleFailed] = []
        whole = None if get_items is None else self._fetch_in_bulk(fetching, get_items)
        if whole is None:
            while len(samples) < len(fetching.indices):
                try:
                    hung = self._first_hung(fetching) if self._hung else None
                    self._fetch_each(self.singles, fetching.indices[len(samples) : hung])
                    if hung is not None:
                        raise TimeoutError(self._hung[epoch, fetching.index].why)
                except Exception as error:
                    if self._has_handlers and is_interrupt(error):
                        is_done = len(samples) == len(fetching.indices)  # a handler raised behind the last one
                        raise BuildError(FailureStage.FETCH, None if is_done else fetching.index) from error
                    self._do_without(harmless(error), fetching, failures)
        return Fetched(samples.copy() if whole is None else whole, failures, len(samples))

    def _fetch_in_bulk(self, fetching: Fetching, get_items: Any) -> Any:
        """Return what `__getitems__` returns. None if a sample failed: then they must be fetched one by one."""
        indices = fetching.indices
        try:
            if self._hung and self._first_hung(fetching) is not None:
                raise TimeoutError  # so fetch them one by one
            fetched = get_items(list(indices))
            if isinstance(fetched, Sequence) or hasattr(type(fetched), "shape"):  # as arrays and tensors have
                _check_count(fetched, len(indices))
            if not isinstance(fetched, Sequence):  # it goes to the `collate_fn` as it is, as with torch
                self._gives_single_samples = self._may_fail_singly = False
            fetching.samples.extend([None] * len(indices))  # their number tells how far it is
        except Exception as error:
            is_programs = self._has_handlers and is_interrupt(error)
            if self._on_error is OnError.RAISE or not self._may_fail_singly or is_programs:
                raise BuildError(FailureStage.FETCH) from harmless(error)  # it isn't known which index failed
            fetching.fetch_one_by_one()
            self.counters.fetch_one_by_one()
            return None
        return fetched

    def _first_hung(self, fetching: Fetching) -> int | None:
        """Return the position of the next sample at which a worker hung in this epoch; None if there is none left."""
        positions = range(len(fetching.samples), len(fetching.indices))
        return next((at for at in positions if (fetching.epoch, fetching.indices[at]) in self._hung), None)

    def _do_without(self, error: Exception, fetching: Fetching, failures: list[SampleFailed]) -> None:
        """Leave out or replace the failed sample, and record its failure.

        The exception is converted to a message at once: if it were kept, its traceback's frames would keep the samples.
        """
        index, position, replaced_by = fetching.index, len(fetching.samples), None
        if self._on_error is OnError.RAISE or isinstance(error, OF_ALL_SAMPLES):
            raise BuildError(FailureStage.FETCH, index) from error
        if self._on_error is OnError.REPLACE:
            replaced_by = self._replace(error, fetching)
        else:
            position += len(failures)  # all of them were left out
            self.seeding.replace(fetching)
            self.counters.leave_out()
        failure = describe_failure(error, FailureStage.FETCH, self._definitions, index=index)
        failures.append(SampleFailed(position, replaced_by, failure))
        if not fetching.indices:
            raise _nothing_left(error, fetching.epoch, failures, ", or pass on_error='replace'")

    def _replace(self, error: Exception, fetching: Fetching) -> int:
        """Fetch another sample in place of the failed one; return its dataset index."""
        failed, others = fetching.index, list[str]()
        known = self._hung.get((fetching.epoch, failed))
        assert self._reader is not None, "use_plan comes first"
        first, num_others, taken_out = self._reader.plan.others(failed)
        for attempt in range(known.num_replacements if known else 0, MAX_REPLACEMENTS if num_others else 0):
            key = derive_key(fetching.seed, Purpose.REPLACEMENT.value, fetching.epoch, failed, attempt)
            place = (taken_out.place_of(failed - first) + key) % num_others
            index = first + taken_out.position_of(place)
            if (fetching.epoch, index) in self._hung:
                others.append(f"{index} (hangs)")
                continue
            number = len(fetching.samples)
            self.seeding.replace(fetching, index)
            if self.seeding.by_sample:
                self.seeding.begin_sample(number)
            try:
                fetching.samples.append(self.singles[index])
                return index
            except Exception as other_error:
                if isinstance(other_error, OF_ALL_SAMPLES) or (self._has_handlers and is_interrupt(other_error)):
                    raise BuildError(FailureStage.FETCH, index) from other_error
                others.append(f"{index} ({type_name(other_error)})")
        tried = (
            f"all samples that were tried failed, too: dataset indices {', '.join(others)}"
            if others
            else "the dataset has no other sample"
        )
        note = f"The loader found no replacement for dataset index {failed} (on_error='replace'): {tried}"
        raise BuildError(FailureStage.FETCH, failed, note=note) from error


def _gives_single_samples(dataset: Any) -> bool:
    """Return whether a dataset has a `__getitem__` of its own. torch's only raises `NotImplementedError`."""
    torch_data = sys.modules.get("torch.utils.data")
    return getattr(type(dataset), "__getitem__", None) not in (None, torch_data and torch_data.Dataset.__getitem__)


class _Singles:
    """Adds `__getitem__` to a dataset that only has `__getitems__`."""

    def __init__(self, get_items: Any) -> None:
        self._get_items = get_items

    def __getitem__(self, index: int) -> Any:
        return _check_count(self._get_items([index]), 1)[0]


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


def _nothing_left(error: Exception, epoch: int, failures: Sequence[SampleFailed], remedy: str = "") -> BuildError:
    indices = [failed.failure.index for failed in failures]
    shown = ", ".join(map(str, indices[:_MAX_SHOWN_INDICES])) + (", ..." if len(indices) > _MAX_SHOWN_INDICES else "")
    none_left = TooManyErrors(
        f"all {len(indices)} samples of a batch of epoch {epoch} failed (dataset indices {shown}). A batch can't be "
        f"left out, because all ranks must have the same number of batches. Fix the samples, or use a larger "
        f"batch_size{remedy}"
    )
    none_left.__cause__ = error
    failed = BuildError(FailureStage.FETCH, failures=failures)
    failed.__cause__ = none_left
    return failed


# By torch's sampler ---------------------------------------------------------------------------------------------------

POSITION_BITS = 32
"""Of a position's 64 bits, those that number the samples of a batch. The others number the batches."""


_LARGE_STATE = 1 << 16
"""A state of more bytes may be the data itself, as a TensorDict's. While it stays the same, it is sent once, and looked
at after 1, 2, 4, ... batches."""

SAVES_NONE = "saving the dataset's state failed; snapshot_every_n_steps=0 saves none"
"""A note of an error of its `state_dict`."""


class KeyedSamples(Samples):
    """Samples of a map-style dataset as torch fetches them: by any keys, without asking for its length.

    A batch is `dataset.__getitems__(keys)` if the dataset has that, else `[dataset[key] for key in keys]`. Random draws
    are keyed by the sample's position in the epoch, not by its key: a sampler may repeat a key, and each time other
    numbers must be drawn. Those of `__getitems__` are keyed by the position of the batch: what it returns needn't be
    samples.
    """

    def __init__(
        self,
        dataset: Any,
        mode: TorchMode,
        rng: Rng,
        seed: int,
        worker: TorchIdentity | None,
        skips_with: Definitions | None = None,
    ) -> None:
        """`dataset`: map-style. Its state, if it has one, is part of the snapshots. `mode`: how torch's workers do it.

        `seed`: the base seed that the generators were seeded with. `worker` None: nothing here is a worker.
        `skips_with`: describes the samples that fail, which are left out; None: they raise.
        """
        # A batch that is built twice would change the dataset's state twice.
        self._saves = is_stateful(dataset)
        super().__init__(Seeding(rng, builds_once=rng is Rng.SAMPLE and self._saves), dataset)
        self._dataset = dataset
        self._mode = mode
        self._seed = seed
        self._worker = worker
        gets_items = mode.auto_collation and self.ahead is None
        self._get_items: Any = getattr(dataset, "__getitems__", None) if gets_items else None
        self._skips_with = skips_with
        has_singles = not self._get_items or _gives_single_samples(dataset)
        self._singles: Any = self.ahead or (dataset if has_singles else _Singles(self._get_items))
        self._num_batches = self._save_at = self._distance = 0
        """How many batches there were, at which number the state is due, and how many came between the last two."""
        self._digests: list[bytes] | None = None
        """Of the leaves of the last state, if it is large."""

    def use_plan(self, plan: PlanSettings, resume: bytes | None = None, turn: int = 0) -> None:  # noqa: ARG002
        """Use another base seed from now on. Continue with the dataset's saved state, if there is one.

        Raises `BuildError` if the dataset doesn't accept its state.
        """
        self._seed = plan.order.seed
        if self._worker is not None:
            self._worker.use_seed(self._seed)
        self._num_batches, self._save_at, self._digests = 0, 0, None
        snapshot = Resume.unpack(resume).snapshot if resume is not None else None
        if snapshot is None:
            return
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
        keys, get_items, is_batch = _keys_of(task), self._get_items, self._mode.auto_collation
        samples = self.counters.begin(in_bulk=bool(get_items))
        try:
            listed = self._listed(task)
            self._read_ahead(task, self._listed)
        except Exception as error:
            raise BuildError(FailureStage.FETCH) from harmless(error)
        first = task.step << POSITION_BITS  # unique in the epoch
        self.seeding.begin(fetching := Fetching(self._seed, task.epoch, range(first, first + len(listed)), samples))
        fetched, failures = None, list[SampleFailed]()
        while True:
            try:
                if get_items:
                    if self.seeding.by_sample and listed:
                        self.seeding.begin_sample(0)
                    fetched = get_items(keys)
                    if self._skips_with is not None and not isinstance(fetched, Sequence):
                        self._skips_with = None  # these are whole batches, out of which none can be left
                else:
                    self._fetch_each(self._singles, listed[len(samples) :] if failures else listed)
                    fetched = samples.copy() if is_batch else samples[0]
                break
            except Exception as error:
                # A function for all samples doesn't say which one failed, and a handler may raise behind the last one.
                is_known = not get_items and len(samples) < len(listed)
                failed = listed[len(samples)] if is_known else None
                may_skip = self._skips_with is not None and not isinstance(error, OF_ALL_SAMPLES)
                if not may_skip or not (is_known or get_items) or is_interrupt(error):
                    raise BuildError(FailureStage.FETCH, failed if type(failed) is int else None) from harmless(error)
                if get_items:
                    get_items = None
                    fetching.fetch_one_by_one()
                    self.counters.fetch_one_by_one()
                else:
                    self._leave_out(error, fetching, listed, failures)
        self._num_batches += 1
        every = self._mode.snapshot_every
        if every and self._saves and self._num_batches >= self._save_at:
            try:
                worker_id = 0 if self._worker is None else self._worker.worker_id
                state = self._dataset.state_dict()
                packed = Snapshot(self._num_batches, dataset=state, worker_id=worker_id).pack()
                digests = [digest_of(one) for _, one in leaves_of(state)] if len(packed) > _LARGE_STATE else None
                stays = digests is not None and digests == self._digests
                self._digests, self.state = digests, None if stays else packed
                self._distance = 2 * self._distance if stays else every
                self._save_at = self._num_batches + self._distance
            except Exception as error:
                raise BuildError(FailureStage.SAVE) from noted(error, SAVES_NONE)
        return Fetched(fetched, failures, len(listed))

    def _listed(self, task: Task) -> list[Any]:
        return list(_keys_of(task)) if self._mode.auto_collation else [_keys_of(task)]

    def _leave_out(self, error: Exception, fetching: Fetching, keys: list[Any], failures: list[SampleFailed]) -> None:
        """Leave the sample that failed out of the batch, and record its failure."""
        assert self._skips_with is not None, "else it raises"
        number = len(fetching.samples)
        key, error = keys.pop(number), harmless(error)
        self.seeding.replace(fetching)
        self.counters.leave_out()
        failure = describe_failure(error, FailureStage.FETCH, self._skips_with, index=as_integer(key))
        failures.append(SampleFailed(number + len(failures), None, failure))
        if not keys:
            raise _nothing_left(error, fetching.epoch, failures)
