"""The iterator over one epoch of a DataLoader."""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.utils.data import dataloader as torch_iterators

from swift_loader.dataloader.options import num_samples_of, shows_its_worker
from swift_loader.dataloader.sources import LoaderSource, SamplerSource
from swift_loader.dataloader.state import LoaderPosition
from swift_loader.engine.iterator import IteratorState, LoopIterator, ShownIterator, Turn
from swift_loader.errors import ForkHangs, LoaderClosed, RankMismatch, SwiftLoaderError, TooManyErrors, WorkerDied
from swift_loader.executors.handle import Handle
from swift_loader.options import AutoWorkers
from swift_loader.ranks.agreement import RankVotes
from swift_loader.scheduler.delivery import Delivery
from swift_loader.worker.seeding import preserved_generators


class LoaderIterator(  # type: ignore[misc] # torch's `__iter__` is the same
    LoopIterator,
    torch_iterators._BaseDataLoaderIter,  # noqa: SLF001 - libraries look for it
):
    """Yields the batches of one epoch. When nobody refers to it any more, the workers are free.

    An error of the user's code takes the place of its batch: the next call continues with the batch after it.
    """

    _progress: LoaderSource

    def __init__(self, loader: Any) -> None:
        """Begin an epoch of a loader."""
        super().__init__(Turn())
        loader._iterators.append(weakref.ref(self, loader._iterators.remove))  # noqa: SLF001
        self._reset(loader)
        changed: Any = torch_iterators._BaseDataLoaderIter.__init__  # noqa: SLF001
        if getattr(changed, "__globals__", None) is not vars(torch_iterators):  # by a library, as SpeechBrain does
            before = None if loader.generator is None else loader.generator.get_state()
            with preserved_generators():  # torch's part of it draws a seed
                changed(self, loader)
            if loader.generator is not None and before is not None:
                loader.generator.set_state(before)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:  # noqa: ARG002 - as torch
        """Begin an epoch. With persistent workers, a loader has one iterator, as with torch.

        If the loop has left this epoch, the first batch is that of the next one.
        """
        self._stop(IteratorState.FRESH)
        source, passes_epoch = loader._begin()  # noqa: SLF001
        self._use(source)
        self._passes_epoch = passes_epoch
        self._loader: Any = weakref.ref(loader)
        self._kept = None if loader.persistent_workers else loader
        """Keeps the loader of `for batch in DataLoader(...)` alive, to begin again."""
        self._errors, self._num_samples = loader._errors, num_samples_of(loader)  # noqa: SLF001
        self._is_tuned = isinstance(loader.num_workers, AutoWorkers)
        self._index_sampler = loader._index_sampler  # noqa: SLF001 - for `len`, as torch
        self._dataset_name = str(type(loader.dataset).__name__)
        self._has_workers = bool(loader.num_workers)
        self._num_left_out = 0
        self._warns_of_length = True
        self._bar = None  # of `ShownIterator`

    def _use(self, source: LoaderSource) -> None:
        # No handler runs between these.
        self._progress = source
        self._passes_epoch = False
        self._engine = None if source.workers is None else source.workers.engine
        self._owner = None if self._engine is None else self._engine.owner
        if self._state is IteratorState.FAILED:  # another thread has closed the loader meanwhile
            source.shut_down()

    def _begin(self) -> None:
        """Begin. `set_epoch` may have been called since `iter`, and counts."""
        loader = self._loader()
        if loader is not None and (self._passes_epoch or self._progress.draws.is_stale):
            self._continue_at(loader, None if self._passes_epoch else self._progress.position())
        self._errors.warn()  # of a pass that the loop has left
        self._errors.begin(self._progress.number, self._num_samples)
        if self._state is IteratorState.FRESH:  # else another thread has closed the loader meanwhile
            self._state = IteratorState.ACTIVE

    def _take(self) -> Delivery:
        loader, recorded = self._loader(), None
        if self._is_tuned and loader is not None:
            loader._tune()  # noqa: SLF001
        if self._num_left_out:
            self._leave_out(loader)
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined] # noqa: SLF001
            recorded = torch.autograd.profiler.record_function("enumerate(DataLoader)#LoaderIterator.__next__")
            recorded.__enter__()
        try:
            source = self._progress
            delivery = source.take()
            if isinstance(delivery.error, ForkHangs) and source.votes is None:
                delivery = self._replace_forks(loader, delivery.error)
            elif source.votes is not None:
                delivery = self._voted(delivery, source.votes)
        finally:
            if recorded is not None:
                recorded.__exit__(None, None, None)
        length = source.length_called
        if length == source.num_got and self._warns_of_length and delivery.error is None and not delivery.is_end:
            self._warns_of_length = False
            self._warn_of_length(length)
        if delivery.failures and delivery.error is None:
            try:
                self._errors.note(delivery.failures)
            except TooManyErrors as error:
                source.close()
                self._fail(error)
        return delivery

    def _voted(self, delivery: Delivery, votes: RankVotes) -> Delivery:
        """Return the batch if all ranks have one, else the end. An error in a batch's place counts as one."""
        source = self._progress
        try:
            all_have = votes.all_have(not delivery.is_end, source.num_votes)
        except RankMismatch as mismatch:
            self._fail(mismatch)  # the epoch has ended
        source.num_votes += 1
        if not all_have:
            source.end()
            return Delivery(is_end=True)  # this rank's batch isn't lost: all end here
        if isinstance(delivery.error, ForkHangs):  # the ranks have voted, so the epoch can't go on with other workers
            error = WorkerDied(str(delivery.error))
            error.__cause__ = delivery.error
            return Delivery(error=error)
        return delivery

    def _give(self, delivery: Delivery) -> NoReturn:
        error, delivery.error = delivery.error, None  # its traceback refers to those who were here
        assert error is not None
        try:
            delivery.is_batch = False
            # No handler runs between these.
            if delivery.work is not None:
                self._progress.got = delivery
            self._is_dirty = False
            raise error
        finally:
            del error  # else it would be its own traceback that keeps it

    def _end(self) -> None:
        self._stop(IteratorState.DONE)
        self._progress.close()
        self._errors.warn()
        loader = self._loader()
        if loader is not None and not self._is_tuned:
            loader._observer.tell(loader)  # noqa: SLF001 - what would help, if the loop waited

    def _seek(self) -> None:
        before, loader = self._progress, self._loader()
        if before.can_continue():
            return
        if loader is None:
            raise SwiftLoaderError(
                "the loop was interrupted while it took a batch, and can't go on because its DataLoader is gone; keep "
                "a reference to the DataLoader"
            )
        position = before.position()
        is_bound = position.is_stream or shows_its_worker(loader)
        if position.num_workers != loader.num_workers and is_bound:  # `resize` counts from the next epoch on
            loader._stay_with(position.num_workers)  # noqa: SLF001
        again = before if isinstance(before, SamplerSource) and before.is_known else None
        self._continue_at(loader, position, again=again)
        self._progress.num_votes = before.num_votes

    def _replace_forks(self, loader: Any, error: ForkHangs) -> Delivery:
        """Have fresh interpreters go on where the loop is, as a fork of the program hangs. Return the next batch."""
        if loader is None:
            self._fail(error)
        try:
            self._continue_at(loader, self._progress.position(), error)
        except SwiftLoaderError:  # nothing takes its place
            self._stop(IteratorState.FAILED, error)
            raise
        return self._progress.take()

    def _leave_out(self, loader: Any) -> None:
        """Continue behind the batches that `_sampler_iter` has left out. With torch, they aren't built either."""
        number, self._num_left_out = self._num_left_out, 0
        source = self._progress
        position = source.position()
        draws = position.draws
        if position.is_stream:  # with torch, its samples don't depend on what is drawn
            return
        if loader is None or draws.sampler_state is not None:  # only drawing tells the state behind them
            for _ in range(number):
                delivery = source.take()
                if delivery.error is not None:
                    self._give(delivery)
                if not delivery.is_end:
                    delivery.batch = None
                    source.got = delivery
                    source.settle()
            return
        draws = replace(draws, num_drawn=draws.num_drawn + number)
        self._continue_at(loader, replace(position, draws=draws, num_yielded=position.num_yielded + number))

    def _continue_at(self, loader: Any, where: LoaderPosition | None, *hangs: ForkHangs, **again: Any) -> None:
        self._progress.close()
        self._use(loader._begin_epoch(where, *hangs, **again))  # noqa: SLF001

    def _warn_of_length(self, length: int) -> None:
        advice = (
            " For multiprocessing data-loading, this means that each worker's copy of the dataset gives everything: "
            "let it give only its share, see torch.utils.data.get_worker_info."
            if self._has_workers
            else ""
        )
        warnings.warn(
            f"Length of IterableDataset {self._dataset_name} was reported to be {length} (when accessing "
            f"len(dataloader)), but {self._num_yielded + 1} samples have been fetched.{advice}",
            stacklevel=4,
        )

    @property
    def _workers(self) -> list[Handle]:
        """The worker processes that serve this epoch now, or served it last. Programs look at torch's so."""
        if not self._has_workers:
            raise AttributeError(f"{type(self).__name__} has no _workers with num_workers=0")
        return self._progress.processes()

    def _shutdown_workers(self) -> None:
        """End the workers, as programs do it with torch's iterators. The next epoch gets new ones."""
        self._progress.shut_down()

    def _close(self) -> None:
        """End the workers, because the loader is closed. Any thread."""
        if self._state is not IteratorState.DONE:
            self._stop(IteratorState.FAILED, LoaderClosed("the loader was closed; iterate over it again"))
        if hasattr(self, "_progress"):  # else it begins
            self._progress.shut_down()

    @property
    def _index_queues(self) -> list[Handle]:
        """One for each worker: programs count torch's so."""
        return self._workers

    @property
    def _sampler_iter(self) -> Iterator[None]:
        """Each `next` of it leaves out a batch, as with torch's."""
        length = math.inf
        with suppress(Exception):  # a stream has none, nor may a sampler of the user's
            length = len(self)
        while self._progress.num_yielded + self._num_left_out < length:
            self._num_left_out += 1
            yield

    @_sampler_iter.setter
    def _sampler_iter(self, _: object) -> None:
        """Keep ours: torch's `__init__` sets it."""

    @property
    def _num_yielded(self) -> int:
        """How many batches of the epoch the loop has got, or were left out."""
        return self._progress.num_yielded + self._num_left_out

    @_num_yielded.setter
    def _num_yielded(self, _: object) -> None:
        """Keep ours: torch's `__init__` sets it."""

    def _next_data(self) -> Any:
        return next(self)

    def __repr__(self) -> str:
        return f"<LoaderIterator: {self._progress.describe()}>"

    # No weakref.finalize: that would keep the epoch, whose error may refer to this iterator. At exit, the names of
    # modules may be gone, and the workers end anyway.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and hasattr(self, "_progress"):
            self._progress.close()

    def __getstate__(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} can't be pickled; pickle the loader")


class ShownLoaderIterator(ShownIterator, LoaderIterator):  # type: ignore[misc]
    """The same with a bar."""

    def _place(self) -> tuple[int, int, int | None, int]:
        epoch, length = self._progress, None
        with suppress(Exception):  # a stream has none, nor may a sampler of the user's
            length = len(self)
        passes = self._passes_epoch
        return epoch.number + passes, 0 if passes else epoch.num_yielded, length, 0
