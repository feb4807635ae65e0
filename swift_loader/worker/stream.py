"""The samples of torch's IterableDataset: a worker's shard, one batch after the other.

A shard is iterated once per generation, from its beginning or from where a snapshot was taken. It can't be rewound, so
what is drawn while it is iterated isn't keyed by sample: the generators are seeded when it begins, as torch does.

If the loader shares the stream out (`TorchMode.shard`), each worker iterates over the whole stream. Each rank keeps
every n-th sample, so all ranks must get the same samples in the same order. A turn is then the number of a batch in the
rank's part. Worker w of W builds the batches w, w + W, ..., and reads and drops those between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

from swift_loader.errors import noted
from swift_loader.runtime import is_interrupt
from swift_loader.sampling.permutation import Purpose, derive_key
from swift_loader.sampling.plan import PlanSettings
from swift_loader.transport.messages import FailureStage
from swift_loader.transport.task import Task
from swift_loader.worker.failure import BuildError
from swift_loader.worker.fetch import SAVES_NONE, Fetched, Samples, harmless
from swift_loader.worker.seeding import Fetching, GeneratorStates, Rng, Seeding, seed_generators
from swift_loader.worker.torch_worker import (
    Resume,
    Snapshot,
    StreamShard,
    TorchIdentity,
    TorchMode,
    TorchThread,
    TorchWorker,
    is_stateful,
)

# Which states a stream can be resumed from ----------------------------------------------------------------------------

# An `IterableDataset` of the `datasets` package is a case of its own:
# - Its state leaves out what is in a shuffle buffer, so such a stream is resumed by skipping batches.
# - Once it has loaded a state, it begins there in each epoch of that number, and a state of its end gives no samples.

_HUGGINGFACE = "datasets.iterable_dataset.IterableDataset"
_SHUFFLE_BUFFER = "BufferShuffledExamplesIterable"
"""Both are looked for by name: the package needn't be there, and nothing public tells of a buffer."""


@runtime_checkable
class Stateful(Protocol):
    """A dataset, sampler or iterator that says where it is and continues there. It needn't derive from this class."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position. It is pickled with the loader's state, so plain values are best."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was called."""


def has_exact_state(thing: Any) -> bool:
    """Return whether a dataset or an iterator can save a state that says all about where it is."""
    return is_stateful(thing) and not any(type(part).__name__ == _SHUFFLE_BUFFER for part in _parts(thing))


def is_huggingface(dataset: Any) -> bool:
    """Return whether a dataset is a stream of the `datasets` package."""
    return any(f"{kind.__module__}.{kind.__name__}" == _HUGGINGFACE for kind in type(dataset).__mro__)


def forget_state(dataset: Any) -> None:
    """Let a stream of the `datasets` package begin an epoch afresh. Leaves others alone: they know when one is over."""
    if is_huggingface(dataset):
        dataset.load_state_dict(None)


def settle(dataset: Any, iterator: Iterator[Any], state: Any) -> None:
    """Let a stream that has loaded the state of its end meet it, as some take a state only with the next pass.

    `iterator`: over the rest. With others, the state is that of the beginning that follows.
    """
    if not is_huggingface(dataset) and next(iterator, _NOTHING) is not _NOTHING:
        dataset.load_state_dict(state)


def _parts(dataset: Any) -> Iterator[Any]:
    """Yield what a stream of the `datasets` package is made of."""
    left = [getattr(dataset, "_ex_iterable", None)] if is_huggingface(dataset) else []
    while left:
        part = left.pop()
        if part is not None:
            yield part
            left += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]


