"""Builds the batches of an epoch in the loop's thread, with torch's own fetchers: `num_workers=0`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

# Private, but the only implementation of torch's fetching, and the same in all its versions.
from torch.utils.data.dataloader import _DatasetKind

from swift_loader.dataloader.draws import Draws
from swift_loader.dataloader.epoch import Epoch
from swift_loader.dataloader.indices import seed_pipe, shard_pipe
from swift_loader.dataloader.state import LoaderPosition, WorkerSnapshot
from swift_loader.metrics.metrics import Metrics
from swift_loader.worker.stream_shard import RankSamples, StreamShard
from swift_loader.worker.stream_state import forget_state, has_exact_state, is_huggingface, is_stateful


class InlineEpoch(Epoch):
    """One epoch. Draws and fetches one batch at a time, so the user's generators are used as with torch."""

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
        self._is_stream = loader._dataset_kind == _DatasetKind.Iterable  # noqa: SLF001
        self._length_called: int | None = loader._IterableDataset_len_called  # noqa: SLF001
        self._num_yielded = self._num_fetched = 0
        self._num_skipped = 0
        """Steps before the next batch that the loop didn't get: they came out of order, or building them failed."""
        self._skipped: set[int] = set()
        self._shard = shard
        self._metrics = metrics
        metrics.end_pass()
        self._sampler_state: tuple[Any, Any] | None = None
        saved = WorkerSnapshot()
        if resume is not None and resume.num_sharing and not resume.draws.is_over:
            saved = resume.latest(resume.next_batch)
        elif resume is not None and resume.workers:
            saved = resume.workers[0]
        given: Any = loader.dataset
        begins_epoch = resume is None or resume.draws.is_over
        if begins_epoch and is_huggingface(given):
            forget_state(given)
        elif saved.dataset_state is not None and is_stateful(given):
            given.load_state_dict(saved.dataset_state)  # first: it may set the global generators
        self._draws = Draws(loader, epoch, None if resume is None else resume.draws)
        if loader.timeout:  # torch's type, and as late as torch
            raise AssertionError(f"timeout={loader.timeout} needs num_workers > 0: nobody waits without workers")
        kind = loader._dataset_kind  # noqa: SLF001
        self._batches: bool = loader._auto_collation  # noqa: SLF001
        """False: each sample is a batch of its own."""
        seed_pipe(given, self._draws.pipe_seed)
        shard_pipe(given)
        fetch: Any = _DatasetKind.create_fetcher
        self._fetcher = fetch(kind, given, self._batches, loader.collate_fn, loader.drop_last)
        self._stream: Any = getattr(self._fetcher, "dataset_iter", iter(()))
        """The iterator over all ranks' samples."""
        if shard is not None:
            self._fetcher.dataset_iter = RankSamples(self._stream, shard)
        self._unused: WorkerSnapshot | None = None
        """Where the stream continues, until something was fetched: only then do some streams tell it themselves."""
        if resume is not None and not resume.draws.is_over:
            self._continue(resume, saved)

    def _continue(self, resume: LoaderPosition, saved: WorkerSnapshot) -> None:
        """Go to a position in the middle of an epoch."""
        self._num_yielded, self._sampler_state = resume.num_yielded, resume.draws.sampler_state
        if not self._is_stream:
            self._num_skipped = resume.draws.num_drawn - resume.num_yielded
            self._skipped = set(resume.ahead)
            return
        self._unused = saved
        if saved.iterator_state is not None:
            self._stream.load_state_dict(saved.iterator_state)
        if self._shard is not None:
            self._continue_shared(resume, saved, self._shard)
            return
        num_to_skip = saved.num_since if saved.has_state else resume.num_yielded
        if num_to_skip:
            self._unused = None
        for _ in range(num_to_skip):
            self._skip()
        self._fetcher.ended = saved.has_ended

    def _skip(self) -> None:
        drawn = self._draws.next()
        assert drawn is not None, "a stream's sampler is endless"
        self._fetcher.fetch(drawn.keys)

    def _continue_shared(self, resume: LoaderPosition, saved: WorkerSnapshot, shard: StreamShard) -> None:
        """Go to the next batch of a stream that the loader shares out. Errors on the way were the loop's before."""
        next_batch = resume.next_batch
        assert next_batch is not None, "checked when the state was loaded"
        if saved.has_state:
            self._fetcher.dataset_iter = RankSamples(self._stream, shard, saved.num_to_skip)
            self._num_fetched = saved.num_batches
        self._unused = replace(saved, next_batch=next_batch) if self._num_fetched == next_batch else None
        while self._num_fetched < next_batch and not saved.has_ended:
            self._num_fetched += 1
            try:
                self._skip()
            except StopIteration:
                break
            except Exception:  # noqa: S112 - the loop has had it
                continue
        self._fetcher.ended = self._fetcher.ended or saved.has_ended
        self._num_fetched = next_batch

    def next(self) -> Any:
        """Return the next batch. See `Epoch`. An interrupt comes out of the user's code, as with torch."""
        asked_ns = time.perf_counter_ns()
        self._metrics.note_asked(asked_ns)
        drawn = self._draws.next()
        while drawn is not None and drawn.step in self._skipped:
            self._num_skipped += 1
            self._sampler_state = drawn.sampler_state
            drawn = self._draws.next()
        if drawn is None:
            self.end()
            raise StopIteration
        self._unused = None
        began_ns = time.perf_counter_ns()
        try:
            batch = self._fetcher.fetch(drawn.keys)
        except StopIteration:
            self.end()
            raise
        except Exception:
            self._num_fetched += 1
            if not self._is_stream:  # the next batch is that of the next step, also after a resume
                self._num_skipped += 1
                self._sampler_state = drawn.sampler_state
            raise
        step = self._num_fetched if self._is_stream else drawn.step
        self._metrics.note_built_here(self.number, step, len(drawn.keys) if self._batches else 1, asked_ns, began_ns)
        self._num_fetched += 1
        self._num_yielded += 1
        self._sampler_state = drawn.sampler_state
        return batch

    def end(self) -> None:
        """Take the epoch as over. Idempotent."""
        self.is_over = True
        self._metrics.end_pass(time.perf_counter_ns())

    def position(self) -> LoaderPosition:
        """Return where the loop is."""
        num_done = self._num_yielded + self._num_skipped
        draws = self._draws.state_at(num_done, self._sampler_state, is_over=self.is_over)
        return LoaderPosition(
            num_workers=0,
            is_stream=self._is_stream,
            num_yielded=self._num_yielded,
            draws=draws,
            ahead=sorted(step for step in self._skipped if step >= num_done),
            workers=(self._snapshot(),),
            length_called=self._length_called,
            num_sharing=0 if self._shard is None else self._shard.world_size,
        )

    def _snapshot(self) -> WorkerSnapshot:
        dataset = self._fetcher.dataset
        if not self._is_stream:
            return WorkerSnapshot(dataset.state_dict() if is_stateful(dataset) else None)
        if self._unused is not None:
            return self._unused
        iterator = self._stream
        is_one = iterator is dataset
        saved = WorkerSnapshot(
            dataset.state_dict() if has_exact_state(dataset) and not is_one else None,
            iterator.state_dict() if has_exact_state(iterator) else None,
            self._fetcher.ended,
        )
        if self._shard is None:
            return saved
        wanted: RankSamples = self._fetcher.dataset_iter
        return replace(
            saved, num_batches=self._num_fetched, num_to_skip=wanted.num_to_skip, next_batch=self._num_fetched
        )
