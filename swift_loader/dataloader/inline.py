"""Builds the batches of an epoch in the loop's thread: `num_workers=0`.

With torch's own fetchers; or as worker processes do, for a stream that the loader shares out, because all ranks must
read the same samples, and with a seed, which determines what samples draw. So another number of workers may go on.
"""

from __future__ import annotations

import time
import weakref
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from itertools import repeat
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

# Private, but the only implementation of torch's fetching, and the same in all its versions.
from torch.utils.data.dataloader import _DatasetKind

from swift_loader.dataloader.draws import Drawn, Draws
from swift_loader.dataloader.options import pinning_of, rng_of
from swift_loader.dataloader.shards import SharedShards
from swift_loader.dataloader.sources import LoaderSource
from swift_loader.dataloader.state import LoaderPosition, WorkerSnapshot
from swift_loader.errors import SwiftLoaderError, noted
from swift_loader.executors.failures import rebuild, rebuild_sample
from swift_loader.metrics.metrics import Metrics
from swift_loader.ranks.ranks import expected_ranks
from swift_loader.runtime import is_interrupt
from swift_loader.sampling.plan import PlanSettings
from swift_loader.scheduler.delivery import Delivery
from swift_loader.scheduler.work import IndexWork
from swift_loader.transport.by_value import NewDefinitions
from swift_loader.transport.task import Task
from swift_loader.worker import stream
from swift_loader.worker.failure import BuildError
from swift_loader.worker.fetch import SAVES_NONE, KeyedSamples
from swift_loader.worker.seeding import Rng, preserved_generators
from swift_loader.worker.torch_worker import StreamShard, TorchMode, is_stateful