class RankSamples:
    """The samples of one rank of a stream. The rank that a sample belongs to gets the error in its place."""

    def __init__(self, stream: Iterator[Any], shard: StreamShard, num_to_skip: int = 0) -> None:
        """`stream` gives the samples of all ranks in turn. `shard`: which ones are wanted.

        `num_to_skip`: how many samples other ranks still get before it is rank 0's turn.
        """
        self._stream = stream
        self._shard = shard
        self.num_to_skip = num_to_skip
        """How many samples other ranks get before it is rank 0's turn."""
        self._passed: Exception | None = None
        """The error of another rank's sample, which came just before."""

    def __iter__(self) -> RankSamples:
        return self

    def __next__(self) -> Any:
        self._finish_round()
        shard = self._shard
        for _ in range(shard.rank):
            self._pass()
        self.num_to_skip = shard.world_size - 1 - shard.rank
        if not shard.is_even:
            return self._next()
        try:
            sample = self._next()
        except StopIteration:
            raise
        except Exception:
            self._finish_round()
            raise
        self._finish_round()
        return sample

    def _next(self) -> Any:
        """Return the stream's next sample. A generator that has raised looks as if it were over: it can't go on."""
        passed, self._passed = self._passed, None
        try:
            return next(self._stream)
        except StopIteration:
            if passed is not None:
                raise passed from None
            raise

    def _finish_round(self) -> None:
        while self.num_to_skip:
            self.num_to_skip -= 1
            self._pass()

    def _pass(self) -> None:
        """Read a sample of another rank."""
        passed = self._passed
        try:
            self._next()
        except StopIteration:
            raise
        except Exception as error:
            if error is passed or is_interrupt(error):
                raise
            self._passed = error


# The samples of a worker ----------------------------------------------------------------------------------------------

_BEGINNING, _NOTHING = Resume(None), object()

_SAMPLE_BITS = 32
_BATCH_BITS = 40
"""Of what `sample_rng()` is keyed by: the number of the sample in its batch, and of the batch in its shard."""


class StreamEnd(Exception):
    """The shard has no batch left. It never leaves the process."""


