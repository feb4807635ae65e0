"""Builds the batches of an epoch in the loop's thread: `num_workers=0`.

With torch's own fetchers; or as worker processes do, for a stream that the loader shares out, because all ranks must
read the same samples, and with a seed, which determines what samples draw. So another number of workers may go on.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from itertools import repeat
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

# Private, but the only implementation of torch's fetching, and the same in all its versions.
from torch.utils.data.dataloader import _DatasetKind

from swift_loader.dataloader.options import pinning_of, rng_of
from swift_loader.dataloader.state import LoaderPosition, WorkerSnapshot
from swift_loader.errors import noted
from swift_loader.executors.failures import rebuild, rebuild_sample
from swift_loader.metrics.metrics import Metrics
from swift_loader.ranks.ranks import expected_ranks
from swift_loader.runtime import is_interrupt
from swift_loader.sampling.plan import PlanSettings
from swift_loader.sampling.work import IndexWork, StreamWork, WorkSource
from swift_loader.scheduler.delivery import Delivery
from swift_loader.transport.by_value import NewDefinitions
from swift_loader.transport.task import IndexArray, Task
from swift_loader.worker import stream
from swift_loader.worker.failure import BuildError
from swift_loader.worker.fetch import SAVES_NONE, KeyedSamples
from swift_loader.worker.seeding import Rng, preserved_generators
from swift_loader.worker.torch_worker import StreamShard, TorchMode, is_stateful


class InlineWorkers:
    """Stands for the workers of one epoch. Builds a batch when it is asked for, so generators are used as with torch.

    It has no engine, since nothing is ever in flight.
    """

    fleet = close = None
    engine: Any = None
    may_stay = False
    num_ahead = 0

    def __init__(
        self, loader: DataLoader[Any], resume: LoaderPosition | None, shard: StreamShard | None, metrics: Metrics
    ) -> None:
        """Bring the dataset to where it continues. First of all, as its state may set the global generators.

        `shard`: this rank's part of a stream that the loader shares out.
        """
        self.shard, self._metrics, self._dataset = shard, metrics, loader.dataset
        metrics.end_pass()
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._saves = bool(getattr(loader, "snapshot_every_n_steps", 1))
        begins_epoch = resume is None or resume.draws.begins_epoch
        saved = WorkerSnapshot()
        if resume is not None:
            saved = resume.latest(None if begins_epoch or not resume.num_sharing else resume.next_batch)
        if begins_epoch or shard is None:
            _restore(loader.dataset, saved, begins_epoch=begins_epoch)
        has_place = saved.has_state and not begins_epoch
        self.begun = saved if has_place else WorkerSnapshot(self._own_state())
        """Where the stream continues or begins."""
        self._loader: DataLoader[Any] | None = loader
        """Until `begin`."""
        self._num_to_skip = 0 if begins_epoch else saved.num_since
        if resume is not None and not begins_epoch and not saved.has_state:  # earlier versions didn't count since
            self._num_to_skip = max(saved.num_since, resume.draws.num_drawn)
        self._unused = None if begins_epoch else saved
        """Where the stream continues, until something was fetched: only then do some streams tell it themselves."""
        self.num_begun: int | None = None
        """How many steps of the epoch were fetched, counting one that an exception has ended. None: none here."""
        self._built = Delivery()
        """What torch's fetcher has built last. It comes again if the loop hasn't got it, as not all can be repeated."""
        self._index: int | None = None
        """Of the sample that failed, if it is known: torch's fetcher doesn't say it."""

    def _own_state(self) -> Any:
        """Return the state of a stream that changes as it is read; None if it has none, or nobody saves it."""
        dataset: Any = self._dataset
        is_read = self._is_stream and self._saves
        if not is_read or not is_stateful(dataset) or stream.is_huggingface(dataset):
            return None
        with suppress(NotImplementedError):
            return deepcopy(dataset.state_dict())
        return None

    def begin(self, source: WorkSource, base_seed: int, resume: Mapping[int, bytes] | None) -> None:
        """Build the batches of a source from now on. `resume`: where the loader's share of a stream continues."""
        loader, self._loader = self._loader, None
        assert loader is not None, "it serves one epoch"
        if loader.timeout:  # torch's type, and as late as torch
            raise AssertionError(f"timeout={loader.timeout} needs num_workers > 0: nobody waits without workers")
        self._source = weakref.ref(source)  # which refers to this
        source.rewind()
        self._collate: Any = loader.collate_fn
        self._pin = pinning_of(loader, receives=False)
        self._is_moved = bool(loader._mover.depth)  # type: ignore[attr-defined] # noqa: SLF001
        self._keys: Any = [None] * (loader.batch_size or 1) if loader._auto_collation else None  # noqa: SLF001
        """Of a batch of a stream."""
        self._definitions = NewDefinitions() if getattr(loader, "on_error", "raise") == "skip" else None
        self._samples: Any = None
        """What fetches the samples of a shared stream, or seeds each of a map-style dataset. None: torch's fetcher."""
        self._leaves_generators = True
        """Whether fetching leaves the program's generators as they were."""
        size, batches = loader.batch_size or 1, loader._auto_collation  # noqa: SLF001
        mode = TorchMode(1, auto_collation=batches, batch_size=size, drop_last=loader.drop_last, shard=self.shard)
        is_keyed = getattr(loader, "_order_seed", None) is not None and rng_of(loader) is Rng.SAMPLE
        if self.shard is not None:
            self._samples = stream.StreamSamples(self._dataset, replace(mode, is_stream=True), base_seed, None)
            self._samples.use_plan(PlanSettings.of_seed(base_seed), (resume or {}).get(0), 0)
        elif is_keyed or self._definitions is not None:
            rng, self._leaves_generators = Rng.SAMPLE if is_keyed else Rng.NONE, is_keyed
            self._samples = KeyedSamples(self._dataset, mode, rng, base_seed, None, self._definitions)
            if self._samples.ahead is not None:
                self._samples.ahead.begins_here = True
        else:
            kind = loader._dataset_kind  # noqa: SLF001
            self._fetcher: Any = _DatasetKind.create_fetcher(
                kind, self._dataset, batches, loader.collate_fn, loader.drop_last
            )
            if self._is_stream and self._unused is not None:
                self._go_to(self._unused)

    def _go_to(self, saved: WorkerSnapshot) -> None:
        """Bring a stream to a position in the middle of an epoch."""
        if saved.iterator_state is not None:
            self._fetcher.dataset_iter.load_state_dict(saved.iterator_state)
        for _ in range(self._num_to_skip):
            self._unused = None
            try:
                self._fetcher.fetch(self._keys)
            except Exception as error:  # the loop has had it before
                if is_interrupt(error):
                    raise
        self._fetcher.ended = saved.has_ended
        if saved.has_ended and saved.dataset_state is not None:
            stream.settle(self._dataset, self._fetcher.dataset_iter, saved.dataset_state)

    def is_ready(self) -> bool:
        """False: no batch is moved ahead."""
        return False

    def next(self) -> Delivery:
        """Return the next batch on the host, the error in its place, or the end."""
        source, asked_ns = self._source(), time.perf_counter_ns()
        self._metrics.note_asked(asked_ns)
        work: Any = None if source is None else source.next()
        if work is None:
            return Delivery(is_end=True)
        if self.is_kept(work.step):
            return self._built
        self._unused, self._index, self.num_begun = None, None, work.step + 1
        built, began_ns, cpu_ns = Delivery(work), time.perf_counter_ns(), time.thread_time_ns()
        try:
            keys = self._keys if self._is_stream else work.indices
            keys = keys.to_list() if isinstance(keys, IndexArray) else keys
            num_samples = len(keys) if self._keys is not None else 1
            if self._samples is None:
                self._built = Delivery() if self._is_moved else built
                built.batch = self._fetcher.fetch(keys)
            else:
                self._build(built, keys)
            if built.error is None and self._pin is not None:
                built.batch = self._pin(built.batch)
        except Exception as error:
            if is_interrupt(error):
                raise
            if self._is_stream and isinstance(error, StopIteration):
                return Delivery(is_end=True)
            built.error = error
        if built.error is None:
            num_samples -= len(built.failures)
            built.number = self._metrics.note_inline(work.epoch, work.step, num_samples, asked_ns, began_ns, cpu_ns)
        return built

    def is_kept(self, step: int) -> bool:
        """Return whether the batch of this step, or the error in its place, is here still."""
        built = self._built
        is_whole = built.batch is not None or built.error is not None
        return is_whole and built.work is not None and built.work.step == step

    def _build(self, built: Delivery, keys: Any) -> None:
        """Build a batch as a worker does. Unless samples draw as they like, the program's generators stay."""
        samples, work, is_again = self._samples, built.work, True
        assert work is not None
        task = Task(0, 0, work.epoch, work.step, keys, turn=work.turn if isinstance(work, StreamWork) else None)
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
                    if is_interrupt(built.error):
                        raise built.error from None
                finally:
                    is_again = samples.seeding.needs_rebuild()
        if built.failures and built.error is None and self._definitions is not None:
            where = f", batch {work.step} of epoch {work.epoch}"
            errors = [rebuild(one.failure, "the calling thread", self._definitions, where) for one in built.failures]
            of = repeat(IndexWork(work.epoch, work.step, keys))
            built.failures = tuple(map(rebuild_sample, built.failures, of, errors))
            self._definitions.clear()

    def explained(self, delivery: Delivery) -> Delivery:
        """Say where an error comes from."""
        work = delivery.work
        if delivery.error is not None and work is not None:
            where = f"rank {expected_ranks(None).rank}, epoch {work.epoch}, batch {work.step}"
            noted(delivery.error, where if self._index is None else f"{where}, dataset index {self._index}")
        return delivery

    def end_pass(self) -> None:
        """Record that the loop met the end of the epoch."""
        self._metrics.end_pass(time.perf_counter_ns())

    @property
    def own_iterator(self) -> Any:
        """The dataset, if it is its own iterator, and can't begin again. Else None."""
        iterator = None if self._samples is not None else self._fetcher.dataset_iter
        return iterator if iterator is self._dataset and not is_stateful(iterator) else None

    def snapshot(self) -> WorkerSnapshot:
        """Return the state of the dataset after all that was fetched."""
        dataset: Any = self._dataset
        shared = self._samples if self._is_stream else None
        if self._unused is not None and self._is_stream:
            return self._unused
        if not self._saves:
            return WorkerSnapshot()
        try:
            if not self._is_stream:
                return WorkerSnapshot(dataset.state_dict() if is_stateful(dataset) else None)
            if shared is not None:
                return WorkerSnapshot.of(shared.snapshot())
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