class InlineSource(LoaderSource):
    """An epoch without workers.

    Draws and fetches one batch at a time, so without a seed, generators are used as with torch.
    """

    _drawn: Any = None
    """What the next batch is made of, a `Drawn`. None: draw it."""
    _built: Delivery | None = None
    """The next batch, or the error in its place, until the loop has got it."""
    _sampler_state: tuple[Any, Any] | None = None
    _leaves_generators = True
    """Whether fetching leaves the program's generators as they were."""

    def __init__(
        self,
        loader: DataLoader[Any],
        epoch: int,
        resume: LoaderPosition | None,
        metrics: Metrics,
        shard: StreamShard | None = None,
    ) -> None:
        """The loader's `collate_fn` may change between epochs. `epoch`: which one it is, if it resumes nothing.

        `shard`: this rank's part of a stream that the loader shares out.
        """
        self._num_fetched = self._num_skipped = 0
        """Steps before the next batch that the loop didn't get: they came out of order, or building them failed."""
        self._is_drawing = self._is_fetching = False
        """Whether the sampler is asked, or the dataset. After an exception there, an iterator gives nothing more."""
        self._skipped: set[int] = set()
        self._collate: Any = loader.collate_fn
        self._num_sharing = 0 if shard is None else shard.world_size
        self._pin, self._metrics = pinning_of(loader, receives=False), metrics
        metrics.end_pass()
        saved = WorkerSnapshot()
        self._dataset: Any = loader.dataset
        self._saves = bool(getattr(loader, "snapshot_every_n_steps", 1))
        begins_epoch = resume is None or resume.draws.begins_epoch
        if resume is not None:
            saved = resume.latest(None if begins_epoch or not resume.num_sharing else resume.next_batch)
        if begins_epoch or shard is None:
            _restore(self._dataset, saved, begins_epoch=begins_epoch)  # first: it may set the global generators
        self._begun_at = saved if saved.has_state else replace(saved, dataset_state=self._own_state())
        super().__init__(loader, Draws(loader, epoch, None if resume is None else resume.draws), resume)
        if loader.timeout:  # torch's type, and as late as torch
            raise AssertionError(f"timeout={loader.timeout} needs num_workers > 0: nobody waits without workers")
        self._batches: bool = loader._auto_collation  # noqa: SLF001
        """False: each sample is a batch of its own."""
        self._unused: WorkerSnapshot | None = None
        """Where the stream continues, until something was fetched: only then do some streams tell it themselves."""
        self._definitions = NewDefinitions() if getattr(loader, "on_error", "raise") == "skip" else None
        self._samples: Any = None
        """What fetches the samples of a shared stream, or seeds each of a map-style dataset. None: torch's fetcher."""
        size, drop_last, seed = loader.batch_size or 1, loader.drop_last, self.draws.begun.base_seed
        mode = TorchMode(1, auto_collation=self._batches, batch_size=size, drop_last=drop_last, shard=shard)
        if shard is not None:
            shards = SharedShards(1, resume, is_persistent=False)
            (self._num_fetched,) = shards.next_batches
            self._samples = stream.StreamSamples(self._dataset, replace(mode, is_stream=True), seed, None)
            self._samples.use_plan(PlanSettings.of_seed(seed), (shards.resume or {}).get(0), 0)
        elif (
            is_keyed := self.draws.seed is not None and rng_of(loader) is Rng.SAMPLE
        ) or self._definitions is not None:
            rng, self._leaves_generators = Rng.SAMPLE if is_keyed else Rng.NONE, is_keyed
            self._samples = KeyedSamples(self._dataset, mode, rng, seed, None, self._definitions)
        else:
            kind = loader._dataset_kind  # noqa: SLF001
            self._fetcher: Any = _DatasetKind.create_fetcher(
                kind, self._dataset, self._batches, loader.collate_fn, loader.drop_last
            )
        if self._resumed is not None:
            self._continue(self._resumed, saved)
        self._num_before = self._num_fetched
        if self._mover.depth:
            fetch = weakref.WeakMethod(self._fetch_drawn)  # else this would refer to itself
            self._pull = self._mover.ahead(self, lambda: fetch()(), bool)  # type: ignore[misc] # noqa: PLW0108 - it is there

    def _own_state(self) -> Any:
        """Return the state of a stream that changes as it is read; None if it has none, or nobody saves it."""
        dataset = self._dataset
        is_read = isinstance(dataset, IterableDataset) and self._saves
        if not is_read or not is_stateful(dataset) or stream.is_huggingface(dataset):
            return None
        with suppress(NotImplementedError):
            return deepcopy(dataset.state_dict())
        return None

    def _continue(self, resume: LoaderPosition, saved: WorkerSnapshot) -> None:
        """Go to a position in the middle of an epoch."""
        self._sampler_state = resume.draws.sampler_state
        self._num_skipped = resume.draws.num_drawn - resume.num_yielded
        self._skipped = set(resume.ahead)
        if not self._is_stream:
            return
        if self._samples is not None:
            self._unused = replace(saved, next_batch=self._num_fetched)
            return
        self._unused = saved
        if saved.iterator_state is not None:
            self._fetcher.dataset_iter.load_state_dict(saved.iterator_state)
        num_to_skip = saved.num_since if saved.has_state else resume.draws.num_drawn
        if num_to_skip:
            self._unused = None
        for _ in range(num_to_skip):
            drawn = self.draws.next()
            assert drawn is not None, "a stream's sampler is endless"
            try:
                self._fetcher.fetch(drawn.keys)
            except Exception as error:  # the loop has had it before
                if is_interrupt(error):
                    raise
        self._fetcher.ended = saved.has_ended
        if saved.has_ended and saved.dataset_state is not None:
            stream.settle(self._dataset, self._fetcher.dataset_iter, saved.dataset_state)

    def _fetch(self, drawn: Drawn) -> Delivery:
        """Return a batch. If samples draw by keys, it leaves the program's generators as they were."""
        if (samples := self._samples) is None:
            return Delivery(batch=self._fetcher.fetch(drawn.keys))
        task, is_again = Task(0, 0, self.number, drawn.step, drawn.indices, turn=self._num_fetched), True
        built = Delivery()
        with preserved_generators() if self._leaves_generators else nullcontext():
            while is_again:  # samples drew without their seeds
                try:
                    built.error, fetched = None, samples.fetch(task)
                    samples.seeding.begin_collate()
                    built.batch, built.failures = self._collate(fetched.samples), (*fetched.failures,)
                except stream.StreamEnd:
                    raise StopIteration from None
                except Exception as failed:
                    built.error = (failed.__cause__ or failed) if isinstance(failed, BuildError) else failed
                    self._index = failed.index if isinstance(failed, BuildError) else None
                finally:
                    is_again = samples.seeding.needs_rebuild()
                is_again = is_again and (built.error is None or not is_interrupt(built.error))
        if built.failures and built.error is None and self._definitions is not None:
            work, where = IndexWork(self.number, drawn.step, drawn.keys), f", batch {drawn.step} of epoch {self.number}"
            errors = [rebuild(one.failure, "the calling thread", self._definitions, where) for one in built.failures]
            built.failures = tuple(map(rebuild_sample, built.failures, repeat(work), errors))
            self._definitions.clear()
        return built

    def _fetch_drawn(self) -> Delivery:
        """Return the batch that was drawn, on the host."""
        began_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        built = self._fetch(drawn := self._drawn)
        if built.error is not None:
            return built
        if self._pin is not None:
            built.batch = self._pin(built.batch)
        step = self._num_fetched if self._is_stream else drawn.step
        num_samples = (len(drawn.keys) if self._batches else 1) - len(built.failures)
        built.number = self._metrics.note_inline(self.number, step, num_samples, self._asked_ns, began_ns, cpu_ns)
        if self._pull is not None and not self._is_stream:
            built.work = IndexWork(self.number, step, None)
        return built

    def take(self) -> Delivery:
        """Return the next batch, the error in its place, or the end. An interrupt comes out of the user's code."""
        self._asked_ns = time.perf_counter_ns()
        self._metrics.note_asked(self._asked_ns)
        drawn = self._drawn
        while drawn is None or drawn.step in self._skipped:
            if drawn is not None:
                self._num_skipped, self._sampler_state, self._drawn = self._num_skipped + 1, drawn.sampler_state, None
            self._is_drawing = True
            try:
                drawn = self._drawn = self.draws.next()
            except Exception as error:
                if is_interrupt(error):
                    raise
                self._is_drawing = False  # it is the sampler's error
                return Delivery(error=error)
            self._is_drawing = False
            if drawn is None:
                self.end()
                return Delivery(is_end=True)
        if self._built is None:
            self._unused = None
            self._index = None  # of the sample that fails, if it is known: torch's fetcher doesn't say it
            self._is_fetching = True
            built = self._fetched(drawn)
            # No handler runs between these.
            self._is_fetching = False
            if built.is_end:
                return built
            self._built = built
        return self._built

    def _fetched(self, drawn: Drawn) -> Delivery:
        try:
            delivery = self._fetch_drawn() if self._pull is None else self._pull()
        except StopIteration:
            self.end()
            return Delivery(is_end=True)
        except Exception as error:
            if is_interrupt(error):
                raise
            delivery = Delivery(error=error)
        if delivery.error is not None:
            where = f"rank {expected_ranks(None).rank}, epoch {self.number}, batch {drawn.step}"
            noted(delivery.error, where if self._index is None else f"{where}, dataset index {self._index}")
            delivery.work = IndexWork(self.number, drawn.step, None)
        return delivery

    def _count(self, got: Any) -> None:
        if (drawn := self._drawn) is not None:
            # No handler runs here.
            self._num_skipped += not got.is_batch  # the next batch is that of the next step, also after a resume
            self._num_fetched += 1
            self._sampler_state = drawn.sampler_state
            self._drawn = self._built = None

    def goes_on(self) -> bool:
        """Return whether the next `take` gives what the loop hasn't got.

        Raises `SwiftLoaderError` if the stream can't begin again.
        """
        is_amid = self._is_fetching and self._is_stream
        iterator = None if self._samples is not None else self._fetcher.dataset_iter if is_amid else None
        if iterator is self._dataset and not is_stateful(iterator):
            raise SwiftLoaderError(
                f"the loop was interrupted while it read the {type(iterator).__name__}, which is its own iterator and "
                f"can't begin again, so a batch may be lost. Begin a new epoch, or give the dataset a state_dict and a "
                f"load_state_dict"
            )
        return not (self._is_drawing or is_amid)

    def end(self) -> None:
        """Take the epoch as over. Idempotent."""
        self.is_over = True
        self._metrics.end_pass(time.perf_counter_ns())

    def position(self) -> LoaderPosition:
        """Return where the loop is."""
        self.settle()
        num_done = self.num_yielded + self._num_skipped
        ahead = sorted(step for step in self._skipped if step >= num_done)
        return self._at(num_done, self._sampler_state, ahead=ahead, workers=(self._snapshot(),))

    def _snapshot(self) -> WorkerSnapshot:
        dataset: Any = self._dataset
        if self._unused is not None:
            return self._unused
        begun = self._begun_at
        if self._is_stream and (self._is_fetching or self._built is not None):
            # Nobody knows how far it is, or it is beyond the loop: from where it began, all are read again.
            if self._samples is not None:
                return replace(begun, next_batch=self._num_fetched)
            num_read = self._num_fetched - self._num_before
            return replace(begun, num_since=begun.num_since + num_read, num_batches=begun.num_batches + num_read)
        shared = self._samples if self._is_stream else None
        if not self._saves:
            return WorkerSnapshot(next_batch=None if shared is None else shared.turn)
        try:
            if not self._is_stream:
                return WorkerSnapshot(dataset.state_dict() if is_stateful(dataset) else None)
            if shared is not None:
                return replace(WorkerSnapshot.of(shared.snapshot()), next_batch=shared.turn)
            iterator = self._fetcher.dataset_iter
            return WorkerSnapshot(
                dataset.state_dict() if stream.has_exact_state(dataset) and iterator is not dataset else None,
                iterator.state_dict() if stream.has_exact_state(iterator) else None,
                self._fetcher.ended,
            )
        except Exception as error:
            raise noted(error, SAVES_NONE)  # noqa: B904 - the user's own


def _restore(dataset: Any, saved: WorkerSnapshot, *, begins_epoch: bool) -> None:
    """Bring a dataset to a saved state. `begins_epoch`: an epoch begins there."""
    if begins_epoch and stream.is_huggingface(dataset):
        stream.forget_state(dataset)
    elif saved.dataset_state is not None and is_stateful(dataset):
        dataset.load_state_dict(saved.dataset_state)
        if begins_epoch and saved.has_ended:
            stream.settle(dataset, iter(dataset), saved.dataset_state)