class StreamSamples(Samples):
    """Samples of a worker's shard of a stream. None is measured: the samples of a stream have no index."""

    def __init__(self, dataset: Any, mode: TorchMode, seed: int, worker: TorchIdentity | None) -> None:
        """Get ready. See `KeyedSamples` for the arguments."""
        super().__init__(Seeding(Rng.NONE))
        self._dataset, self._saves_dataset = dataset, has_exact_state(dataset)
        self._mode = mode
        self._seed = seed
        self._worker = worker
        self._begin: tuple[Resume, int] | None = (_BEGINNING, 0)
        """Where the shard begins, and the turn of its first batch. None: it has begun."""
        self._iterator: Iterator[Any] | None = None
        """None: it has ended, or not begun."""
        self._wanted: Iterator[Any] = iter(())
        """This rank's samples of the iterator."""
        self._process = worker if isinstance(worker, TorchWorker) else None
        """None: a thread, which shares `get_worker_info()` with others."""
        # All workers of a shared stream read the same samples, also where these are random, but each collates other
        # batches. So what the stream draws from the global generators is kept apart from what `collate_fn` draws.
        self._draws_apart = mode.shard is not None and not isinstance(worker, TorchThread)  # else others draw meanwhile
        self._states: GeneratorStates | None = None
        """Those of the generators, as the stream has left them. None: it hasn't begun."""
        self.turn = 0
        """Of the next batch."""
        self._num_batches = 0
        """Batches so far, since the shard's own beginning."""

    def use_plan(self, plan: PlanSettings, resume: bytes | None = None, turn: int = 0) -> None:
        """Begin the shard anew with the next batch: at its beginning, or where a snapshot was taken."""
        self._begin = (_BEGINNING if resume is None else Resume.unpack(resume)), turn
        self._iterator = None
        self._seed = plan.order.seed
        self._states = None
        if self._worker is not None:
            self._worker.use_seed(self._seed)

    def fetch(self, task: Task) -> Fetched:
        """Return the samples of the next batch, or its only sample if batches aren't collated."""
        if not self._draws_apart:
            return self._fetch(task)
        if self._states is not None:
            self._states.restore()  # takes 30 us
        try:
            with nullcontext() if self._process is None else self._process.hidden():
                return self._fetch(task)
        finally:
            self._states = GeneratorStates.take()  # with the seeding, this takes 60 us
            seed_generators(derive_key(self._seed, Purpose.COLLATE.value, task.epoch, self._num_batches))

    def _fetch(self, task: Task) -> Fetched:
        self.state = None
        try:
            self._seek(task)
            samples = self._pull(task)
        except StreamEnd:
            raise
        except Exception as error:
            raise BuildError(FailureStage.FETCH) from harmless(error)
        every = self._mode.snapshot_every
        distance = 1 if self._mode.shard is None else self._mode.num_workers
        if every and not (self._num_batches - 1) // distance % every:
            try:
                self.state = self.snapshot().pack()
            except Exception as error:
                raise BuildError(FailureStage.SAVE) from noted(error, SAVES_NONE)
        return Fetched(samples.copy() if self._mode.auto_collation else samples[0], (), len(samples))

    def _seek(self, task: Task) -> None:
        """Make the task's batch the next one, by building and dropping those before it. Errors of those don't count."""
        turn = task.turn or 0
        if self._begin is not None:
            (resume, first_turn), self._begin = self._begin, None
            if self._mode.shard is None:
                self.turn = first_turn - self._open(resume)
            else:
                if self._draws_apart:  # the same draws in all workers
                    seed_generators(derive_key(self._seed, Purpose.WORKER.value, task.epoch))
                self._open(resume)
                self.turn = self._num_batches
        while self.turn < turn:
            try:
                self._pull(task)
            except StreamEnd:
                raise
            except Exception as error:  # the loop has had this batch's error before
                if is_interrupt(error):
                    raise
            finally:
                self.seeding.needs_rebuild()  # leave the batch

    def _open(self, resume: Resume) -> int:
        """Begin to iterate. Return how many batches are to be skipped then."""
        self._num_batches = 0
        if resume.snapshot is None:
            forget_state(self._dataset)
            self._iterate(iter(self._dataset))
            return resume.num_batches_to_skip
        snapshot = Snapshot.unpack(resume.snapshot)
        if not snapshot.num_batches and is_huggingface(self._dataset):
            forget_state(self._dataset)  # the state is that of the end of the epoch before
        elif snapshot.dataset is not None:
            self._dataset.load_state_dict(snapshot.dataset)
        if snapshot.has_ended:
            if snapshot.dataset is not None:
                settle(self._dataset, iter(self._dataset), snapshot.dataset)
            if resume.begins_anew:
                forget_state(self._dataset)
                self._iterate(iter(self._dataset))
            return 0
        iterator: Any = iter(self._dataset)
        if snapshot.iterator is not None:
            iterator.load_state_dict(snapshot.iterator)
        if resume.begins_anew:
            for _ in iterator:  # the state may be a few batches older; also, a generator takes it only now
                pass
            iterator = iter(self._dataset)
            snapshot = Snapshot(0)
        if snapshot.iterator is None and snapshot.dataset is None:
            self._iterate(iterator)
            return snapshot.num_batches + resume.num_batches_to_skip
        self._iterate(iterator, snapshot.num_to_skip)
        self._num_batches = snapshot.num_batches
        return resume.num_batches_to_skip

    def _iterate(self, iterator: Iterator[Any], num_to_skip: int = 0) -> None:
        """Take the samples from this iterator. Other ranks get `num_to_skip` ones first."""
        shard = self._mode.shard
        self._iterator = self._wanted = iterator
        self._saves_iterator = has_exact_state(iterator)
        if shard is not None and shard.world_size > 1:
            self._wanted = RankSamples(iterator, shard, num_to_skip)

    def _pull(self, task: Task) -> list[Any]:
        """Return the samples of the next batch: a list that is valid until the next one."""
        wanted, mode = self._wanted, self._mode
        if self._iterator is None:
            raise StreamEnd
        num_wanted = mode.batch_size if mode.auto_collation else 1
        samples = self.counters.begin(in_bulk=False)
        worker_id = 0 if self._worker is None or mode.shard is not None else self._worker.worker_id
        first = (worker_id << _BATCH_BITS | self._num_batches) << _SAMPLE_BITS
        self.seeding.begin(Fetching(self._seed, task.epoch, list(range(first, first + num_wanted)), samples))
        self.turn += 1
        self._num_batches += 1
        try:
            for _ in range(num_wanted):
                samples.append(next(wanted))  # not islice: it calls the iterator's `__iter__`, which may begin anew
        except StopIteration:
            self._iterator = None
            if not samples or mode.drop_last:
                raise StreamEnd from None
        return samples

    def snapshot(self) -> Snapshot:
        """Return where the stream is."""
        iterator, dataset = self._iterator, self._dataset
        worker_id = 0 if self._worker is None else self._worker.worker_id
        of_iterator = iterator.state_dict() if iterator is not None and self._saves_iterator else None  # type: ignore[attr-defined]
        of_dataset = dataset.state_dict() if iterator is not dataset and self._saves_dataset else None
        to_skip = self._wanted.num_to_skip if isinstance(self._wanted, RankSamples) else 0
        has_ended = iterator is None and self._begin is None
        return Snapshot(self._num_batches, has_ended, of_iterator, of_dataset, worker_id, to_skip)
